"""The example's main job in several processes is the one in one process.

Where one process dies or stands still the others end, and the run goes on.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import interrupted_main
import journal
import launch
import main
import pytest
from interrupted_main import commands, results

import curvadion_jax as cd

# A few starts of several programs, each of which compiles, one after the other.
pytestmark = pytest.mark.timeout(4 * launch.SECONDS)
# Float32 means over replicas: gloo adds them up in another order than the all-reduce
# within a process. Measured after 9 steps: 1e-6 of the loss. The drift is the RMS of
# differences of parameters, relative to theirs.
RTOL, ATOL = 1e-5, 1e-6


@pytest.fixture(scope="module")
def run(text):
    """Starts the example in several processes, which compile what is new to them."""

    def start(out: Path, signals="never", own=()) -> list[tuple[int, str]]:
        """Exit status and output of both; `own` is for the last one alone."""
        first, last = commands(text, out, 2, signals)
        return launch.together([first, [*last, *own]])

    return start


def assert_same(found: tuple[list, list], expected: tuple[list, list]) -> None:
    for some, others in zip(found, expected, strict=True):
        assert len(some) == len(others)
        for row, other in zip(some, others, strict=True):
            # What was sent and when is equal; approx takes only numbers and None.
            exact = {k: v for k, v in other.items() if not isinstance(v, float)}
            assert {k: row[k] for k in exact} == exact
            close = {k: v for k, v in other.items() if isinstance(v, float)}
            assert {k: row[k] for k in close} == pytest.approx(
                close, rel=RTOL, abs=ATOL
            )


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> tuple[list, list]:
    out = tmp_path_factory.mktemp("alone")
    assert (
        main.main([*interrupted_main.MICRO, "--data", str(text), "--out", str(out)])
        == 0
    )
    summary, lines = results(out)
    # Neither is every step a sync, nor are the replicas equal at the end.
    assert summary[0]["syncs"] == 4
    assert summary[0]["divergence"] > 1e-5
    return summary, lines


@pytest.mark.slow
def test_a_signal_in_one_process_stops_all_and_the_same_command_goes_on(
    run, tmp_path, alone
):
    out = tmp_path / "out"
    for signals, asked, status in (("3", 3, 130), ("7:SIGTERM", 7, 0)):
        ended = run(out, signals)
        assert [found for found, _ in ended] == [status] * 2, ended
        (step,) = map(int, re.findall(r"saved at step (\d) of 9", ended[0][1]))
        # The service takes the step after the furthest that a process has finished.
        assert step in (asked, asked + 1, asked + 2)
        lines = journal.read_journal(out / "diloco.jsonl")
        assert [line["step"] for line in lines] == [*range(1, step + 1)]
        assert cd.checkpoint.latest_step(out / "checkpoints/diloco") == step
        assert not (out / "summary.json").exists()
    ended = run(out)
    assert [status for status, _ in ended] == [0, 0], ended
    assert_same(results(out), alone)
    assert (out / "picture.png").exists()
    assert "held-out text" in ended[0][1]
    assert "diloco" not in ended[1][1]  # the first one prints for all


@pytest.mark.slow
def test_a_process_that_cannot_write_says_so_and_no_other_waits_for_it(run, tmp_path):
    checkpoints = tmp_path / "out/checkpoints/diloco"
    (first, _), (status, said) = run(tmp_path / "out", "5:full")
    assert status == 74
    assert f"stopped: Step 6 cannot be written to {checkpoints}: " in said
    assert "File too large" in said
    assert first == -signal.SIGABRT  # JAX ends it
    assert cd.checkpoint.latest_step(checkpoints) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "says", "first_says"),
    [
        pytest.param(
            ["--seed", "5"], "other flags or", "process 1 has other", id="flags"
        ),
        pytest.param(
            ["--data", "/no/such"], "no such file", "process 1 stopped", id="data"
        ),
    ],
)
def test_what_one_process_is_refused_stops_all(run, tmp_path, own, says, first_says):
    ended = run(tmp_path / "out", own=own)
    assert [status for status, _ in ended] == [2, 2], ended
    assert says in ended[1][1]
    assert first_says in ended[0][1]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_distributed_outside_of_a_cluster_says_what_to_give(text, tmp_path):
    files = ["--data", text, "--out", tmp_path / "out"]
    ((status, output),) = launch.together([[main.__file__, "--distributed", *files]])
    assert status == 2
    assert "JAX recognises no cluster" in output
    assert "--coordinator" in output


def ended(both, folder: Path) -> tuple[int, int | None, str]:
    """Exit statuses when the first has ended (None if the victim stands still), and
    what the first has printed.
    """
    with (folder / "0.txt").open("w") as first, (folder / "1.txt").open("w") as victim:
        workers = [
            subprocess.Popen(
                [sys.executable, *command],
                env=launch.ENVIRONMENT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for command, file in zip(both, (first, victim), strict=True)
        ]
    try:
        workers[0].wait(launch.SECONDS)
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return codes[0], codes[1], (folder / "0.txt").read_text()


@pytest.mark.slow
def test_the_other_process_ends_and_the_run_goes_on(run, text, alone, tmp_path):
    out = tmp_path / "out"
    for signals, status, saved in (("5:SIGKILL", -9, 3), ("8:SIGSTOP", None, 6)):
        first, victim, said = ended(commands(text, out, 2, signals), tmp_path)
        assert victim == status
        assert first != 0
        # JAX's own words.
        assert "stopped sending heartbeats):\n1\n" in said
        assert cd.checkpoint.latest_step(out / "checkpoints/diloco") == saved
    done = run(out)
    assert [status for status, _ in done] == [0, 0], done
    assert_same(results(out), alone)
