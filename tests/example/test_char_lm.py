"""The example examples/char_lm: its data, its model, and whole runs of a few steps."""

import dataclasses
import json
import resource
import shutil
import signal
from pathlib import Path

import config
import data
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

from curvadion_jax import _storage, triggers

# Float32 products of sines and cosines; measured below 1e-6.
ROTARY_TOLERANCE = 1e-5

MICRO = (
    "--layers 2 --width 16 --heads 2 --batch 2 --sequence-length 16 --replicas 2 "
    "--evaluation-batches 1 --evaluate-every 2 --checkpoint-every 2"
).split()


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


def write_shard(file: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    file.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return file


@pytest.mark.slow
def test_library_corpus_is_real_text_and_the_same_every_time():
    first, second = data.load(None), data.load(None)
    assert first.fingerprint == second.fingerprint
    assert first.vocabulary == 256
    sizes = sum(map(len, first.training)), sum(map(len, first.validation))
    assert sizes[0] > 5_000_000
    assert 0.01 < sizes[1] / sum(sizes) < 0.25
    names = [file.as_posix() for file in data.library_files()]
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in name or "-packages" in name]


def test_split_is_disjoint_complete_and_stable():
    names = [f"package/module{number}.py" for number in range(1000)]
    training, validation = data.split(names)
    assert not set(training) & set(validation)
    assert sorted(training + validation) == sorted(names)
    assert 30 <= len(validation) <= 70  # 5% of 1000, +- 3 standard deviations
    assert data.split(names[::-1])[1] == validation[::-1]
    kept = [name for name in names if name != training[0]]
    assert data.split(kept)[1] == validation


def test_split_of_two_files_has_both_sides():
    for names in (["a", "b"], ["c", "d"], ["e", "f"]):
        training, validation = data.split(names)
        assert len(training) == len(validation) == 1


def test_no_held_out_file_is_trained_on(text):
    corpus = data.load(str(text))
    (training,), (validation,) = corpus.training, corpus.validation
    names = [file.name for file in text.iterdir()]
    for name in names:
        content = (text / name).read_bytes()
        where = content in training.tobytes(), content in validation.tobytes()
        assert where in {(True, False), (False, True)}
        assert where[1] == (name in data.split(names)[1])


def test_single_file_holds_out_its_end(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(32, 127)) * 20)
    corpus = data.load(str(file))
    whole = np.concatenate([*corpus.training, *corpus.validation])
    assert whole.tobytes() == file.read_bytes()
    assert corpus.validation[0].size == 95


def test_batches_depend_on_seed_and_step_alone(text):
    corpus = data.load(str(text))
    batch = corpus.training_batch((7, 3), sequences=4, length=16)
    assert batch.shape == (4, 17)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, corpus.training_batch((7, 3), 4, 16))
    for other in ((7, 4), (8, 3)):
        assert (batch != corpus.training_batch(other, 4, 16)).any()
    whole = corpus.training[0].tobytes()
    assert all(row.astype(np.uint8).tobytes() in whole for row in batch)


def test_validation_batches_are_spread_over_the_held_out_text():
    pieces = [np.arange(100, dtype=np.uint16), np.arange(100, 110, dtype=np.uint16)]
    corpus = data.Corpus([], pieces, vocabulary=110, fingerprint="")
    batches = [corpus.validation_batch(i, 2, sequences=4, length=5) for i in (0, 1)]
    starts = sorted(row[0] for batch in batches for row in batch)
    # 95 + 5 places to start in, divided by 8; no crop reaches into the next piece.
    assert starts == [0, 12, 25, 37, 50, 62, 75, 87]
    assert all((np.diff(batch) == 1).all() for batch in batches)


def test_crop_may_start_at_the_last_place_of_a_piece():
    pieces = [np.array([1, 2]), np.array([3]), np.array([4, 5, 6])]
    corpus = data.Corpus(pieces, [], vocabulary=7, fingerprint="")
    rows = corpus._crops(pieces, np.array([0.0, 0.34, 0.99]), length=1)
    assert rows.tolist() == [[1, 2], [4, 5], [5, 6]]


def test_shard_reader_reads_what_was_written(tmp_path):
    tokens = [0, 1, 50256, 7]
    read = data.read_shard(write_shard(tmp_path / "train_0.bin", tokens))
    assert read.dtype == np.uint16
    assert read.tolist() == tokens


def test_shards_are_divided_by_name(tmp_path):
    write_shard(tmp_path / "fineweb_train_000001.bin", [1] * 9)
    write_shard(tmp_path / "fineweb_train_000002.bin", [2] * 9)
    write_shard(tmp_path / "fineweb_val_000000.bin", [3] * 9)
    corpus = data.load(str(tmp_path))
    assert [piece[0] for piece in corpus.training] == [1, 2]
    assert [piece[0] for piece in corpus.validation] == [3]
    assert corpus.vocabulary == 50_304


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


