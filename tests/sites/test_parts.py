"""Outer steps in parts have the bits of those of the whole tree at once."""

import jax
import numpy as np
import optax
import pytest

from curvadion_jax.sites._outer_step import OuterStep

SHAPES = {"a": (40, 30), "b": (5,), "c": (), "d": (200, 150), "e": (30, 40), "f": (7,)}
APART = {
    "average": optax.scale(-1),
    "nesterov": optax.sgd(1.0, momentum=0.4, nesterov=True),
    "adam": optax.adam(0.1),
    "schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 9)),
    "each clipped": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1.0)),
    "injected": optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.3),
    "two kinds": optax.partition(
        {"x": optax.sgd(1.0, momentum=0.1), "y": optax.adam(0.1)},
        {key: "xy"[key > "c"] for key in SHAPES},
    ),
}
TOGETHER = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    "any finite": optax.apply_if_finite(optax.sgd(1.0), 3),
    "no masks": optax.adafactor(0.1),  # which cannot do with a part of a tree
    "every second": optax.MultiSteps(optax.sgd(1.0), 2),
}


def by_size() -> optax.GradientTransformation:
    """Divides by the number of all elements, of which its program shows nothing."""

    def update(updates, state, params=None):
        del params
        size = sum(x.size for x in jax.tree.leaves(updates))
        return jax.tree.map(lambda x: x / size, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def of_all_names() -> optax.GradientTransformation:
    """Needs the whole tree."""
    step = lambda updates, _: {key: -updates[key] * 0.5 for key in SHAPES}
    return optax.stateless(step)


def made(outer) -> OuterStep:
    params = {
        key: jax.ShapeDtypeStruct(shape, "bfloat16" if key == "e" else "float32")
        for key, shape in SHAPES.items()
    }
    return OuterStep(params, outer)


def steps(step: OuterStep, parts) -> list[str]:
    rng, found = np.random.default_rng(0), []
    outer = step.initial([rng.normal(size=x.shape) for x in step._shapes])
    for _ in range(4):
        gradients = [rng.normal(size=x.shape).astype("float32") for x in step._shapes]
        outer = step.take(outer, gradients, parts)
        found.append(outer.digest)
    return found


@pytest.mark.parametrize("name", APART)
def test_arrays_that_are_treated_alone_are_stepped_in_parts(name):
    step = made(APART[name])
    parts, common = step.parts
    assert 4 <= len(parts) < len(SHAPES)  # small arrays go together
    places = sorted(place for part in [*parts, common] for place in part)
    assert places == [*range(len(step.snapshot))]
    found = steps(step, step.parts)
    assert found == steps(step, step._whole)
    assert len({*found}) == 4


@pytest.mark.parametrize("name", TOGETHER)
def test_what_cannot_be_taken_apart_is_stepped_together(name):
    step = made(TOGETHER[name])
    (part,), _ = step.parts
    assert {*range(len(SHAPES))} <= {*part}
    assert len({*steps(step, step.parts)}) > 1


@pytest.mark.parametrize("outer", [by_size(), of_all_names()])
def test_an_optimizer_that_parts_would_change_or_stop_steps_the_whole(outer):
    step = made(outer)
    assert len(step._found_parts()[0]) == 5
    assert step.parts == step._whole
    assert len({*steps(step, step.parts)}) == 4


def test_what_is_not_finite_in_the_last_part_changes_nothing(caplog):
    step = made(optax.sgd(1.0, momentum=0.4))
    outer = step.initial([np.ones(x.shape) for x in step._shapes])
    state = [*outer.state]
    gradients = [np.ones(x.shape, "float32") for x in step._shapes]
    gradients[-1][-1] = np.inf
    assert step.take(outer, gradients, step.parts) is outer
    assert all(x is y for x, y in zip(outer.state, state, strict=True))
    assert "contains NaN or Inf" in caplog.text
    after = step.from_snapshot([*outer.anchor, *outer.state])
    assert after.digest == outer.digest
