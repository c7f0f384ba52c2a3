"""What was sent, when and why: the counters in the optimizer state, made readable."""

import collections
import math
import warnings
from typing import Any

import jax
import numpy as np

from curvadion_jax import _arguments, _paths
from curvadion_jax._counters import WORD, SyncMetrics
from curvadion_jax._payload import Payload, total
from curvadion_jax.cost_model import FLAG_BYTES, WEIGHT_BYTES, sync_bytes


def observe(opt_state: Any) -> SyncMetrics:
    """The counters in an optimizer state, for use inside a training step.

    Return them among the step's metrics: a few scalars that are not donated with the
    state, so that the host can read them while the next step runs.

    Args:
      opt_state: state of an optimizer made by `adaptive_sync`, `curvadion` or a
        preset, in a chain, wrapped or inside nnx.

    Returns:
      The counters, with a leading replica axis if the state has one.

    Raises:
      ValueError: if there is none in it, or several.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.curvadion(0.01).init({"w": jnp.ones((2, 2))})
      >>> observe(state).steps.shape
      ()
    """
    # By name and not by type: `flax.nnx.split` makes dictionaries of named tuples.
    fields = set(SyncMetrics._fields)
    groups: dict[tuple[str, ...], dict[str, Any]] = collections.defaultdict(dict)
    for names, leaf in _paths.leaves_with_names(opt_state):
        if names:
            groups[names[:-1]][names[-1]] = leaf
    found = [group for group in groups.values() if fields <= group.keys()]
    if len(found) != 1:
        raise ValueError(
            f"expected the state of one adaptive_sync or curvadion, found {len(found)} "
            f"in what is of type {type(opt_state).__name__}: give the optimizer state "
            "of one, or what observe returned"
        )
    return SyncMetrics(**{field: found[0][field] for field in SyncMetrics._fields})


def read(
    opt_state: Any, *, replicas: int | None = None, patience: int = 10
) -> dict[str, Any]:
    """The counters as Python numbers.

    Waits for the step that computed them. To keep the device busy read what
    :func:`observe` returned one step late.

    Args:
      opt_state: optimizer state, or anything that holds what `observe` returned,
        with or without the leading replica axis.
      replicas: number of replicas, for a state without that axis.
      patience: steps in a row that a replica may skip, or syncs in a row that it may be
        left out of, before a warning says so.

    Returns:
      A dict with

      * `steps`, `syncs`, `sync_rate` (their ratio), `synced` (the last step),
      * `value`: the trigger's last value, the largest over the replicas of this
        process; `threshold`; `layer`: index of the parameter it belongs to, in the
        order of the parameters' leaves, or -1,
      * `asked`: steps on which replicas reduced their flag to decide,
      * `replicas`,
      * `bytes`: what one replica has sent, an all-reduce of B bytes counted as
        2 (N - 1) / N B, an all-gather of k bytes each as (N - 1) k; the 4 bytes of
        each decision and of a replica's weight at each sync are included,
      * `synchronous_bytes`: what it would have sent with float32 gradients averaged
        on every step,
      * `skipped`: steps not taken because gradients were not finite, and `left_out`:
        syncs that a replica was left out of for what it had, both over all replicas of
        this process; `absent`: syncs without weight, likewise; `empty_syncs`: syncs
        that nobody took part in,
      * `moved`: syncs after which a replica's parameters were not where they had been
        left, over all replicas of this process; what can be seen is in
        `curvadion_jax.SyncMetrics`,
      * `troubled`: number of a replica -> dict of its own `skipped`, `left_out` and
        `last`, the number of the step of the last of them; of those that had any.

    Warns:
      RuntimeWarning: if a replica has skipped `patience` steps in a row, or was left
        out of as many syncs, or if parameters were moved after the last sync.

    Raises:
      TypeError: if a number is not an int.
      ValueError: if there are no counters, the number of replicas is unknown or another
        one than they have, or a number is below 1.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.curvadion(0.01).init({"w": jnp.ones((2, 2))})
      >>> read(state, replicas=8)["steps"]
      0
    """
    _arguments.check_steps(patience, "patience")
    counters = observe(opt_state)
    # One transfer for all of them.
    parts = jax.device_get({k: _local(x) for k, x in counters._asdict().items()})
    found = {k: x[0] if len(x) == 1 else np.concatenate(x) for k, x in parts.items()}
    if np.ndim(counters.steps):
        number = np.size(counters.steps)
        if replicas not in (None, number):
            raise ValueError(
                f"replicas={replicas}, and the counters are of {number}: leave it out"
            )
        replicas = number
    elif replicas is None:
        raise ValueError(
            "the counters have no replica axis, and replicas is None: pass replicas, "
            "the number of them"
        )
    steps, syncs = _common(found, "steps"), _common(found, "syncs")
    asked = _common(found, "asked")
    values = found["value"].reshape(-1)
    # NaN where nothing was compared; a NaN on one replica only is its own.
    worst = int(np.argmax(np.where(np.isnan(values), -math.inf, values)))
    (gradients,) = _bytes(found["gradient_payload"])
    return {
        "steps": steps,
        "syncs": syncs,
        "sync_rate": syncs / steps if steps else 0.0,
        "synced": bool(_common(found, "synced")),
        "value": float(values[worst]),
        "threshold": float(found["threshold"].reshape(-1)[0]),
        "layer": int(found["layer"].reshape(-1)[worst]),
        "asked": asked,
        "replicas": replicas,
        "bytes": round(sync_bytes(_sent(found, asked), replicas)),
        "synchronous_bytes": round(sync_bytes(steps * gradients, replicas)),
        "empty_syncs": _common(found, "empty"),
        "moved": _moved(found, _numbers(counters.steps)),
        **_trouble(found, _numbers(counters.steps), patience),
    }


