"""A run of the example in four processes, to which others are compared."""

from pathlib import Path

import launch
import pytest
from interrupted_main import commands


@pytest.fixture(scope="session")
def four(text, tmp_path_factory) -> tuple[Path, list[tuple[int, str]]]:
    """Its folder, and exit status and output of each process."""
    out = tmp_path_factory.mktemp("four") / "out"
    return out, launch.together(commands(text, out, 4))
