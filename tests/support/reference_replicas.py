"""NumPy float64 reference of N replicas that step alone and synchronise.

Written from docs/algorithm.md. One Python loop over a list of replicas. It decides
nothing about speed and knows no mesh: a "mean over replicas" is a mean over a list.
`reference` has the equations of one replica.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from reference import (
    Array,
    Tree,
    adam_step,
    compressed_mean,
    dion_step,
    dion_step_average_factors,
    muon_step,
    relative_momentum_change,
    tree_map,
    weighted_mean,
)


def matrices_of(x: Array) -> list[tuple]:
    """Where the kernels of a parameter are: it is one, or a stack [layers, ...]."""
    return [(i,) for i in range(len(x))] if x.ndim == 3 else [()]


def rows_of(tree: Any, replicas: int) -> list[Tree]:
    """A list over the replicas of arrays [replicas, ...], in float64."""
    row = lambda k: {name: np.float64(x[k]) for name, x in tree.items()}
    return [row(k) for k in range(replicas)]


# Inner optimizers: of one replica, (parameters) -> state and (gradients, state,
# parameters) -> (updates, new state). Optax's have the same two functions.


@dataclasses.dataclass
class AdamW:
    """Trains what is no matrix."""

    learning_rate: float
    nesterov: bool = False

    def init(self, params: Tree) -> Any:
        zeros = tree_map(np.zeros_like, params) if params else {}
        return {"m": zeros, "v": zeros, "count": 0}

    def update(self, gradients: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        count, updates, m, v = state["count"] + 1, {}, {}, {}
        for name, g in gradients.items():
            direction, m[name], v[name] = adam_step(
                g, state["m"][name], state["v"][name], count, nesterov=self.nesterov
            )
            updates[name] = -self.learning_rate * direction
        return updates, {"m": m, "v": v, "count": count}


@dataclasses.dataclass
class Sgd:
    """The gradient times minus the learning rate."""

    learning_rate: float

    def init(self, params: Tree) -> Any:
        return {}

    def update(self, gradients: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return {n: -self.learning_rate * g for n, g in gradients.items()}, state


@dataclasses.dataclass
class Matrices:
    """Muon or Dion for the matrices, and another optimizer for the rest.

    ``qs`` are the first Qs of Dion, [*layers, columns, r] by name; None is Muon, for
    the parameters named in ``names``.
    """

    names: Sequence[str]
    learning_rate: float
    mu: float
    other: Any
    decay: float = 0.0
    qs: Tree | None = None

    def init(self, params: Tree) -> Any:
        rest = {n: x for n, x in params.items() if n not in self.names}
        return {
            "momentum": {n: np.zeros_like(params[n]) for n in self.names},
            "q": {n: np.copy(q) for n, q in (self.qs or {}).items()},
            "count": 0,
            "other": self.other.init(rest),
        }

    def update(self, gradients: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        count, momenta = state["count"] + 1, state["momentum"]
        directions = tree_map(np.zeros_like, momenta)
        new_momenta, qs = tree_map(np.copy, momenta), tree_map(np.copy, state["q"])
        for name in self.names:
            for i in matrices_of(params[name]):
                g, m = gradients[name][i], momenta[name][i]
                if self.qs is None:
                    direction, m = muon_step(g, m, count, mu=self.mu)
                else:
                    direction, m, qs[name][i] = dion_step(
                        g, m, state["q"][name][i], mu=self.mu
                    )
                directions[name][i], new_momenta[name][i] = direction, m
        new = {"momentum": new_momenta, "q": qs, "count": count}
        return self.finish(directions, gradients, new, state, params)

    def finish(self, directions, gradients, new, state, params) -> tuple[Tree, Any]:
        """theta <- theta - eta (D + lambda theta), and the other optimizer's step."""
        rest = {n: g for n, g in gradients.items() if n not in self.names}
        updates, other = self.other.update(rest, state["other"], params)
        updates |= {
            n: -self.learning_rate * (directions[n] + self.decay * params[n])
            for n in self.names
        }
        return updates, {**new, "other": other}

    def average_factors(self, gradients, states, params, q, shares) -> tuple:
        """Every replica's (updates, state) of a step with mean factors, and Q of all.

        ``gradients`` are the replicas', with NaN where they are not finite.
        """
        mean = tree_map(lambda *g: weighted_mean(g, shares), *gradients)
        directions, qs = tree_map(np.zeros_like, states[0]["momentum"]), {}
        momenta = [tree_map(np.copy, state["momentum"]) for state in states]
        for name in self.names:
            qs[name] = np.copy(q[name])
            for i in matrices_of(directions[name]):
                directions[name][i], own, qs[name][i] = dion_step_average_factors(
                    [g[name][i] for g in gradients],
                    [state["momentum"][name][i] for state in states],
                    q[name][i],
                    mu=self.mu,
                    shares=shares,
                )
                for tree, m in zip(momenta, own, strict=True):
                    tree[name][i] = m
        results = []
        for state, m, p in zip(states, momenta, params, strict=True):
            new = {"momentum": m, "q": tree_map(np.copy, qs), "count": state["count"]}
            results.append(self.finish(directions, mean, new, state, p))
        return results, qs


