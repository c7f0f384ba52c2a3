"""Whole runs of the example: what they leave, and how those go on that were stopped."""

import json
import resource
import signal
from pathlib import Path

import data
import journal
import main
import pytest
from interrupted_main import results

MICRO = (
    "--layers 2 --width 16 --heads 2 --batch 2 --sequence-length 16 --replicas 2 "
    "--evaluation-batches 1 --evaluate-every 2 --checkpoint-every 2"
).split()


def run_micro(text: Path, out: Path, *more: str) -> int:
    arguments = ["--method", "curvadion", "--steps", "6", "--threshold", "0.5"]
    return main.main(
        [*MICRO, *arguments, "--data", str(text), "--out", str(out), *more]
    )


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
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)]
)
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_result(
    number, status, text, tmp_path, finished, monkeypatch, capsys
):
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        disturb(patch, 3, lambda: signal.raise_signal(number))
        assert run_micro(text, out, "--stopped-status", "75") == status
    assert "saved at step 3 of 6" in capsys.readouterr().err
    assert not (out / "summary.json").exists()
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles for two numbers of replicas
def test_a_run_goes_on_with_another_number_of_replicas(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        disturb(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        assert run_micro(text, tmp_path) == 130
    assert run_micro(text, tmp_path, "--replicas", "4") == 0
    ((row,), lines) = results(tmp_path)
    assert (row["replicas"], row["steps"]) == (4, 6)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
# Orbax stops at the first array; the others report to its event loop, closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
    assert f"cannot be written to {out}/checkpoints/curvadion: " in said
    assert "File too large" in said
    written = journal.read_journal(out / "curvadion.jsonl")
    assert [line["step"] for line in written] == [1, 2, 3, 4]
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
    written = journal.read_journal(out / "curvadion.jsonl")
    assert [line["step"] for line in written] == [1, 2, 3, 4]
    with (out / "curvadion.jsonl").open("a") as stream:
        stream.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    assert run_micro(text, out) == 0
    assert results(out) == results(finished)


@pytest.mark.slow
def test_run_leaves_the_promised_files_and_is_kept_until_restart(
    tmp_path, text, monkeypatch, capsys
):
    out = tmp_path / "out"
    methods = ["--method", "synchronous_adamw,diloco", "--sync-every", "2"]
    arguments = [*MICRO, *methods, "--data", str(text), "--out", str(out)]
    assert main.main([*arguments, "--steps", "3"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [row["method"] for row in summary] == ["synchronous_adamw", "diloco"]
    for row in summary:
        assert (row["replicas"], row["steps"]) == (2, 3)
        lines = journal.read_journal(out / f"{row['method']}.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1]["bytes"] == row["bytes"]
        assert lines[-1]["validation_loss"] == row["validation_loss"]
    assert [row["syncs"] for row in summary] == [3, 1]
    assert summary[0]["divergence"] < 1e-6 < 1e-4 < summary[1]["divergence"]
    assert (out / "picture.png").read_bytes().startswith(b"\x89PNG")

    def refuse():
        raise RuntimeError("trained again")

    disturb(monkeypatch, 1, refuse)
    assert main.main([*arguments, "--steps", "3"]) == 0
    assert "finished before" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="trained again"):
        main.main([*arguments, "--steps", "3", "--restart"])
    assert not (out / "summary.json").exists()
    assert not (out / "checkpoints" / "diloco").exists()
