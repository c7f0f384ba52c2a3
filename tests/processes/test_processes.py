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
    assert alone["restored"]
    for _, text in ended:
        found = json.loads(text.splitlines()[-1])
        assert found["restored"]
        assert found["extra"] == {"process": 0}
        assert found["model"] == pytest.approx(alone["model"], rel=RTOL)
        assert found["replaced"] == alone["replaced"] == [1]
        assert found["named"] == alone["named"] == [1]
        assert found["divergence of copied"] == alone["divergence of copied"] == 0
        assert found["divergence of mended"] == alone["divergence of mended"] == 0
        assert found["mended"] == pytest.approx(found["model"], rel=RTOL)
        assert found["divergence"] == pytest.approx(alone["divergence"], abs=RTOL)
        for what in ("state", "observed"):
            # No trigger value here: every_k compares nothing.
            numbers = {k: v for k, v in found[what].items() if v == v}
            assert numbers == {k: v for k, v in alone[what].items() if v == v}
            assert numbers["replicas"] == 2


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
