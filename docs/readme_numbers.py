"""Print the numbers of the README that the study's table does not have.

python docs/readme_numbers.py
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "study"))

import rows
import study
import table


def spread(numbers: list[float], digits: int = 1) -> str:
    """Mean, standard deviation and, in brackets, the number of each seed."""
    each = ", ".join(f"{x:.{digits}f}" for x in numbers)
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f} ({each})"


def main() -> None:
    """Run the program."""
    results = study.read()

    def losses(method: str, steps: int = study.STEPS) -> dict[int, dict]:
        return table.by_seed(results, method, steps)

    local = losses(rows.LOCAL_MUON)
    print("percent, by seed 0, 1, 2")
    for name, others in {
        "local_muon against AdamW": losses(rows.ADAMW),
        "local_muon against rising Muon": losses(rows.MUON + rows.RISING),
        "local_muon against Muon": losses(rows.MUON),
    }.items():
        print(f"  {name}: {spread(table.above(local, others))}")
    muloco = table.above(losses("MuLoCo, 2 bits"), local)
    print(f"  MuLoCo in 2 bits against local_muon: {spread(muloco)}")

    for name in (rows.LOCAL_MUON, rows.TWO_BITS):
        found = losses(name)
        print(f"steps of synchronous Muon for the loss of {name}, and break-even")
        for method in (rows.MUON, rows.BEST_MUON):
            short, long = losses(method, study.QUARTER), losses(method)
            shares = [
                table.steps_to(row["loss"], short[seed]["loss"], long[seed]["loss"])
                for seed, row in sorted(found.items())
                if seed in short and seed in long
            ]
            print(f"  {method}: {spread([100 * x for x in shares])}%")
            print(f"    its step may take {spread([1 / x for x in shares], 2)}")

    print("change of the gap from 260 to 1,040 steps, points, by seed 0, 1, 2")
    for name in (rows.LOCAL_MUON, rows.TWO_BITS):
        for other in (rows.MUON, rows.BEST_MUON):
            short, long = (
                table.above(losses(name, n), losses(other, n))
                for n in (study.QUARTER, study.STEPS)
            )
            change = [b - a for a, b in zip(short, long, strict=True)]
            print(f"  {name} against {other}: {spread(change)}")

    print("percent above rising Muon, by seed 0, 1, 2")
    others = (
        *(rows.LOCAL_MUON, rows.LOCAL_MUON + rows.RISING, rows.LARGE_BATCH),
        *(rows.TWO_BITS, rows.BEST_MUON + rows.OUTER, rows.MULOCO),
        *(rows.MULOCO + rows.FOR_EIGHT, rows.MULOCO + ", 2 bits"),
        rows.MULOCO + rows.FOR_EIGHT + ", 2 bits",
    )
    best = losses(rows.BEST_MUON)
    for name in others:
        print(f"  {name}: {spread(table.above(losses(name), best))}")


if __name__ == "__main__":
    main()
