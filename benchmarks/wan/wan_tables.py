"""The results as Markdown."""

from collections.abc import Iterable, Sequence

import compare
import grid
from compare import Results
from grid import BY_COMPILER, LINKS, METHODS, Case
from job import STEPS

from curvadion_jax import cost_model

WITHIN = 0.2


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    Examples:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _measured(results: Results) -> list[str]:
    return [name for name in LINKS if Case("link", name).key() in results]


def _ms(seconds: float | None) -> str:
    """Milliseconds, with three digits."""
    if seconds is None or seconds != seconds:
        return "-"
    return f"{float(f'{1000 * seconds:.3g}'):,g}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def links(results: Results) -> str:
    """What each link is like, for a stream and for one all-reduce."""
    rows = []
    sizes: dict[str, None] = {}
    for name in _measured(results):
        sizes |= dict.fromkeys(results[Case("link", name).key()]["messages"])
    for name in _measured(results):
        record = results[Case("link", name).key()]
        asked, got = record["conditions"], record["calibration"]
        link = cost_model.Link(asked["rate"], asked["round_trip"])
        cells = [name, str(asked["mtu"]), f"{got['stream'] / 1e6:.3g}"]
        cells.append(_ms(got["round_trip"]))
        for size in sizes:
            took = record["messages"].get(size)
            ideal = cost_model.ring_time(int(size), 2, link)
            cells.append(f"{_ms(took)} ({_ms(ideal)})")
        rows.append(cells)
    head = ["link", "packets, bytes", "TCP stream, Mbit/s", "round trip, ms"]
    head += [f"all-reduce of {int(size):,} bytes, ms" for size in sizes]
    return markdown(head, rows)


def steps(results: Results) -> str:
    """Wall-clock time of a step, and the speedup over synchronous AdamW."""
    rows = []
    for link in _measured(results):
        cells = [link]
        for name in METHODS:
            cell = _ms(compare.step_time(link, name, results))
            if name != "adamw":
                cell += f" ({_times(compare.speedup(link, name, results))})"
            cells.append(cell)
        rows.append(cells)
    return markdown(["link", *(method.label for method in METHODS.values())], rows)


def kinds_of_steps(results: Results) -> str:
    """Quiet steps and those with a sync, of all programs."""
    rows = []
    names = [*METHODS, BY_COMPILER]
    found = {name: compare.alone(name, results) for name in names}
    both = [("none, nothing is sent", found)]
    both += [
        (link, {name: compare.over(link, name, results) for name in names})
        for link in _measured(results)
    ]
    for link, by_name in both:
        cells = [link]
        for found in by_name.values():
            if found is None:
                cells.append("-")
            elif found.local != found.local:
                cells.append(_ms(found.synced))
            else:
                cells.append(f"{_ms(found.local)} / {_ms(found.synced)}")
        rows.append(cells)
    labels = [method.label for method in METHODS.values()]
    labels.append("synchronous AdamW, an all-reduce for each array")
    return markdown(["link", *labels], rows)


def times_to_loss(results: Results) -> str:
    """Seconds to the loss that all reach."""
    loss = compare.target(results)
    if loss is None:
        return "Not all methods have been trained to the end."
    runs = {name: compare.whole(name, results) for name in METHODS}
    head, needed, last = ["link"], ["steps (syncs)"], ["loss at the end"]
    for name, run in runs.items():
        head.append(METHODS[name].label)
        count = compare.steps_to(loss, run) if run else None
        syncs = sum(run.synced[:count]) if run and count else 0
        needed.append(f"{count} ({syncs})")
        last.append(f"{run.validation[-1][1]:.4f}" if run else "-")
    rows = [last, needed]
    for link in _measured(results):
        seconds = {x: compare.time_to(loss, link, x, results) for x in METHODS}
        cells = [link]
        for name, value in seconds.items():
            cell = "-" if value is None else f"{value:.3g}"
            base = seconds["adamw"]
            if name != "adamw" and value is not None and base is not None:
                cell += f" ({base / value:.2f})"
            cells.append(cell)
        rows.append(cells)
    return f"Validation loss {loss:.4f}.\n\n{markdown(head, rows)}"


