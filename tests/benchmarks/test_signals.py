"""What predicts a sync's benefit: the signals, the branches, the correlations."""

import dataclasses
import functools
import re
from pathlib import Path

import branches
import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
import ranks
import runs
import signals
import sizes
from scipy import stats

import curvadion_jax as cd

FOLDER = Path(__file__).parents[2] / "benchmarks" / "communication"
# Float32 norms of a few numbers of order 1 against float64.
RTOL = 1e-5


def trees(random, replicas=3):
    def tree():
        return {
            "kernel": random.normal(size=(replicas, 2, 4, 5)),
            "scale": random.normal(size=(replicas, 5)),
        }

    return {name: tree() for name in ("gradients", "params", "momentum", "anchor")}


def norm(tree, replica):
    return np.sqrt(sum(np.sum(np.square(leaf[replica])) for leaf in tree.values()))


def test_signals_against_loops_over_replicas():
    given = trees(np.random.default_rng(0))
    for leaf in given["anchor"].values():
        leaf[:] = leaf[:1]
    momentum = {"kernel": given["momentum"]["kernel"], "scale": optax.MaskedNode()}
    arguments = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), given | {"momentum": momentum}
    )
    seen = branches.observe(**arguments)

    replicas, m, g = range(3), momentum["kernel"], given["gradients"]["kernel"]
    changes = [
        abs(np.linalg.norm(m[i, j] + g[i, j]) - np.linalg.norm(m[i, j]))
        / np.linalg.norm(m[i, j])
        for i in replicas
        for j in range(2)
    ]
    mean_m, mean_g = m.mean(axis=0), g.mean(axis=0)
    of_mean = [
        abs(np.linalg.norm(mean_m[j] + mean_g[j]) - np.linalg.norm(mean_m[j]))
        / np.linalg.norm(mean_m[j])
        for j in range(2)
    ]
    drift = {name: x - given["anchor"][name] for name, x in given["params"].items()}
    mean_drift = {name: x.mean(axis=0)[None] for name, x in drift.items()}
    mean = {name: x.mean(axis=0)[None] for name, x in given["params"].items()}
    apart = {name: x - mean[name] for name, x in given["params"].items()}
    squares = [
        sum(norm(tree, i) ** 2 for i in replicas) for tree in (apart, given["params"])
    ]
    expected = {
        "rmmc_max": max(changes),
        "rmmc_median": np.median(changes),
        "rmmc_of_mean": max(of_mean),
        "drift": max(norm(drift, i) / norm(given["anchor"], i) for i in replicas),
        "divergence": np.sqrt(squares[0] / squares[1]),
        "agreement": norm(mean_drift, 0) / np.mean([norm(drift, i) for i in replicas]),
        "gradient_norm": np.mean([norm(given["gradients"], i) for i in replicas]),
    }
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, rtol=RTOL, err_msg=name)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Tiny ones, whose quiet steps ask the trigger that the signals are to equal."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(str(7 * number) for number in range(4000)))
    run = runs.Run(
        "dion 1.0",
        0.04,
        trigger="random 4 28",
        sync="reconcile",
        outer="nesterov 0.7 0.6",
        replicas=2,
        seed=1,
        steps=40,
    )
    size = sizes.Size(
        layers=1, width=16, heads=1, length=16, tokens=128, evaluation=4, every=20
    )
    # The signals compare with the momentum that is kept, after error feedback.
    kept = functools.partial(cd.triggers.relative_momentum_change, remember=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "_QUIET", "rmmc 1000000")
        patch.setitem(optimizers._TRIGGERS, "rmmc", kept)
        return branches.Replicas(run, size, data.load(str(file)))


@pytest.mark.slow
def test_branches_are_the_run_with_the_sync_and_without(replicas):
    run = replicas.run
    times = branches.moments(run)
    gaps = np.diff(times[:-1])
    assert times[-1] == run.steps
    assert len(gaps) > 0
    assert all(4 <= gap <= 28 for gap in gaps)

    rows = list(branches.measure(replicas, run.seed))
    assert [row["step"] for row in rows] == times[:-1]
    assert [row["quiet_steps"] for row in rows[1:]] == (gaps - 1).tolist()

    # By hand: quiet up to the second sync, which is then taken or not.
    first, second = times[:2]
    now = replicas.quiet(replicas.start(run.seed), run.seed, 0, first)
    now = replicas.step(now, run.seed, first, sync=True)
    np.testing.assert_allclose(replicas.mean_loss(now), rows[0]["anchor"])
    now = replicas.quiet(now, run.seed, first + 1, second)
    for sync, loss in ((True, "anchor_later"), (False, "mean_later")):
        after = replicas.step(now, run.seed, second, sync=sync)
        spread = [
            float(jnp.max(jnp.ptp(x, axis=0))) for x in jax.tree.leaves(after.params)
        ]
        assert (max(spread) < RTOL) == sync
        later = replicas.quiet(after, run.seed, second + 1, second + 6)
        np.testing.assert_allclose(replicas.mean_loss(later), rows[1][loss])
    assert rows[1]["anchor_later"] != rows[1]["mean_later"]

    # What is there is trained through and not measured.
    assert list(branches.measure(replicas, run.seed, done=[first])) == rows[1:]


