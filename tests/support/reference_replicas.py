"""NumPy float64 reference of N replicas that step alone and synchronise.

One Python loop over a list of replicas. It decides nothing about speed and knows no
mesh: a "mean over replicas" is a mean over a list. `reference` has the equations.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from reference import (
    Array,
    Tree,
    dion_step,
    dion_step_average_factors,
    relative_momentum_change,
    tree_mean,
)

OuterStep = Callable[[Tree, Any], tuple[Tree, Any]]


def every_k(step: int, k: int) -> bool:
    """Whether a sync follows step ``step``, counted from 0: after k, 2k, ... steps."""
    return (step + 1) % k == 0


class LocalStep(NamedTuple):
    """What a trigger may look at: one replica's own quantities before its step.

    ``last_totals`` are M + G of the step before, without anybody else's gradient.
    """

    step: int
    gradients: Tree
    params: Tree
    momenta: Tree
    last_totals: Tree


def relative_momentum_change_trigger(
    threshold: float, floor: float = 0.0
) -> Callable[[LocalStep], bool]:
    """Fires unless max_l RMMC_l <= threshold; NaN fires, and so does step 0.

    M_new is the momentum this step would have, M + G; M_old the same of the last step.
    """

    def fires(local: LocalStep) -> bool:
        if local.step == 0:
            return True
        changes = [
            relative_momentum_change(
                m + local.gradients[name], local.last_totals[name], floor
            )
            for name, m in local.momenta.items()
        ]
        return any(not (change <= threshold) for change in changes)

    return fires


def nesterov(learning_rate: float, momentum: float) -> OuterStep:
    """Outer step of DiLoCo, as optax.sgd(learning_rate, momentum, nesterov=True).

    The pseudo-gradient is g = -(mean drift); t' = g + momentum t;
    step = -learning_rate (g + momentum t').
    """

    def outer(mean_drift: Tree, trace: Any) -> tuple[Tree, Any]:
        old = trace or {name: np.zeros_like(d) for name, d in mean_drift.items()}
        new = {name: -d + momentum * old[name] for name, d in mean_drift.items()}
        step = {
            name: -learning_rate * (-d + momentum * new[name])
            for name, d in mean_drift.items()
        }
        return step, new

    return outer


class ReplicaSimulation:
    """N replicas that step alone and come together when a trigger fires.

    Matrices take Dion steps, vectors plain SGD steps with the same learning rate.

    ``params`` are 2-D kernels [fan_in, fan_out] and 1-D vectors by name and ``q`` the
    initial Q of each matrix, common to all. ``trigger`` is called with each replica's
    ``LocalStep``; a true value or NaN from any makes all sync, by ``synchronizer``:
    "average_gradients", "average_factors" or "reconcile", the latter with ``outer``:
    (mean drift, its state) -> (step, its state), None for the plain average.

    ``params``, ``momenta`` and ``qs`` are lists over replicas of name to array,
    ``anchor`` the parameters after the last sync, ``synced`` one bool per step.
    """

    def __init__(
        self,
        params: Tree,
        q: Tree,
        n_replicas: int,
        *,
        learning_rate: float,
        mu: float,
        trigger: Callable[[LocalStep], Any],
        synchronizer: str,
        outer: OuterStep | None = None,
    ):
        params = {name: np.array(p, np.float64) for name, p in params.items()}
        q = {name: np.array(v, np.float64) for name, v in q.items()}
        self.learning_rate, self.mu = learning_rate, mu
        self.trigger, self.synchronizer = trigger, synchronizer
        self.outer, self.outer_state = outer, None
        self.params = [dict(params) for _ in range(n_replicas)]
        self.qs = [dict(q) for _ in range(n_replicas)]
        self.momenta = [
            {name: np.zeros_like(params[name]) for name in q} for _ in range(n_replicas)
        ]
        self.last_totals: list[Tree] = [dict(tree) for tree in self.momenta]
        self.anchor = dict(params)
        self.anchor_q = dict(q)  # of the last sync
        self.synced: list[bool] = []

    def step(self, gradients: Sequence[Tree]) -> None:
        """One step of every replica; ``gradients`` is a list over replicas."""
        synced = self._any_fires(gradients)
        if synced and self.synchronizer == "average_factors":
            self._average_factors_step(gradients)
        else:
            if synced and self.synchronizer == "average_gradients":
                gradients = [tree_mean(gradients)] * len(self.params)
            self._local_step(gradients)
            if synced and self.synchronizer == "reconcile":
                self._reconcile()
        self.synced.append(synced)

    def _any_fires(self, gradients: Sequence[Tree]) -> bool:
        totals = [
            {name: m + g[name] for name, m in momenta.items()}
            for momenta, g in zip(self.momenta, gradients, strict=True)
        ]
        local = zip(gradients, self.params, self.momenta, self.last_totals, strict=True)
        step = len(self.synced)
        # bool(nan) is True: a trigger that returns NaN has fired.
        asked = [bool(self.trigger(LocalStep(step, *each))) for each in local]
        self.last_totals = totals
        return any(asked)

    def _subtract(self, k: int, name: str, direction: Array) -> None:
        # (9)  X' = X - lr D
        self.params[k][name] = self.params[k][name] - self.learning_rate * direction

    def _local_step(self, gradients: Sequence[Tree]) -> None:
        for k, tree in enumerate(gradients):
            for name, gradient in tree.items():
                direction = gradient
                if name in self.qs[k]:
                    direction, self.momenta[k][name], self.qs[k][name] = dion_step(
                        gradient, self.momenta[k][name], self.qs[k][name], mu=self.mu
                    )
                self._subtract(k, name, direction)

    def _average_factors_step(self, gradients: Sequence[Tree]) -> None:
        replicas = range(len(self.params))
        for name in gradients[0]:
            local = [tree[name] for tree in gradients]
            directions = [np.mean(local, axis=0)] * len(self.params)
            if name in self.qs[0]:
                momenta = [tree[name] for tree in self.momenta]
                qs = [self.anchor_q[name]] * len(self.params)
                directions, momenta, qs = dion_step_average_factors(
                    local, momenta, qs, mu=self.mu
                )
                for k in replicas:
                    self.momenta[k][name], self.qs[k][name] = momenta[k], qs[k]
                self.anchor_q[name] = qs[0]
            for k in replicas:
                self._subtract(k, name, directions[k])

    def _reconcile(self) -> None:
        anchor = self.anchor
        # mean drift = mean_i (X_i - anchor)
        drift = tree_mean([{n: p[n] - anchor[n] for n in p} for p in self.params])
        step = drift  # outer=None is the plain average
        if self.outer is not None:
            step, self.outer_state = self.outer(drift, self.outer_state)
        # anchor += outer(drift);  X_i = anchor
        self.anchor = {name: anchor[name] + step[name] for name in anchor}
        self.params = [dict(self.anchor) for _ in self.params]
