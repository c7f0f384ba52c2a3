"""The program of `docs/multi-host.md`, in the two processes that it is for."""

import re
from pathlib import Path

import launch
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "multi-host.md"


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
