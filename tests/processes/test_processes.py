"""Two processes with one replica each are one process with two."""

import json
import re
from pathlib import Path

import launch
import pytest
import two_processes

# Means of two float32 numbers, summed by another implementation.
RTOL = 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "multi-host.md"


@pytest.mark.slow
def test_what_every_process_reads(tmp_path):
    port, folder = str(launch.free_port()), tmp_path / "together"
    ended = launch.together(
        [[two_processes.__file__, str(index), port, folder] for index in range(2)]
    )
    assert [status for status, _ in ended] == [0, 0], ended
    alone = two_processes.train(tmp_path / "alone")
    assert alone["state"]["syncs"] == 2
    assert alone["every step"] == 0
    assert alone["step"] == two_processes.STEPS
    assert alone["goes on"] < RTOL < alone["divergence"]
    # A repair that does not follow a sync is drift.
    assert alone["displaced"] is None
    assert alone["compiled"] == 1
    names = {"divergence", "consensus", "anchor", "repaired", "goes on"}
    for _, text in ended:
        found = json.loads(text.splitlines()[-1])
        assert found.keys() == alone.keys()
        for name in alone:
            wanted = alone[name]
            if name in names:
                wanted = pytest.approx(wanted, rel=RTOL, abs=RTOL)
            assert found[name] == wanted, name


@pytest.mark.slow
def test_the_program_of_the_page_trains(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    program = tmp_path / "own.py"
    program.write_text(code.replace("12421", str(launch.free_port())))
    ended = launch.together([[program, str(index)] for index in range(2)])
    assert [status for status, _ in ended] == [0, 0], ended
    for index, (_, text) in enumerate(ended):
        printed = re.findall(rf"^{index} \d+ ([\d.]+)$", text, re.MULTILINE)
        losses = [float(loss) for loss in printed]
        assert len(losses) == 4
        assert losses[-1] < 0.8 * losses[0]
        assert int(text.splitlines()[-1]) > 2
