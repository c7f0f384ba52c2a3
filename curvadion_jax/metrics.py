"""What was sent, when and why: the counters in the optimizer state, made readable."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from curvadion_jax import _arguments, _paths
from curvadion_jax._counters import WORD, SyncMetrics, initial, ways
from curvadion_jax._payload import Payload

_TALLIES = ("skipped", "contained", "excluded", "absent")


def sync_bytes(payload: Payload, replicas: int) -> float:
    """Bytes that one replica sends in a sync.

    Args:
      payload: what the `payload` of a compressor or synchronizer returns.
      replicas: number of replicas N.

    Returns:
      2 (N - 1) / N times the averaged bytes, which a ring all-reduce sends, and N - 1
      times the gathered bytes.

    Example:
      >>> sync_bytes(Payload(averaged=8, gathered=2), replicas=4)  # 12 + 6
      18.0
    """
    others = replicas - 1
    return 2 * others * payload.averaged / replicas + others * payload.gathered


def observe(opt_state: Any) -> SyncMetrics:
    """The counters in an optimizer state, for use inside a training step.

    Return them among the step's metrics: a few scalars that are not donated with the
    state, so that the host can read them while the next step runs.

    Args:
      opt_state: state of an optimizer made by `adaptive_sync`, such as `curvadion` or
        `local_muon`, in a chain, wrapped or inside nnx.

    Returns:
      The counters, with a leading replica axis if the state has one.

    Raises:
      ValueError: if there is none in it, or several.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.local_muon(0.01).init({"w": jnp.ones((2, 2))})
      >>> observe(state).steps.shape
      ()
    """
    leaves = dict(_paths.leaves_with_names(opt_state))
    found = ways(leaves)
    if len(found) != 1:
        raise ValueError(
            f"expected the state of one optimizer that synchronises, found {len(found)}"
            f" in what is of type {type(opt_state).__name__}: give the optimizer state "
            "of one, or what observe returned"
        )
    template = initial()
    wanted = [names for names, _ in _paths.leaves_with_names(template)]
    counters = [leaves[*found[0], *names] for names in wanted]
    return jax.tree.unflatten(jax.tree.structure(template), counters)


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
      patience: steps in a row that a replica may skip, or on which its updates may be
        contained, or syncs in a row that it may be excluded from, before a warning.

    Returns:
      A dict with

      * `steps`, `syncs`, `sync_rate` (their ratio), `synced` (the last step),
      * `value`: the trigger's last value, the largest over the replicas of this
        process; `threshold`: what that replica compares it with; `layer`: index of the
        parameter it belongs to, in the order of the parameters' leaves; each is None
        for a trigger without one,
      * `asked`: steps on which replicas reduced their requests to decide,
      * `replicas`,
      * `bytes`: what one replica has sent, an all-reduce of B bytes counted as
        2 (N - 1) / N B, an all-gather of k bytes each as (N - 1) k; the 4 bytes of
        each decision and of a replica's weight at each sync are included. Of models
        that are trained together under `vmap`, those of all,
      * `synchronous_bytes`: what it would have sent with float32 gradients averaged
        on every step,
      * `skipped`: steps not taken because gradients were not finite, `contained`: steps
        on which the inner or outer optimizer's updates were not, `excluded`: syncs that
        a replica was excluded from, `absent`: syncs without weight, all over the
        replicas of this process; `empty_syncs`: syncs that nobody took part in,
        whose bytes are counted as if somebody had,
      * `troubled`: number of a replica -> dict of its own `skipped`, `contained`,
        `excluded` and `last`, the number of the last such step; of those that had any.

    Warns:
      RuntimeWarning: if a replica has skipped `patience` steps in a row, its updates
        were contained on as many, or it was excluded from as many syncs.

    Raises:
      TypeError: if a number is not an int.
      ValueError: if there are no counters, the number of replicas is unknown or another
        one than they have, or a number is below 1; or for several replicas a state
        without replica axis shows, after two syncs, that its optimizer has no
        `axis_name`.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.local_muon(0.01).init({"w": jnp.ones((2, 2))})
      >>> read(state, replicas=8)["steps"]
      0
    """
    _arguments.check_int(patience, "patience")
    counters = observe(opt_state)
    # One transfer for all of them.
    has_axis = np.ndim(counters.steps) > 0
    parts = jax.device_get([_local(x, has_axis) for x in jax.tree.leaves(counters)])
    structure = jax.tree.structure(counters)
    found: Any = jax.tree.unflatten(structure, map(np.concatenate, parts))
    replicas = _number_of_replicas(counters.steps, replicas)
    steps, syncs = _common(found.steps, "steps"), _common(found.syncs, "syncs")
    # NaN where nothing was compared; a NaN on one replica only is its own.
    values, layers = found.value.reshape(-1), found.layer.reshape(-1)
    worst = int(np.argmax(np.where(np.isnan(values), -math.inf, values)))
    averaged, gathered = _bytes(found.sent)
    (synchronous,) = _bytes(found.synchronous[..., None, :])
    sent = sync_bytes(Payload(averaged, gathered), replicas)
    # A sync sends a weight to every other replica; one with a delay may not have ended.
    if not has_axis and replicas > 1 and syncs > 1 and not gathered:
        raise ValueError(
            f"replicas={replicas}, and {syncs} syncs have sent nothing, since the "
            "optimizer has axis_name=None and is of one replica. Under jit with a "
            "batch divided over devices every step averages all gradients: give "
            "axis_name, and run the step with replicas.step (docs/own-loop.md)"
        )
    return {
        "steps": steps,
        "syncs": syncs,
        "sync_rate": syncs / steps if steps else 0.0,
        "synced": bool(_common(found.synced, "synced")),
        "value": _unless(math.isnan, _shortest(values[worst])),
        "threshold": _unless(math.isnan, _shortest(found.threshold.reshape(-1)[worst])),
        "layer": _unless((-1).__eq__, int(layers[worst])),
        "asked": _common(found.asked, "asked"),
        "replicas": replicas,
        "bytes": round(sent),
        "synchronous_bytes": round(sync_bytes(Payload(synchronous), replicas)),
        "empty_syncs": _common(found.empty, "empty"),
        **_faults(found, _numbers(counters.steps), patience),
    }