def _numbers(array: Any) -> list[int]:
    """The replicas whose parts `_local` returns, in that order."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        starts = [shard.index[0].start or 0 for shard in array.addressable_shards]
        sizes = [len(shard.data) for shard in array.addressable_shards]
        spans = zip(starts, sizes, strict=True)
        return [start + each for start, size in spans for each in range(size)]
    return list(range(np.size(array)))


def _trouble(
    found: dict[str, np.ndarray], numbers: list[int], patience: int
) -> dict[str, Any]:
    """What replicas did not do; those with several devices are listed once."""
    names = ("skipped", "left_out", "absent", "skipped_at", "left_out_at")
    names += ("skipped_in_a_row", "left_out_in_a_row")
    columns = [found[name].reshape(-1).tolist() for name in names]
    rows = dict(zip(numbers, zip(*columns, strict=True), strict=True))
    for number, (*_, skipped, left_out) in rows.items():
        if max(skipped, left_out) < patience:
            continue
        what = (
            f"has skipped its last {skipped} steps, whose gradients were not finite"
            if skipped >= patience
            else f"was left out of the last {left_out} syncs for what it had"
        )
        warnings.warn(
            f"replica {number} {what}: look at its data and its parameters. "
            "curvadion_jax.replicas.mend gives it another replica's state",
            RuntimeWarning,
            stacklevel=3,
        )
    return {
        "skipped": sum(row[0] for row in rows.values()),
        "left_out": sum(row[1] for row in rows.values()),
        "absent": sum(row[2] for row in rows.values()),
        "troubled": {
            number: {"skipped": skipped, "left_out": left_out, "last": max(last)}
            for number, (skipped, left_out, _, *last, _, _) in rows.items()
            if skipped or left_out
        },
    }


def _moved(found: dict[str, np.ndarray], numbers: list[int]) -> int:
    last = found["moved_in_a_row"].reshape(-1).tolist()
    who = sorted({number for number, x in zip(numbers, last, strict=True) if x})
    if who:
        warnings.warn(
            f"the parameters of replicas {who} were not where the last sync had left "
            "them: something behind the optimizer changes its updates, or the "
            "parameters. In optax.chain the optimizer must be the last (for weight "
            "decay it has weight_decay). Until the next sync, which takes the change "
            "into its mean, replicas need not be as near as they should",
            RuntimeWarning,
            stacklevel=3,
        )
    return int(found["moved"].sum())


def _local(array: Any) -> list[Any]:
    """The parts of an array that this process holds."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [shard.data for shard in array.addressable_shards]
    return [array]


def _common(found: dict[str, np.ndarray], what: str) -> int:
    return _common_row(found, what, 1)[0]


def _common_row(found: dict[str, np.ndarray], what: str, length: int) -> list[int]:
    rows = np.unique(found[what].reshape(-1, length), axis=0)
    if len(rows) != 1:
        raise ValueError(
            f"replicas disagree on {what}: {found[what].tolist()}. They did not run "
            "the same program, and the state cannot be trusted: restore a checkpoint"
        )
    return [int(value) for value in rows[0]]


def _sent(found: dict[str, np.ndarray], asked: int) -> Payload:
    """What all syncs of all variants, and the decisions, sent."""
    variants = found["variant_syncs"].shape[-1]
    counts = _common_row(found, "variant_syncs", variants)
    averaged = _bytes(found["sync_payload"], variants)
    gathered = _bytes(found["gathered_payload"], variants)
    parts = [
        Payload(averaged=count * one, gathered=count * other)
        for count, one, other in zip(counts, averaged, gathered, strict=True)
    ]
    beside = Payload(averaged=asked * FLAG_BYTES, gathered=sum(counts) * WEIGHT_BYTES)
    return total([*parts, beside])


def _bytes(words: np.ndarray, variants: int = 1) -> list[int]:
    """A number for each variant, from the words of one replica."""
    return [
        int(high) * WORD + int(low) for high, low in words.reshape(-1, variants, 2)[0]
    ]