# Triggers: (run, gradients, which are finite, which are present) -> whether all
# synchronise on this step.


@dataclasses.dataclass
class Evenly:
    """floor((t + 1) p) > floor(t p), of step t from 0; the share p of all steps."""

    share: float | Fraction

    def __call__(self, run, gradients, finite, present) -> bool:
        share = Fraction(self.share).limit_denominator(2**15)
        return math.floor((run.t + 1) * share) > math.floor(run.t * share)


def every_k(k: int) -> Evenly:
    """After k, 2k, ... steps."""
    return Evenly(Fraction(1, k))


@dataclasses.dataclass
class MomentumChange:
    """Any present replica's largest relative change of ||M + G||, or NaN.

    With a share of steps the threshold moves, and the number of syncs stays within one
    of even spacing.
    """

    threshold: float
    share: float | None = None
    log_factor: float = 0.0
    last: Any = None

    def __call__(self, run, gradients, finite, present) -> bool:
        if self.last is None:
            self.last = [None] * len(gradients)
        values = []
        for k, g in enumerate(gradients):
            norms = [
                np.linalg.norm((state_m + g[name])[i])
                for name, state_m in run.states[k]["momentum"].items()
                for i in matrices_of(state_m)
            ]
            last = self.last[k] or [None] * len(norms)
            values.append(self._value(run.t, norms, last, finite[k]))
            self.last[k] = [n if finite[k] or n > 0 else None for n in norms]
        limit = self.threshold * math.exp(self.log_factor)
        pairs = zip(values, present, strict=True)
        requested = any(not value <= limit and there for value, there in pairs)
        if self.share is None:
            return requested
        paid = np.float32(self.share) * np.float32(run.t + 1)
        fire = requested and run.syncs + 1 <= paid + 1
        self.log_factor += 0.3 * (requested - self.share)
        self.log_factor = float(np.clip(self.log_factor, -math.log(1e3), math.log(1e3)))
        return bool(fire or run.syncs < paid - 1)

    def _value(self, t, norms, last, finite) -> float:
        if t == 0:
            return math.inf
        if not finite:
            return 0.0
        changes = [
            relative_momentum_change(np.array(n), np.array(0.0 if old is None else old))
            if old is not None or not np.isfinite(n)
            else 0.0
            for n, old in zip(norms, last, strict=True)
        ]
        return max(x if np.isfinite(x) else math.inf for x in changes)


