"""The example examples/char_lm: its model, its methods and its flags."""

import dataclasses
from pathlib import Path

import config
import jax
import jax.numpy as jnp
import main
import methods
import model
import numpy as np
import processes
import pytest
import report
import train

import curvadion_jax as cd


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


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_has_a_state_for_rows_of_stacked_blocks(name):
    settings, gpt = config.PRESETS["tiny"], model.GPT(11, layers=2, width=16, heads=2)
    mesh = cd.replicas.simulated(2)
    state = jax.eval_shape(lambda: train.initial_state(gpt, name, settings, mesh))
    assert state.params["blocks"]["up"]["kernel"].shape == (2, 2, 16, 64)
    assert cd.metrics.observe(state.opt_state).value.shape == (2,)


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
    names = ["local_muon", "synchronous_adamw", "synchronous_muon", "curvadion"]
    assert runs == [(settings, names, Path(out))]


def test_other_configuration_is_refused_and_named(tmp_path):
    out, settings, other = tmp_path / "out", {"seed": 0}, {"seed": 1}
    report.open_directory(out, settings, methods.METHODS, False)
    with pytest.raises(ValueError, match="--seed was 0 and is now 1"):
        report.open_directory(out, other, methods.METHODS, False)
    report.open_directory(out, other, methods.METHODS, True)
    assert report.read_json(out / "config.json", None) == other
