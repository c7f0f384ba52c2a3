"""What is submitted to a cluster can be read, and asks for what the program knows."""

import re
import subprocess
from pathlib import Path

import main
import pytest
import yaml
from config import PRESETS

CLUSTER = Path(main.__file__).parent / "cluster"
SLURM, JOBSET = CLUSTER / "train.slurm", CLUSTER / "jobset.yaml"


def slurm_arguments() -> list[str]:
    """Of the program, in the script: all of the one command that goes over lines."""
    (command,) = re.findall(r"main\.py ((?:.*\\\n)*.*)\n", SLURM.read_text())
    return command.replace("\\\n", " ").replace('"$OUT"', "/shared/out").split()


def jobset() -> dict:
    (found,) = [
        document
        for document in yaml.safe_load_all(JOBSET.read_text())
        if document["kind"] == "JobSet"
    ]
    return found["spec"]


def job() -> dict:
    (replicated,) = jobset()["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def container() -> dict:
    (found,) = job()["template"]["spec"]["containers"]
    return found


def jobset_arguments() -> list[str]:
    program, script, *arguments = container()["command"]
    assert program == "python"  # no shell, which would keep SIGTERM to itself
    assert (Path(main.__file__).parents[2] / script).samefile(main.__file__)
    return arguments


@pytest.mark.parametrize("arguments", [slurm_arguments, jobset_arguments])
def test_the_program_knows_every_flag(arguments):
    flags = main._parser().parse_args(arguments())
    assert flags.distributed
    assert flags.stopped_status == 75
    assert flags.preset in PRESETS
    assert flags.checkpoint_every <= PRESETS[flags.preset].steps


def test_an_unknown_flag_would_be_found(capsys):
    with pytest.raises(SystemExit):
        main._parser().parse_args([*slurm_arguments(), "--no-such-flag"])
    assert "--no-such-flag" in capsys.readouterr().err


def test_the_script_is_read_by_bash():
    subprocess.run(["bash", "-n", SLURM], check=True)


def test_the_job_asks_for_a_task_a_replica_and_to_be_told_in_time():
    text = SLURM.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert main._parser().parse_args(slurm_arguments()).replicas == tasks
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    # Options after the first command are ignored by sbatch.
    assert text.rindex("#SBATCH") < text.index("\nRESTARTS=")


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [
        (0, 0, False),
        (2, 0, False),
        (74, 0, False),
        (75, 99, True),
        (134, 9, True),
        (134, 10, False),
    ],
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
    assert jobset()["failurePolicy"]["rules"] == [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    spec, pod = job(), job()["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    processes = spec["completions"]
    assert spec["parallelism"] == processes
    flags = main._parser().parse_args(jobset_arguments())
    assert (
        flags.replicas
        == processes * container()["resources"]["limits"]["nvidia.com/gpu"]
    )
    on_exit, on_condition = spec["podFailurePolicy"]["rules"]
    assert on_exit["action"] == on_condition["action"] == "FailJob"
    assert on_exit["onExitCodes"]["values"] == [flags.stopped_status]
    assert on_exit["onExitCodes"]["containerName"] == container()["name"]
    assert on_condition["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (pod["restartPolicy"], spec["backoffLimit"]) == ("Never", 0)
    assert pod["terminationGracePeriodSeconds"] > 60


def test_what_the_pods_name_is_there():
    documents = {d["kind"]: d for d in yaml.safe_load_all(JOBSET.read_text())}
    pod = job()["template"]["spec"]
    account = documents["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert documents["RoleBinding"]["subjects"][0]["name"] == account
    role = documents["Role"]
    assert documents["RoleBinding"]["roleRef"]["name"] == role["metadata"]["name"]
    assert {r for rule in role["rules"] for r in rule["resources"]} >= {"pods", "jobs"}
    (volume,) = pod["volumes"]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    (mount,) = container()["volumeMounts"]
    assert mount["name"] == volume["name"]
    flags = main._parser().parse_args(jobset_arguments())
    assert str(flags.out).startswith(mount["mountPath"])
