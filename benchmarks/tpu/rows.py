"""What the compiled programs do, as Markdown tables."""

from typing import Any

MEBI = 2**20


def lines(records: list[dict[str, Any]]) -> list[str]:
    """Two tables, of bytes and of memory, a row for each record."""
    return [*_table(_SENT, records), "", *_table(_MEMORY, records)]


def _table(columns: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    needed = "sent" if columns is _SENT else "memory"
    compiled = [x for x in records if needed in x]
    failed = [x for x in records if needed not in x]
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(_row(columns, x) for x in compiled),
        *(
            f"| {' | '.join(str(cell(x)) for cell in list(columns.values())[:4])} | "
            f"not compiled: {_reason(x['error'])} |"
            for x in failed
        ),
    ]


def _row(columns: dict[str, Any], record: dict[str, Any]) -> str:
    return f"| {' | '.join(str(cell(record)) for cell in columns.values())} |"


def _reason(error: str) -> str:
    return error.splitlines()[0].partition(" HLO module")[0][:160].replace("|", "/")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def _mebi(*path: str):
    def cell(record: dict[str, Any]) -> str:
        value: Any = record
        for name in path:
            value = value[name]
        return _number(value / MEBI)

    return cell


def _replicas(record: dict[str, Any]) -> str:
    if "inner" not in record:
        return ""
    inner = " x ".join(f"{size} {name}" for name, size in record["inner"].items())
    return f"{record['replicas']} of {inner}"


def _rebuilt(when: str):
    """The largest array that chips of a replica put together, and its part."""

    def cell(record: dict[str, Any]) -> str:
        found = record["largest"][f"inside, {when}"]
        if not found:
            return ""
        share = found[0]["whole"] / record["largest_parameter_bytes"]
        return f"{_number(found[0]['whole'] / MEBI)} ({share:.2f})"

    return cell


def _flag(record: dict[str, Any]) -> str:
    flag = record["flag"]
    if flag is None:
        return ""
    if flag["form"] == "all-reduce":
        return f"waits, at {flag['starts']:.0%}; used at {flag['used']:.0%}"
    return (
        f"from {flag['starts']:.0%} to {flag['ends']:.0%}, {flag['loops_between']} "
        f"loops and fusions between; used at {flag['used']:.0%}"
    )


_CASE = {
    "model": lambda x: x["case"]["size"],
    "chips": lambda x: x["case"]["place"],
    "replicas": _replicas,
    "optimizer": lambda x: x["case"]["optimizer"],
}
_SENT = _CASE | {
    "a replica sends to others at a sync, MiB": _mebi("across_bytes"),
    "counted": _mebi("counted_bytes"),
    "a chip sends inside, every step": _mebi("sent", "inside, always"),
    "more at a sync": _mebi("sent", "inside, at syncs"),
    "largest put together inside (of the largest parameter), every step": _rebuilt(
        "always"
    ),
    "at syncs": _rebuilt("at syncs"),
    "flag, as shares of the schedule": _flag,
}
_MEMORY = _CASE | {
    "compile, s": lambda x: round(x["compile_seconds"]),
    "parameters a chip, MiB": _mebi("parameter_bytes"),
    "arguments": _mebi("memory", "argument"),
    "results not in place": lambda x: _number(
        (x["memory"]["output"] - x["memory"]["alias"]) / MEBI
    ),
    "temporary": _mebi("memory", "temp"),
    "program": _mebi("memory", "generated_code"),
    "state returned elsewhere": lambda x: len(x["moved"]),
}
