"""What is submitted to a cluster can be read, and asks for what the program knows."""

import re
import subprocess
from pathlib import Path

import main
import pytest
import yaml

CLUSTER = Path(main.__file__).parent / "cluster"
SLURM, JOBSET = CLUSTER / "train.slurm", CLUSTER / "jobset.yaml"


def slurm_flags():
    (command,) = re.findall(r"main\.py ((?:.*\\\n)*.*)\n", SLURM.read_text())
    arguments = command.replace("\\\n", " ").replace('"$OUT"', "/shared/out").split()
    return main._parser().parse_args(arguments)


def test_the_slurm_job_has_a_task_for_each_replica_and_is_told_in_time():
    text = SLURM.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert slurm_flags().replicas == tasks
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    # Options after the first command are ignored by sbatch.
    assert text.rindex("#SBATCH") < text.index("\nRESTARTS=")


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, False), (74, 0, False), (75, 99, True), (134, 9, True), (134, 10, False)],
)
def test_the_script_requeues_what_is_not_at_its_end(
    tmp_path, status, restarts, requeued
):
    for name, body in (("srun", f"exit {status}"), ("scontrol", "echo $@ > asked")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "12"}
    variables["SLURM_RESTART_COUNT"] = str(restarts)
    ended = subprocess.run(["bash", SLURM], env=variables, cwd=tmp_path)
    assert ended.returncode == status
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 12\n" * requeued


def test_a_preempted_pod_restarts_all_of_them():
    documents = {d["kind"]: d for d in yaml.safe_load_all(JOBSET.read_text())}
    jobset = documents["JobSet"]["spec"]
    (rule,) = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    program, script, *arguments = container["command"]
    assert program == "python"  # no shell, which would keep SIGTERM to itself
    assert (Path(main.__file__).parents[2] / script).samefile(main.__file__)
    flags = main._parser().parse_args(arguments)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert flags.replicas == job["completions"] * gpus
    assert job["parallelism"] == job["completions"]
    assert flags.stopped_status == slurm_flags().stopped_status == 75
    assert flags.distributed
    assert slurm_flags().distributed
    on_exit, on_condition = job["podFailurePolicy"]["rules"]
    assert on_exit["action"] == on_condition["action"] == "FailJob"
    assert on_exit["onExitCodes"]["values"] == [flags.stopped_status]
