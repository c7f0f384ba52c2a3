"""What a run's objects tell about it, without taking part.

Times are the store's own, at which it made the objects.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from curvadion_jax.sites import _messages, _rounds
from curvadion_jax.sites._store import Store

# Rounds over which rates are taken.
RECENT = 20


class Round(NamedTuple):
    """A committed round: its commit, and when it was made."""

    commit: dict[str, Any]
    at: datetime


class Status(NamedTuple):
    """What is known of a run.

    Attributes:
      url: of the run.
      quorum: of the run.
      rounds: the last ones, in order.
      members: see `_rounds.Members`.
      waiting: names that have posted to the round that is not committed.
      sizes: name -> bytes of its newest contribution that is still there.
    """

    url: str
    quorum: int
    rounds: list[Round]
    members: _rounds.Members
    waiting: list[str]
    sizes: dict[str, int]


def read(url: Any, last: int | None = RECENT) -> Status:
    """Looks at a run.

    Raises:
      ValueError: if there is none.
      RuntimeError: if it is of another format, or damaged.
      OSError: if the store cannot be read.
    """
    store = Store(url, make=False)
    data = store.get(_rounds.RUN)
    if data is None:
        raise ValueError(f"there is no run at {store.url}")
    run = _messages.as_object(data)
    _messages.check_format(run, "the run")
    found = store.objects(_rounds.COMMITS)
    rounds = []
    for meta in found if last is None else found[-last:]:
        number = int(Path(meta["path"]).stem)
        commit = _rounds.read_commit(store.get(meta["path"]) or b"", number)
        rounds.append(Round(commit, meta["last_modified"]))
    current = _rounds.post_key(len(found))
    posts = store.objects(_rounds.ROUNDS)
    return Status(
        url=store.url,
        quorum=run["quorum"],
        rounds=rounds,
        members=_rounds.members(store.keys(_rounds.MEMBERS)),
        waiting=[
            meta["path"].removeprefix(current)
            for meta in posts
            if meta["path"].startswith(current)
        ],
        sizes={meta["path"].rpartition("/")[2]: meta["size"] for meta in posts}
        | _in_parts(store),
    )


def _in_parts(store: Store) -> dict[str, int]:
    """name -> bytes of the newest contribution that is so large."""
    sizes: dict[tuple[str, str], int] = {}
    for meta in store.objects(f"parts/{_rounds.ROUNDS}"):
        number, name = meta["path"].split("/")[2:4]
        sizes[number, name] = sizes.get((number, name), 0) + meta["size"]
    return {name: size for (_, name), size in sorted(sizes.items())}


def table(status: Status) -> str:
    """The run and its sites, as text."""
    rounds = status.rounds
    if not rounds:
        return (
            f"{status.url}: no round is committed yet\nposted to the first: "
            f"{', '.join(status.waiting) or 'nobody'}; it needs {status.quorum}"
        )
    last = rounds[-1].commit["round"]
    lines = [
        f"{status.url}: {last + 1} rounds, the last, {last}, at "
        f"{rounds[-1].at:%Y-%m-%d %H:%M:%S} UTC; posted to the next: "
        f"{', '.join(status.waiting) or 'nobody'}",
        f"{'':16} {'':8} {f'of the last {len(rounds)}':>15} {'counted last in':>15} "
        f"{'':>10} {'bytes a round':>23}",
        f"{'site':16} {'state':8} {'counted in':>15} {'round':>8} {'weight':>6} "
        f"{'tokens/s':>10} {'up':>11} {'down':>11}",
    ]
    seconds = (rounds[-1].at - rounds[0].at).total_seconds()
    for name in sorted(status.members.newest):
        found = {each.commit["round"]: _entry(each.commit, name) for each in rounds}
        ours = {number: entry for number, entry in found.items() if entry}
        newest = max(ours, default=None)
        # The first round's tokens were seen before the time began.
        first = rounds[0].commit["round"]
        tokens = sum(entry["tokens"] for n, entry in ours.items() if n > first)
        others = sum(
            status.sizes.get(entry["name"], 0)
            for entry in rounds[-1].commit["contributors"]
            if entry["name"] != name
        )
        weight = "-" if newest is None else f"{ours[newest]['weight']:.2f}"
        lag = None if newest is None else last - newest
        lines.append(
            f"{name:16} {_state(status, name, lag):8} {len(ours):>15} "
            f"{'-' if newest is None else newest:>8} {weight:>6} "
            f"{f'{tokens / seconds:,.0f}' if seconds else '-':>10} "
            f"{status.sizes.get(name, 0):>11,} {others:>11,}"
        )
    rejected = [
        f"round {each.commit['round']}: the contribution of {entry['name']} is not "
        f"counted: {entry['why']}"
        for each in rounds
        for entry in each.commit["rejected"]
    ]
    return "\n".join(lines + rejected)


def draw(rounds: Sequence[Round], path: Path) -> None:
    """Who contributed when, and how much it counted: an area for each site and round.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install 'curvadion-jax[examples]'"
        ) from error
    start = rounds[0].at
    parts = ("contributors", "rejected")
    names = sorted({e["name"] for r in rounds for p in parts for e in r.commit[p]})
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    for part, style in (("contributors", "o"), ("rejected", "x")):
        points = [
            ((r.at - start).total_seconds(), names.index(e["name"]), e.get("weight", 1))
            for r in rounds
            for e in r.commit[part]
        ]
        if points:
            x, y, weights = zip(*points, strict=True)
            sizes = [30 * weight for weight in weights]
            axes.scatter(x, y, sizes, marker=style, label=f"{part}, by weight")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds since the first round shown, by the store's clock")
    axes.set_title(f"{len(rounds)} rounds", loc="left")
    figure.legend(loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=150)


def _entry(commit: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((e for e in commit["contributors"] if e["name"] == name), None)


def _state(status: Status, name: str, lag: int | None) -> str:
    if name in status.members.gone:
        return "left"
    if name in status.waiting or (lag is not None and lag <= _rounds.FORGET):
        return "here"
    return "silent"