def _shortest(number: np.floating) -> float:
    """0.3, where float() has 0.30000001192092896."""
    return float(str(number))


def _unless(empty: Callable[[Any], bool], number: Any) -> Any:
    return None if empty(number) else number


def _local(array: Any, has_axis: bool) -> list[Any]:
    """The parts of an array that this process holds, with an axis of replicas."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [shard.data for shard in array.addressable_shards]
    return [array if has_axis else array[None]]


def _numbers(array: Any) -> list[int]:
    """The replicas whose parts `_local` returns, in that order."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        starts = [shard.index[0].start or 0 for shard in array.addressable_shards]
        sizes = [len(shard.data) for shard in array.addressable_shards]
        spans = zip(starts, sizes, strict=True)
        return [start + each for start, size in spans for each in range(size)]
    return list(range(np.shape(array)[0] if np.ndim(array) else 1))


def _number_of_replicas(steps: Any, replicas: int | None) -> int:
    if not np.ndim(steps):
        if replicas is None:
            raise ValueError(
                "the counters have no replica axis, and replicas is None: pass "
                "replicas, the number of them, 1 for an optimizer without axis_name"
            )
        return replicas
    number = np.shape(steps)[0]
    if replicas not in (None, number):
        raise ValueError(
            f"replicas={replicas}, and the counters are of {number}: leave it out"
        )
    return number


def _faults(found: SyncMetrics, numbers: list[int], patience: int) -> dict[str, Any]:
    """What replicas did not do; those with several devices are listed once."""

    def rows(array):
        """Number of the replica -> the largest of its models."""
        whole = array.reshape(len(numbers), -1).max(axis=1)
        return dict(zip(numbers, whole.tolist(), strict=True))

    tallies = {name: getattr(found, name) for name in _TALLIES}
    totals = {name: rows(tally.total) for name, tally in tallies.items()}
    last = {name: rows(tally.last) for name, tally in tallies.items()}
    told = {
        "skipped": "has skipped its last {} steps, whose gradients were not finite",
        "contained": "had updates that were not finite on its last {} steps",
        "excluded": "was excluded from the last {} syncs for what it had",
    }
    for name, what in told.items():
        for number, in_a_row in rows(tallies[name].in_a_row).items():
            if in_a_row >= patience:
                warnings.warn(
                    f"replica {number} {what.format(in_a_row)}: look at its data, its "
                    "learning rate and its parameters. curvadion_jax.replicas.mend "
                    "gives it another replica's state",
                    RuntimeWarning,
                    stacklevel=3,
                )
    troubled = {
        number: {
            **{name: totals[name][number] for name in told},
            "last": max(last[name][number] for name in told),
        }
        for number in totals["skipped"]
        if any(totals[name][number] for name in told)
    }
    counts = {name: sum(each.values()) for name, each in totals.items()}
    return {**counts, "troubled": troubled}


def _common(array: np.ndarray, what: str) -> int:
    values = np.unique(array)
    if len(values) != 1:
        raise ValueError(
            f"replicas disagree on {what}: {array.tolist()}. They did not run the same "
            "program, and the state cannot be trusted: restore a checkpoint"
        )
    return int(values[0])


def _bytes(words: np.ndarray) -> list[int]:
    """Numbers from [replicas, models..., numbers, 2], of one replica's models."""
    models = words[0].reshape(-1, *words.shape[-2:]).tolist()
    return [
        sum(high * WORD + low for high, low in number)
        for number in zip(*models, strict=True)
    ]
