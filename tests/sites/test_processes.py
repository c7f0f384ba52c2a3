"""A site of two processes, of which one talks to the store; and one of another mesh."""

import json

import jax
import launch
import pytest
import site_of_two
from site_runs import together


@pytest.mark.slow
def test_a_site_of_two_processes_beside_one_of_one(tmp_path):
    port = str(launch.free_port())
    commands = [
        [site_of_two.__file__, str(index), port, str(tmp_path)] for index in range(2)
    ]
    axis = ("fsdp",), (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), *axis, devices=jax.devices()[4:6])
    options = {"max_lag": 0, "quorum": 2}
    runs = {
        "oslo": lambda: launch.together(commands),
        "bergen": lambda: site_of_two.train(
            f"{tmp_path}/lock", mesh, "bergen", **options
        ),
    }
    found = together(runs, launch.SECONDS)
    assert [status for status, _ in found["oslo"]] == [0, 0], found["oslo"]
    first, second = (json.loads(text.splitlines()[-1]) for _, text in found["oslo"])
    bergen = found["bergen"]
    assert first["with another"]["counted"] == bergen["counted"] == 3
    assert first["with another"]["digest"] == bergen["digest"]
    for run in ("with another", "overlap"):
        assert first[run].pop("up") > 0
        assert second[run].pop("up") == 0
        assert first[run] == second[run]
    assert first["overlap"]["counted"] >= 1
    assert first["handed over"] == ["ndarray"]
    assert second["handed over"] == []
    assert not list(tmp_path.glob("nothing"))
    assert first["errors"][0] == second["errors"][0]
    for told in (first["errors"], second["errors"]):
        no_folder, other_form, of_one_process, of_two = told
        assert "cannot be opened: No such file" in no_folder
        assert "another compressor" in other_form
        assert "on devices of some of this site's 2 proc" in of_one_process
        assert "RuntimeError: Another site has joined the run as 'oslo'" in of_two