def bytes_sent(results: Results) -> str:
    """Counters of the link against those of `metrics`."""
    rows = []
    for name in (*METHODS, BY_COMPILER):
        for link in _measured(results):
            found = compare.sent(link, name, results)
            if found is None:
                continue
            label = METHODS[name].label if name in METHODS else name
            ratios = [found.payload / found.counted, found.wire / found.counted]
            rows.append(
                [
                    *(label, link, f"{found.counted:,.0f}"),
                    *(f"{100 * (ratio - 1):+.1f}%" for ratio in ratios),
                    str(found.retransmitted),
                ]
            )
    head = ["method", "link", "counted, bytes", "carried by TCP", "with headers"]
    return markdown([*head, "segments sent again"], rows)


def predictions(results: Results) -> str:
    """Measured step times over those of three models."""
    rows, close, count = [], [0, 0, 0], 0
    for link in _measured(results):
        for name in METHODS:
            took = compare.step_time(link, name, results)
            said = compare.predicted(link, name, results)
            if took is None or said is None:
                continue
            count += 1
            cells = [link, METHODS[name].label, _ms(took)]
            for index, seconds in enumerate(said):
                close[index] += abs(took / seconds - 1) <= WITHIN
                cells.append(f"{_ms(seconds)} ({took / seconds:.2f})")
            rows.append(cells)
    rows.append(["within 20%", f"of {count}", "", *(f"{number}" for number in close)])
    models = ["`cost_model`, nominal link", "`cost_model`, measured link"]
    models.append("each message as measured alone")
    return markdown(["link", "method", "step, ms", *models], rows)


def partitions(results: Results) -> str:
    """What a partition did to a run."""
    rows = []
    for case in grid.PLANS["partition"]:
        if (record := results.get(case.key())) is None:
            continue
        after = record["next_step_after_join"]
        ended = ", ".join(f"{x:.0f} s" for x in record["ended_after_cut"])
        rows.append(
            [
                case.name,
                f"{case.value:.0f} s",
                ", ".join(str(status) for status in record["status"]),
                ", ".join(str(number) for number in record["steps"]),
                "none" if after is None else f"{after:.1f} s",
                ended,
                " / ".join(_said(text) for text in record.get("output", ())) or "-",
            ]
        )
    head = ["link", "heartbeat timeout", "exit statuses", "steps done"]
    head += ["next step after the link is back", "processes ended after the cut"]
    head.append("they say")
    return markdown(head, rows)


def _said(output: str) -> str:
    """The reason in what a process printed at its end."""
    _, found, after = output.rpartition("absl::Status: ")
    return after.partition("\n")[0].rstrip(":") if found else "nothing"


def learning_rates(results: Results) -> str:
    """Validation loss at the end, by learning rate."""
    rows = []
    for name, method in METHODS.items():
        for rate in sorted(method.rates):
            record = results.get(Case("loss", name, rate).key())
            if record is None:
                continue
            loss = record["methods"][name]["validation_loss"][-1]
            rows.append([method.label, f"{rate:g}", f"{loss:.4f}"])
    return markdown(["method", "learning rate", f"loss after {STEPS} steps"], rows)


def document(results: Results) -> str:
    """All tables, each under its heading."""
    apart = compare.loss_differences(results)
    parts = {
        "Time of a step, ms (speedup over synchronous AdamW)": steps(results),
        "Seconds to a loss (speedup over synchronous AdamW)": times_to_loss(results),
        "Links, and one all-reduce, ms (by `cost_model`)": links(results),
        "Steps, local / with a sync, ms": kinds_of_steps(results),
        "Step times and models (measured over predicted)": predictions(results),
        "Bytes on the wire, over those counted": bytes_sent(results),
        "A partition of 30 s": partitions(results),
        "Learning rates": learning_rates(results),
    }
    text = "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items())
    return (
        f"{text}\n\nTraining losses of the {apart.runs} runs over links differ between "
        f"links by {apart.between:.1e} at most, and in the first ten steps by "
        f"{apart.without:.1e} from those of one process without a link.\n"
    )
