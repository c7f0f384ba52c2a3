"""The queue for an accelerator: its order, what is done, and that it goes on."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import data
import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


def load(name):
    spec = importlib.util.spec_from_file_location(name, GPU / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


queue_jobs, map_table = load("queue_jobs"), load("map_table")
FULL = dataclasses.replace(queue_jobs.FULL, text=280_000_000)


def ended(job, loss, **more):
    numbers = {"bytes": 1, "synchronous_bytes": 100, "tokens_a_second": 1}
    return {"group": job.group, **job.key, "loss": loss} | numbers | more


def test_every_job_is_there_once_and_the_throughput_is_first():
    jobs = queue_jobs.jobs([], FULL)
    keys = {json.dumps(job.key) for job in jobs}
    assert len(keys) == len(jobs)
    groups = list(dict.fromkeys(job.group for job in jobs))
    assert groups == [
        *("throughput", "map (a)", "map (b)", "map (c)", "middle", "25m", "dion"),
        "one program",
    ]


def test_no_run_reads_more_than_the_text_has():
    for job in queue_jobs.jobs([], FULL):
        if job.run is not None:
            size = job.size
            batch = size.replicas * size.sequences * size.length
            assert job.run.steps * batch < FULL.text


def test_the_fastest_variant_that_ends_alike_is_used():
    variants = [x for x in queue_jobs.jobs([], FULL) if x.group == "throughput"]
    losses, speeds = (2.0, 2.01, 2.5, 2.01, 2.0), (1, 3, 9, 2, 1)
    rows = [
        ended(job, loss, tokens_a_second=speed)
        for job, loss, speed in zip(variants, losses, speeds, strict=True)
    ]
    assert queue_jobs.chosen(rows, FULL) == {"half": True}
    later = [x for x in queue_jobs.jobs(rows, FULL) if x.group == "map (a)"]
    assert all(job.size.half and not job.size.attention for job in later)


def test_what_is_done_or_failed_twice_does_not_wait():
    first, *_ = [x for x in queue_jobs.jobs([], FULL) if x.group == "map (a)"]
    failed = {"group": first.group, **first.key, "error": "no memory"}
    assert first in queue_jobs.waiting([failed], FULL)
    assert first not in queue_jobs.waiting([failed, failed], FULL)
    assert first not in queue_jobs.waiting([failed, ended(first, 1.0)], FULL)


def test_the_gap_is_that_of_the_better_learning_rates():
    middle = [x for x in queue_jobs.jobs([], FULL) if x.group == "map (a)"][:4]
    rows = [ended(x, y) for x, y in zip(middle, (2.0, 1.0, 1.1, 1.3), strict=True)]
    (gap,) = map_table.gaps(rows).values()
    assert gap == pytest.approx(10.0)
    assert "10.0%" in "\n".join(map_table.table(rows))


@pytest.mark.slow
def test_the_queue_goes_on_and_writes_what_is_missing(text, tmp_path):
    def call():
        command = [sys.executable, GPU / "queue_jobs.py", "--tiny", "--text", text]
        command += ["--results", tmp_path]
        subprocess.run(command, check=True, timeout=280)
        lines = (tmp_path / "rows.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    size = data.load(str(text)).training[0].size
    scale = dataclasses.replace(queue_jobs.TINY, text=size)

    def missing_and_others(rows):
        jobs = queue_jobs.jobs(rows, scale)
        missing = next(job for job in jobs if job.group == "map (a)")
        return missing, [ended(x, 1.0) for x in jobs if x.key != missing.key]

    # What comes last depends on the rows of what comes first.
    missing, others = missing_and_others(missing_and_others([])[1])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in others))
    rows = call()
    found = [row for row in rows[len(others) :] if missing.key.items() <= row.items()]
    assert [row["run"]["method"] for row in found] == [queue_jobs.BEST_MUON]
    assert found[0]["syncs"] == missing.run.steps
    assert call() == rows
