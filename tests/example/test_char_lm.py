"""The example examples/char_lm: its model, its methods, its flags and its picture."""

import dataclasses
from pathlib import Path

import config
import jax
import jax.numpy as jnp
import journal
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


@pytest.fixture(scope="module")
def micro() -> tuple[model.GPT, dict]:
    """A model, and parameters in which no kernel is zero."""
    gpt = model.GPT(vocabulary=11, layers=2, width=16, heads=2)
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.jit(gpt.init)(jax.random.key(0), tokens)["params"]
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    leaves = [leaf + 0.1 * random.normal(size=leaf.shape) for leaf in leaves]
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    return gpt, jax.tree.unflatten(structure, leaves)


@pytest.mark.slow
def test_parameters_are_stacked_over_layers_and_logits_are_float32(micro):
    _, params = micro
    assert params["blocks"]["attention"]["query"]["kernel"].shape == (2, 16, 16)
    assert params["blocks"]["up"]["kernel"].shape == (2, 16, 64)
    assert params["lm_head"]["kernel"].shape == (16, 11)
    half = model.GPT(11, layers=2, width=16, heads=2, dtype=jnp.dtype("bfloat16"))
    tokens = jnp.zeros((3, 8), jnp.int32)
    logits = jax.eval_shape(lambda: half.apply({"params": params}, tokens))
    assert logits.shape == (3, 8, 11)
    assert logits.dtype == jnp.float32


@pytest.mark.slow
def test_first_loss_is_that_of_a_uniform_guess():
    gpt = model.GPT(vocabulary=11, layers=1, width=16, heads=2)
    tokens = jnp.arange(8)[None] % 11
    params = jax.jit(gpt.init)(jax.random.key(0), tokens)["params"]
    loss = jax.jit(model.next_token_loss, static_argnums=0)(gpt, params, tokens)
    np.testing.assert_allclose(loss, np.log(11), rtol=1e-6)


@pytest.mark.slow
def test_later_tokens_do_not_change_earlier_logits(micro):
    gpt, params = micro
    tokens = jnp.arange(8)[None]
    changed = tokens.at[0, 5].set(9)
    apply = jax.jit(gpt.apply)
    before, after = (apply({"params": params}, x)[0] for x in (tokens, changed))
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (np.abs(before[5:] - after[5:]).max(axis=-1) > 1e-4).all()


@pytest.mark.slow
def test_rotary_products_depend_on_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    length = 12
    everywhere = jnp.broadcast_to(query, (1, length, 1, 8))
    queries = model.rotary(everywhere)[0, :, 0]
    keys = model.rotary(jnp.broadcast_to(key, everywhere.shape))[0, :, 0]
    products = np.asarray(queries @ keys.T)
    for distance in range(-4, 5):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=ROTARY_TOLERANCE)
    assert np.ptp(products[0]) > 0.1
    norms = jnp.linalg.norm(queries, axis=-1)
    np.testing.assert_allclose(norms, norms[0], rtol=ROTARY_TOLERANCE)


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_builds_a_state(name):
    sizes = config.PRESETS["tiny"]
    gpt = model.GPT(11, layers=2, width=16, heads=2)
    state = jax.eval_shape(lambda: train.initial_state(gpt, name, sizes))
    assert state.params["blocks"]["up"]["kernel"].shape == (2, 16, 64)


def test_a_threshold_takes_the_place_of_curvadions_budget():
    params = {"kernel": jnp.ones((4, 8))}

    def trigger_state(threshold):
        settings = dataclasses.replace(config.PRESETS["tiny"], threshold=threshold)
        tx = methods.METHODS["curvadion"].build(settings, "replica")
        return tx.init(params).trigger_state

    assert isinstance(trigger_state(None), triggers.BudgetState)
    assert list(trigger_state(0.3)) == ["kernel"]


def started(monkeypatch, *arguments: str) -> tuple:
    """Configuration, methods and directory of a run."""
    runs = []
    monkeypatch.setattr(processes, "start", lambda *_, **__: None)
    monkeypatch.setattr(
        train,
        "run",
        lambda settings, names, out, **_: runs.append((settings, names, out)),
    )
    assert main.main(arguments) == 0
    return runs[0]


