"""Plain-text tables of the projections.

They are what `python -m curvadion_jax.cost_model` prints.
"""

from curvadion_jax.cost_model._projections import (
    ACROSS_DATA_CENTRES,
    FAST_INFINIBAND,
    published_projections,
    published_sensitivity,
    within_tolerance,
)


def projections_table() -> str:
    """The comparison with the paper, one link a line.

    Returns:
      The table, without a newline at its end. "comes out" gives the answer for no
      overlap, then for full overlap.

    Examples:
      >>> from curvadion_jax.cost_model import projections_table
      >>> row = projections_table().splitlines()[3]
      >>> [cell.strip() for cell in row.split("|")]
      ['InfiniBand NDR', '400', '0.0012', '1.02', '1.08', '1.00', 'no / yes']
    """
    head = (
        "link",
        "Gb/s",
        "RTT ms",
        "paper",
        "no overlap",
        "full overlap",
        "comes out",
    )
    rows = [
        (
            row.name,
            f"{row.link.bandwidth / 1e9:g}",
            f"{row.link.round_trip_time * 1e3:g}",
            "-" if row.paper is None else f"{row.paper:.2f}",
            f"{row.ours:.2f}",
            f"{row.ours_overlapped:.2f}",
            f"{_answer(row.comes_out)} / {_answer(row.comes_out_overlapped)}",
        )
        for row in published_projections()
    ]
    return _table(head, rows, left={0, 6})


def sensitivity_table() -> str:
    """Speedups without overlap as one input varies, one input a line.

    Returns:
      The table, without a newline at its end. A star marks what lies within 5% of
      the paper's projection (1.02 and 4.36).

    Examples:
      >>> from curvadion_jax.cost_model import sensitivity_table
      >>> row = sensitivity_table().splitlines()[2]
      >>> [cell.strip() for cell in row.split("|")]
      ['sync rate', '0.67%, 1%, 3%', '1.08, 1.08, 1.07', '4.99, 4.92, 4.53*']
    """
    head = ("input", "values", "InfiniBand NDR", "regions, US east-west")
    rows = [
        (
            row.name,
            ", ".join(row.values),
            _starred(row.fast, FAST_INFINIBAND),
            _starred(row.slow, ACROSS_DATA_CENTRES),
        )
        for row in published_sensitivity()
    ]
    return _table(head, rows, left={0, 1, 2, 3})


def _starred(speedups: tuple[float, ...], paper: float) -> str:
    return ", ".join(
        f"{ours:.2f}{'*' if within_tolerance(ours, paper) else ''}" for ours in speedups
    )


def _answer(comes_out: bool | None) -> str:
    return {None: "-", True: "yes", False: "no"}[comes_out]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: set[int]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return " | ".join(padded).rstrip()

    rule = "-|-".join("-" * width for width in widths)
    return "\n".join([line(head), rule, *map(line, rows)])