def cost_of(params: Tree, sync: Any, replicas: int) -> float:
    """Bytes of a sync over those of float32 gradients, an all-reduce of each."""
    bits, sizes = sync.bits, [x.size for x in params.values()]
    if bits is None:
        return 8 / 4  # float64
    blocks = sum(-(-size // sync.block) for size in sizes)
    blocks = -(-blocks // replicas) * replicas if replicas > 2 else blocks
    bytes_of_block = sync.block * bits / 8 + (8 if bits == 2 else 4)
    return blocks * bytes_of_block / (4 * sum(sizes))


# What a sync does.


@dataclasses.dataclass
class Nesterov:
    """v <- d + momentum v; a <- a - rate (d + momentum v)."""

    learning_rate: float = 1.0
    momentum: float = 0.4
    velocity: Tree | None = None

    def __call__(self, d: Tree) -> Tree:
        old = self.velocity or tree_map(np.zeros_like, d)
        self.velocity = tree_map(lambda d, v: d + self.momentum * v, d, old)
        step = lambda d, v: -self.learning_rate * (d + self.momentum * v)
        return tree_map(step, d, self.velocity)


@dataclasses.dataclass
class Reconcile:
    """Follows the local steps, and ends at a common anchor; None is the plain mean."""

    outer: Callable[[Tree], Tree] | None = None
    bits: int | None = None
    block: int = 256


@dataclasses.dataclass
class AverageGradients:
    """Takes the place of the local steps."""

    bits: int | None = None
    block: int = 256


@dataclasses.dataclass
class AverageFactors:
    """Dion's sync, in place of the local steps."""


class Run:
    """N replicas that step alone, and synchronise when the trigger says so.

    ``params``, ``states`` and ``residuals`` are lists over the replicas, ``anchor`` the
    parameters after the last sync, ``synced`` one bool per step.
    """

    def __init__(self, params: Tree, inner: Any, n: int, trigger: Any, sync: Any):
        params = tree_map(lambda x: np.array(x, np.float64), params)
        self.inner, self.trigger, self.sync = inner, trigger, sync
        self.params = [dict(params) for _ in range(n)]
        self.states = [inner.init(params) for _ in range(n)]
        self.residuals = [tree_map(np.zeros_like, params) for _ in range(n)]
        self.since = np.zeros(n)  # weights since the last sync
        self.anchor, self.synced = params, []
        self.common_q = self.states[0]["q"] if isinstance(sync, AverageFactors) else {}

    @property
    def t(self) -> int:
        return len(self.synced)

    @property
    def syncs(self) -> int:
        return sum(self.synced)

    def step(self, gradients: Sequence[Tree], weights: Any = None) -> None:
        """One step of every replica; ``gradients`` is a list over replicas."""
        weights = np.ones(len(gradients)) if weights is None else np.array(weights)
        weights = np.where(np.isfinite(weights) & (weights > 0), weights, 0.0)
        finite = [all(np.isfinite(x).all() for x in g.values()) for g in gradients]
        zeros = tree_map(np.zeros_like, self.anchor)
        gradients = [g if f else zeros for g, f in zip(gradients, finite, strict=True)]
        fire = self.trigger(self, gradients, finite, weights > 0)
        if fire and not isinstance(self.sync, Reconcile):
            self._step_together(gradients, weights, finite)
        else:
            self.since = self.since + weights
            moved = []
            for k, g in enumerate(gradients):
                updates, self.states[k] = self.inner.update(
                    g, self.states[k], self.params[k]
                )
                moved.append(self._plus(self.params[k], updates))
            before, self.params = self.params, moved
            if fire:
                self._reconcile(before, np.where(weights > 0, self.since, 0))
        self.synced.append(fire)

    @staticmethod
    def _plus(params: Tree, updates: Tree) -> Tree:
        """Elements of updates that are not finite are zero."""
        add = lambda p, u: p + np.where(np.isfinite(u), u, 0)
        return {name: add(p, updates[name]) for name, p in params.items()}

    def _mean(self, contributions: list[Tree]) -> Tree:
        """In codes, with error feedback; residuals are part of the contributions."""
        if self.sync.bits is None:
            return tree_map(lambda *arrays: np.mean(arrays, axis=0), *contributions)
        mean, self.residuals = compressed_mean(
            contributions, self.sync.bits, self.sync.block
        )
        return mean

    def _reconcile(self, before: list[Tree], weights: Array) -> None:
        healthy = self._begin_again([self.anchor] * len(weights))
        present = (weights > 0) & healthy
        if not present.any():
            return
        shares = np.where(present, weights, 0)
        shares = shares / shares.sum() * len(shares) * present.sum() / sum(healthy)
        drifts = [tree_map(np.subtract, p, self.anchor) for p in self.params]
        contributions = [
            tree_map(lambda e, d, s=s: e + (s * d if s else 0), e, d)
            for e, d, s in zip(self.residuals, drifts, shares, strict=True)
        ]
        d = tree_map(np.negative, self._mean(contributions))
        step = self.sync.outer(d) if self.sync.outer else tree_map(np.negative, d)
        self.anchor = tree_map(np.add, self.anchor, step)
        for k, drift in enumerate(drifts):
            absent = healthy[k] and not present[k]
            target = tree_map(np.add, self.anchor, drift) if absent else self.anchor
            updates = tree_map(np.subtract, target, before[k])
            self.params[k] = self._plus(before[k], updates)
        self.since = np.zeros(len(shares))

    def _begin_again(self, starts: list[Tree]) -> list[bool]:
        """Replaces states and residuals that are not finite; says who was healthy."""
        healthy = []
        for k, start in enumerate(starts):
            is_sound = _finite(self.states[k])
            healthy.append(
                is_sound and _finite(self.params[k]) and _finite(self.residuals[k])
            )
            if not is_sound:
                self.states[k] = _begun_again(self.inner, self.states[k], start)
                if isinstance(self.trigger, MomentumChange):
                    self.trigger.last[k] = None
            if not healthy[k]:
                self.residuals[k] = tree_map(np.zeros_like, self.anchor)
        return healthy

    def _step_together(self, gradients: list[Tree], weights: Array, finite) -> None:
        weights = weights * self._begin_again(self.params) * finite
        if not weights.any():
            return
        shares = weights / weights.sum() * len(weights)
        if isinstance(self.sync, AverageFactors):
            results, self.common_q = self.inner.average_factors(
                gradients, self.states, self.params, self.common_q, shares
            )
        else:
            own = [
                tree_map(lambda e, g, s=s: e + s * g, e, g)
                for e, g, s in zip(self.residuals, gradients, shares, strict=True)
            ]
            mean = self._mean(own)
            results = [
                self.inner.update(mean, state, p)
                for state, p in zip(self.states, self.params, strict=True)
            ]
        for k, (updates, state) in enumerate(results):
            self.params[k] = self._plus(self.params[k], updates)
            self.states[k] = state


def _finite(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(map(_finite, tree.values()))
    return bool(np.isfinite(tree).all())


def _begun_again(inner: Any, state: Any, anchor: Tree) -> Any:
    """Arrays of a new state, whose Q is a cosine transform; counts stay."""
    new = inner.init(anchor)
    cosines = lambda q: np.broadcast_to(_cosines(*q.shape[-2:]), q.shape)
    keep = lambda new, old: (
        {name: keep(x, old[name]) for name, x in new.items()}
        if isinstance(new, dict)
        else (new if np.ndim(new) else old)
    )
    return {**keep(new, state), "q": tree_map(cosines, new["q"]) if new["q"] else {}}


def _cosines(rows: int, columns: int) -> Array:
    k, j = np.arange(rows)[:, None], np.arange(columns)[None]
    waves = np.sqrt(2 / rows) * np.cos(np.pi * j * (k + 0.5) / rows)
    return np.where(j == 0, 1 / np.sqrt(rows), waves)