def test_without_flags_three_methods_are_compared(monkeypatch):
    settings, names, out = started(monkeypatch)
    assert settings == config.PRESETS["tiny"]
    assert names == ["curvadion", "local_muon", "synchronous_dion"]
    assert out == Path("out/char_lm")


def test_a_short_run_is_shorter_and_lies_elsewhere(monkeypatch):
    settings, names, out = started(monkeypatch, "--short")
    assert settings == dataclasses.replace(config.PRESETS["tiny"], **config.SHORT)
    assert settings.steps < config.PRESETS["tiny"].steps
    assert names == ["curvadion", "local_muon", "synchronous_dion"]
    assert out == Path("out/char_lm_short")


def test_flags_go_before_what_a_short_run_has(monkeypatch):
    settings, _, out = started(monkeypatch, "--short", "--steps", "7", "--out", "here")
    shorter = config.SHORT | {"steps": 7}
    assert settings == dataclasses.replace(config.PRESETS["tiny"], **shorter)
    assert out == Path("here")


def panel(values: list, synced: list[bool]):
    """What the picture shows below of a method."""
    lines = [
        {"step": step, "value": value, "threshold": value and 0.5, "synced": sync}
        | {"syncs": sum(synced[:step])}
        for step, (value, sync) in enumerate(zip(values, synced, strict=True), start=1)
    ]
    figure = Figure()
    axes = figure.subplots()
    picture._trigger(axes, lines, "C0", "method")
    figure.canvas.draw()
    return axes


def test_the_picture_shows_a_triggers_value_and_threshold():
    axes = panel([None, 0.7, 0.2, 0.4], [True, True, False, False])
    assert axes.get_title() == "method: value, threshold (dashed), 2 syncs (ticks)"
    value, threshold = (line.get_ydata() for line in axes.lines)
    np.testing.assert_array_equal(value, [np.nan, 0.7, 0.2, 0.4])
    np.testing.assert_array_equal(threshold, [np.nan, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("synced", "title"),
    [
        ([False, True, False], "method: 1 sync (ticks)"),
        ([True] * 3, "method: 3 syncs (ticks)"),
        ([False] * 3, "method: 0 syncs (ticks)"),
    ],
)
def test_the_picture_counts_syncs_where_a_trigger_looks_at_nothing(synced, title):
    axes = panel([None] * 3, synced)
    assert axes.get_title() == title
    (count,) = (line.get_ydata() for line in axes.lines)
    np.testing.assert_array_equal(count, np.cumsum(synced))
    low, high = axes.get_ylim()
    assert low == 0
    assert high >= max(1, sum(synced))
    assert axes.get_yticks().tolist() == [int(tick) for tick in axes.get_yticks()]


def test_other_configuration_is_refused_and_named(text, tmp_path, capsys):
    settings = {"seed": 0, "width": 16}
    report.open_directory(tmp_path / "out", settings, methods.METHODS, False)
    other = {"seed": 1, "width": 16}
    with pytest.raises(ValueError, match="--seed was 0 and is now 1") as error:
        report.open_directory(tmp_path / "out", other, methods.METHODS, False)
    assert "width" not in str(error.value)
    report.open_directory(tmp_path / "out", other, methods.METHODS, True)
    assert report.read_json(tmp_path / "out" / "config.json", None) == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("--dtype float16", "invalid choice", id="dtype"),
        pytest.param("--preset huge", "invalid choice", id="preset"),
    ],
)
def test_other_choices_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_too_many_replicas_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processes, "_make_devices", lambda number: None)
    arguments = ["--replicas", "9", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main.main(arguments)
    assert "needs as many devices" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    file = tmp_path / "m.jsonl"
    lines = journal.Journal(file, 0)
    lines.write({"step": 1, "value": float("inf"), "synced": True})
    lines.close()
    assert file.read_text() == '{"step": 1, "value": null, "synced": true}\n'