@pytest.mark.slow
def test_signals_of_a_run_are_the_triggers(replicas):
    now, values = replicas.start(seed=0), []
    for number in range(6):
        now = replicas.step(now, 0, number)
        values.append(cd.metrics.read(now.state)["value"])
    # The learning rate starts at zero, and so do the kernels of the head and of the
    # ends of a block, one behind the other: momenta are all there after four steps.
    assert np.isfinite(values[4:]).all()
    np.testing.assert_allclose(now.changes[4:], values[4:], rtol=RTOL)


def table(random, number=60):
    """Two groups of two runs, with a benefit that only `drift` tells of."""
    step = np.tile(np.arange(number // 4) * 10.0, 4)
    run = np.repeat(np.arange(4), number // 4)
    signal = random.normal(size=number)
    return {
        "step": step,
        "learning_rate": 1 / (1 + step),
        "quiet_steps": random.integers(3, 28, number).astype(float),
        "group": run // 2,
        "run": run,
        "drift": signal + step,
        "rmmc_max": random.normal(size=number) + step,
        "benefit": np.exp(signal + step / 10) + 5 * (run // 2),
    }


def only(ranks, signal, held, given):
    (found,) = ranks.correlations([signal], "benefit", held, given)
    return found


def test_raw_correlation_is_spearmans():
    given = table(np.random.default_rng(0))
    alone = {name: x[given["group"] == 0] for name, x in given.items()}
    expected = stats.spearmanr(alone["drift"], alone["benefit"]).statistic
    found = only(ranks, "drift", (), alone)
    np.testing.assert_allclose(found, expected)
    # Another group's offset is no correlation.
    far = given | {"benefit": given["benefit"] + 1e6 * given["group"]}
    same = [only(ranks, "drift", (), x) for x in (given, far)]
    np.testing.assert_allclose(*same)


def test_held_columns_are_taken_out():
    given = table(np.random.default_rng(0), 400)
    raw = only(ranks, "rmmc_max", (), given)
    held = only(ranks, "rmmc_max", ranks.TREND, given)
    assert raw > 0.5
    assert abs(held) < 0.15  # 3 standard deviations of 400 independent rows
    assert only(ranks, "drift", ranks.TREND, given) > 0.5
    assert np.isnan(only(ranks, "learning_rate", ranks.TREND, given))


def test_blocks_stay_in_their_run():
    given = table(np.random.default_rng(0))
    given["place"] = np.arange(60.0)
    drawn = ranks.resampled(given, np.random.default_rng(1))
    np.testing.assert_array_equal(np.bincount(drawn["run"]), np.full(4, 15))
    np.testing.assert_array_equal(drawn["run"], drawn["place"] // 15)
    pairs = drawn["place"].reshape(-1, 3)
    np.testing.assert_array_equal(np.diff(pairs, axis=1) % 15, 1)
    assert len(set(drawn["place"])) < 60


def test_columns_by_hand():
    rows = [
        {
            "run": dataclasses.asdict(
                runs.Run("dion 1.0", 0.04, outer=outer, seed=seed)
            ),
            "step": 5,
            "single": 3.0,
            "mean": 2.5,
            "anchor": 2.25,
            "mean_later": 2.0,
            "anchor_later": 2.125,
            "made": "2026-11-21",
        }
        for outer in ("orthonormal 1.0", "mean")
        for seed in (0, 1)
    ]
    found = ranks.columns(rows)
    assert found["group"].tolist() == [1, 1, 0, 0]
    assert found["run"].tolist() == [2, 3, 0, 1]
    for name, value in {"benefit": -0.125, "averaging": 0.5, "outer": 0.25}.items():
        assert found[name].tolist() == [value] * 4


@pytest.mark.parametrize("size", ["cpu", "cpu-128k"])
def test_the_committed_table_and_picture_are_of_the_committed_rows(tmp_path, size):
    folder = FOLDER / "signals" / size
    rows = signals.read(folder / "rows.jsonl")
    given = ranks.columns(rows)
    found = ranks.intervals(given, draws=20)
    text = (folder / "table.md").read_text()
    assert text.startswith(f"{len(rows)} syncs in {len(set(given['run']))} runs; ")
    wanted, made = (
        sorted(
            re.sub(r" \[.*?\]", "", line)  # the intervals are of more draws
            for line in lines.splitlines()
            if line.startswith("|")
        )
        for lines in (text, ranks.markdown(given, found))
    )
    assert made == wanted
    ranks.draw(given, found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    for (signal, _), (value, low, high) in found.items():
        assert np.isnan(low) or low - 0.3 < value < high + 0.3, signal


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert signals.read(file) == []
    file.write_text('{"step": 4}\n{"step": 9}\n{"ste')
    assert signals.read(file) == [{"step": 4}, {"step": 9}]
