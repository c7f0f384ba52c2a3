"""Triggers, those of the library and of one's own."""

from typing import Any

import helpers
import jax.numpy as jnp
from jax import lax

from curvadion_jax import synchronizers, triggers
from wrong_uses.build import on_replicas, parts, updated
from wrong_uses.case import calls, wrong

SUCH = "must be a curvadion_jax.triggers.Trigger such as every_k(10)"
KNOWN = {**vars(triggers), "nan": float("nan"), "inf": float("inf")}


def deciding(decide: Any) -> Any:
    """An update with a trigger of one's own that has a state."""
    trigger = triggers.Trigger(lambda params, inner_state, views: jnp.zeros([]), decide)
    return updated(parts(trigger=trigger))


def communicating(seen: Any) -> Any:
    mean = lax.pmean(seen.gradients["bias"][0], helpers.AXIS)
    return triggers.decision(mean > 0)


def drift_of_what_has_no_anchor() -> Any:
    sending = synchronizers.average_gradients()
    return updated(parts(trigger=triggers.drift(0.1), synchronizer=sending))


_ROWS = [
    ("every_k(0)", ValueError, "got 0", "the period k must be at least 1"),
    (
        "every_k(10**10)",
        ValueError,
        "got 10000000000",
        "the period k must be at most 2147483647",
    ),
    ("every_k(2.0)", TypeError, "got 2.0", "the period k must be an int"),
    ("every_k(True)", TypeError, "got True", "the period k must be an int"),
    (
        "at_least_every(never(), 0)",
        ValueError,
        "got 0",
        "the largest interval k must be at least 1",
    ),
    (
        "at_most_every(never(), -1)",
        ValueError,
        "got -1",
        "the smallest interval k must be at least 1",
    ),
    ("after_steps(never(), -1)", ValueError, "got -1", "must be at least 0"),
    ("after_steps(never(), '3')", TypeError, "got '3'", "must be an int"),
    ("any_of()", ValueError, "got none", "needs at least one trigger"),
    ("any_of(always(), every_k)", TypeError, "got <function every_k", SUCH),
    ("at_least_every(always, 3)", TypeError, "got <function always", SUCH),
    ("at_most_every(5, 3)", TypeError, "got 5", SUCH),
    ("after_steps(None, 3)", TypeError, "got None", SUCH),
    ("delayed(3)", TypeError, "got 3", SUCH),
    ("remembered(never)", TypeError, "got <function never", SUCH),
    ("evenly(-1)", ValueError, "got -1", "rate must not be negative or NaN"),
    ("evenly(inf)", ValueError, "got inf", "rate must be above 0 and finite"),
    ("evenly(0.1, cost='all')", TypeError, "got 'all'", "cost must be a number"),
    ("weighted(-1, [1.0])", ValueError, "got -1", "rate must not be negative or NaN"),
    ("weighted(0.1, len)", TypeError, "got <built-in", "such as np.sqrt(schedule("),
    ("weighted(0.1, [1, -1])", ValueError, "got [1, -1]", "weights must be one finite"),
    ("weighted(0.1, 0.5)", ValueError, "got an array of shape ()", "weights must be"),
    ("weighted(0.1, [0, 0])", ValueError, "whose sum is 0.0", "give a step that is"),
    ("budget(0)", ValueError, "got 0", "rate must be above 0 and finite"),
    ("budget('1%')", TypeError, "got '1%'", "rate must be a number"),
    (
        "budget(0.1, of=3)",
        TypeError,
        "got 3",
        "of must be a curvadion_jax.triggers.Trigger such as",
    ),
    ("budget(0.1, ahead=0.5)", ValueError, "got 0.5", "ahead must be at least 1"),
    ("budget(0.1, reach=0.5)", ValueError, "got 0.5", "reach must be at least 1"),
    (
        "budget(0.1, behind=-1)",
        ValueError,
        "got -1",
        "behind must not be negative or NaN",
    ),
    (
        "budget(0.1, gain=nan)",
        ValueError,
        "got nan",
        "gain must not be negative or NaN",
    ),
    ("budget(0.1, warmup=1.0)", TypeError, "got 1.0", "warmup must be an int"),
    (
        "relative_momentum_change(-0.1)",
        ValueError,
        "got -0.1",
        "threshold must not be negative or NaN",
    ),
    (
        "relative_momentum_change(None)",
        TypeError,
        "got None",
        "threshold must be a number or a schedule",
    ),
    (
        "relative_momentum_change('0.1')",
        TypeError,
        "got '0.1'",
        "threshold must be a number or a schedule",
    ),
    (
        "relative_momentum_change(True)",
        TypeError,
        "got True",
        "threshold must be a number or a schedule",
    ),
    (
        "relative_momentum_change(nan)",
        ValueError,
        "got nan",
        "threshold must not be negative or NaN",
    ),
    (
        "relative_momentum_change(0.1, floor=-1)",
        ValueError,
        "got -1",
        "floor must not be negative or NaN",
    ),
    (
        "relative_momentum_change(0.1, floor=nan)",
        ValueError,
        "got nan",
        "floor must not be negative or NaN",
    ),
    (
        "relative_momentum_change(0.1, momentum_fn='mu')",
        TypeError,
        "got 'mu'",
        "must be a function such as lambda state: state.mu",
    ),
    (
        "drift('0.1')",
        TypeError,
        "got '0.1'",
        "threshold must be a number or a schedule",
    ),
    ("drift(-0.1)", ValueError, "got -0.1", "threshold must not be negative or NaN"),
    ("drift(nan)", ValueError, "got nan", "threshold must not be negative or NaN"),
    wrong(
        "drift(0.1) with average_gradients(), which keeps no anchor",
        drift_of_what_has_no_anchor,
        *(ValueError, "this synchronizer keeps no such anchor", "use synchronizers.re"),
    ),
    (
        "quadratic_period('0.1', 1)",
        TypeError,
        "got '0.1'",
        "learning_rate must be a number or a schedule",
    ),
    (
        "quadratic_period(0.1, nan)",
        ValueError,
        "got nan",
        "alpha must not be negative or NaN",
    ),
    (
        "quadratic_period(0.1, 0.1, k=1.5)",
        TypeError,
        "got 1.5",
        "the smallest period k must be an int",
    ),
    (
        "stateless(3)",
        TypeError,
        "got 3",
        "decide must be a function such as lambda seen",
    ),
    wrong(
        "stateless(lambda seen: True)",
        lambda: updated(parts(trigger=triggers.stateless(lambda seen: True))),
        *(TypeError, "got (True, ())", "must return (triggers.decision(...), state)"),
    ),
    wrong(
        "Trigger(init, decide) whose decide returns a decision and no state",
        lambda: deciding(lambda seen, state: triggers.decision(True)),
        *(TypeError, "got Decision(", "must return (triggers.decision(...), state)"),
    ),
    wrong(
        "a decision for every element of a gradient",
        lambda: deciding(
            lambda seen, state: (triggers.decision(seen.gradients["bias"] > 0), state)
        ),
        *(ValueError, "has shape (5,)", "reduce it, as by jax.numpy.any"),
    ),
    wrong(
        "a trigger whose state grows",
        lambda: deciding(lambda seen, state: (triggers.decision(True), jnp.zeros(3))),
        *(ValueError, "got (3,)", "must return a state of the structure and shapes"),
    ),
    wrong(
        "a trigger that averages over the replicas itself",
        lambda: on_replicas(
            parts(trigger=triggers.stateless(communicating), axis_name=helpers.AXIS)
        ),
        *(ValueError, "over the axis 'replica'", "leave that to the synchronizer"),
    ),
]
CASES = calls(KNOWN, _ROWS)
