"""The example examples/char_lm: its model, its methods, its flags and its picture."""

import dataclasses
from pathlib import Path

import config
import jax
import jax.numpy as jnp
import main
import methods
import model
import numpy as np
import picture
import processes
import pytest
import report
import train
from matplotlib.figure import Figure

from curvadion_jax import triggers

# Float32 products of sines and cosines; measured below 1e-6.
ROTARY_TOLERANCE = 1e-5


@pytest.mark.slow
def test_a_logit_depends_on_no_later_token():
    gpt = model.GPT(vocabulary=11, layers=2, width=16, heads=2)
    tokens = jnp.arange(8)[None]
    params = jax.jit(gpt.init)(jax.random.key(0), tokens)["params"]
    random = np.random.default_rng(0)  # a head of zeros would hide the rest
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.1 * random.normal(size=x.shape), x.dtype), params
    )
    apply = jax.jit(gpt.apply)
    changed = tokens.at[0, 5].set(9)
    before, after = (apply({"params": params}, x)[0] for x in (tokens, changed))
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (np.abs(before[5:] - after[5:]).max(axis=-1) > 1e-4).all()


@pytest.mark.slow
def test_rotary_products_depend_on_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    queries, keys = (
        model.rotary(jnp.broadcast_to(x, (1, 12, 1, 8)))[0, :, 0] for x in (query, key)
    )
    products = np.asarray(queries @ keys.T)
    for distance in range(-4, 5):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=ROTARY_TOLERANCE)
    assert np.ptp(products[0]) > 0.1


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_builds_a_state_of_stacked_blocks(name):
    gpt = model.GPT(11, layers=2, width=16, heads=2)
    build = train.initial_state
    state = jax.eval_shape(lambda: build(gpt, name, config.PRESETS["tiny"]))
    assert state.params["blocks"]["up"]["kernel"].shape == (2, 16, 64)


def test_a_threshold_takes_the_place_of_curvadions_budget():
    params = {"kernel": jnp.ones((4, 8))}

    def trigger_state(threshold):
        settings = dataclasses.replace(config.PRESETS["tiny"], threshold=threshold)
        tx = methods.METHODS["curvadion"].build(settings, "replica")
        return tx.init(params).trigger_state

    assert isinstance(trigger_state(None), triggers.BudgetState)
    assert list(trigger_state(0.3)) == ["kernel"]


@pytest.mark.parametrize(
    ("arguments", "changed", "out"),
    [
        ("", {}, "out/char_lm"),
        ("--short", config.SHORT, "out/char_lm_short"),
        ("--short --steps 7 --out here", config.SHORT | {"steps": 7}, "here"),
    ],
)
def test_flags_say_what_is_run(monkeypatch, arguments, changed, out):
    runs = []
    monkeypatch.setattr(processes, "start", lambda *_, **__: None)
    monkeypatch.setattr(train, "run", lambda *run, **_: runs.append(run))
    assert main.main(arguments.split()) == 0
    settings = dataclasses.replace(config.PRESETS["tiny"], **changed)
    names = ["curvadion", "local_muon", "synchronous_dion"]
    assert runs == [(settings, names, Path(out))]


@pytest.mark.parametrize(
    ("values", "synced", "title"),
    [
        pytest.param(
            [None, 0.7, 0.2],
            [True, True, False],
            "method: value, threshold (dashed), 2 syncs (ticks)",
            id="a value and its threshold",
        ),
        pytest.param(
            [None] * 3, [False, True, False], "method: 1 sync (ticks)", id="a schedule"
        ),
    ],
)
def test_the_picture_shows_a_trigger(values, synced, title):
    lines = [
        {"step": step, "value": value, "threshold": value and 0.5, "synced": sync}
        | {"syncs": sum(synced[:step])}
        for step, (value, sync) in enumerate(zip(values, synced, strict=True), start=1)
    ]
    axes = Figure().subplots()
    picture._trigger(axes, lines, "C0", "method")
    assert axes.get_title() == title
    first = axes.lines[0].get_ydata()
    shown = [np.nan, 0.7, 0.2] if any(values) else np.cumsum(synced)
    np.testing.assert_array_equal(first, shown)


def test_other_configuration_is_refused_and_named(tmp_path):
    out, settings, other = tmp_path / "out", {"seed": 0}, {"seed": 1}
    report.open_directory(out, settings, methods.METHODS, False)
    with pytest.raises(ValueError, match="--seed was 0 and is now 1"):
        report.open_directory(out, other, methods.METHODS, False)
    report.open_directory(out, other, methods.METHODS, True)
    assert report.read_json(out / "config.json", None) == other