@pytest.mark.slow
def test_run_leaves_the_promised_files(tmp_path, text):
    out = tmp_path / "out"
    methods_flag = ["--method", "synchronous_dion,diloco"]
    arguments = [*MICRO, *methods_flag, "--steps", "3", "--sync-every", "2"]
    arguments += ["--data", str(text), "--out", str(out)]
    assert main.main(arguments) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [row["method"] for row in summary] == ["synchronous_dion", "diloco"]
    for row in summary:
        assert (row["replicas"], row["steps"]) == (2, 3)
        assert 0 < row["validation_loss"] < 6
        assert row["seconds"] > 0
        lines = journal.read_journal(out / f"{row['method']}.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1]["bytes"] == row["bytes"]
        assert lines[-1]["validation_loss"] == row["validation_loss"]
        assert (out / "checkpoints" / row["method"]).is_dir()
    synchronous, diloco = summary
    assert synchronous["syncs"] == 3
    assert synchronous["divergence"] < 1e-6
    assert diloco["syncs"] == 1
    assert diloco["divergence"] > 1e-4
    assert diloco["synchronous_bytes"] == synchronous["synchronous_bytes"]
    assert (out / "picture.png").read_bytes().startswith(b"\x89PNG")


def run_micro(text: Path, out: Path, *more: str) -> int:
    arguments = ["--method", "curvadion", "--steps", "6", "--budget", "0.2"]
    return main.main(
        [*MICRO, *arguments, "--data", str(text), "--out", str(out), *more]
    )


def results(out: Path) -> tuple[list, list]:
    """Summary and journal without the seconds."""
    summary = json.loads((out / "summary.json").read_text())
    lines = journal.read_journal(out / "curvadion.jsonl")
    for row in (*summary, *lines):
        row.pop("seconds")
    return summary, lines


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert run_micro(text, out) == 0
    return out


def disturb(monkeypatch, step: int, action) -> None:
    """Call `action` when the batch of a step is made."""
    original = data.Corpus.training_batch

    def training_batch(self, seed, *arguments, **keywords):
        if seed[1] == step:
            action()
        return original(self, seed, *arguments, **keywords)

    monkeypatch.setattr(data.Corpus, "training_batch", training_batch)


@pytest.mark.slow
def test_run_after_ctrl_c_goes_on_to_the_same_result(
    text, tmp_path, finished, monkeypatch, capsys
):
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        disturb(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        assert run_micro(text, out) == 130
    assert "saved at step 3 of 6" in capsys.readouterr().err
    assert not (out / "summary.json").exists()
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


@pytest.mark.slow
def test_sigterm_twice_in_a_save_stops_after_the_next_step(
    text, tmp_path, finished, monkeypatch, capsys
):
    out, remove = tmp_path / "stopped", _storage.remove

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        remove(*arguments)

    handler = signal.getsignal(signal.SIGTERM)
    for status, step in ((0, 3), (75, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(_storage, "remove", interrupted)
            assert run_micro(text, out, "--stopped-status", str(status)) == status
        assert f"saved at step {step} of 6" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is handler
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


@pytest.mark.slow
def test_run_without_room_says_so_and_goes_on_when_there_is_some(
    text, tmp_path, finished, monkeypatch, capsys
):
    out = tmp_path / "full"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = (10_000, hard)  # more than the journal, less than a checkpoint's arrays
    with monkeypatch.context() as patch:
        disturb(patch, 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, small))
        try:
            assert run_micro(text, out) == 74
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    checkpoints = out / "checkpoints/curvadion"
    assert f"stopped: [Errno 27] step 4 was not saved in {checkpoints}: File" in said
    assert "Its steps [2] are as they were" in said
    assert "Traceback" not in said
    assert [line["step"] for line in results_so_far(out)] == [1, 2, 3, 4]
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


@pytest.mark.slow
def test_killed_run_repeats_the_steps_after_its_last_checkpoint(
    text, tmp_path, finished, monkeypatch
):
    out = tmp_path / "killed"

    def die():
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        disturb(patch, 6, die)
        with pytest.raises(RuntimeError, match="killed"):
            run_micro(text, out)
    # Step 5 was dispatched and not yet reported; half a line of it may be there.
    assert [line["step"] for line in results_so_far(out)] == [1, 2, 3, 4]
    with (out / "curvadion.jsonl").open("a") as stream:
        stream.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


def results_so_far(out: Path) -> list[dict]:
    return journal.read_journal(out / "curvadion.jsonl")


@pytest.mark.slow
def test_finished_method_is_kept_until_restart(
    text, tmp_path, finished, monkeypatch, capsys
):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)

    def refuse():
        raise RuntimeError("trained again")

    disturb(monkeypatch, 1, refuse)
    assert run_micro(text, out) == 0
    assert "finished before" in capsys.readouterr().out
    assert results(out) == results(finished)
    with pytest.raises(RuntimeError, match="trained again"):
        run_micro(text, out, "--restart")
    assert not (out / "summary.json").exists()
    assert not (out / "checkpoints" / "curvadion").exists()


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
