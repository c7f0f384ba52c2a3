"""Prints the comparison with the paper and its sensitivity: docs/projections.md."""

from curvadion_jax.cost_model import projections_table, sensitivity_table

if __name__ == "__main__":
    print(projections_table())
    print()
    print(sensitivity_table())
