"""Results of the study's runs, made up."""

import dataclasses

import bases
from runs import Run


def row(run: Run, loss: float, tokens: int = 1024, size: str = "cpu") -> dict:
    return {
        "method": bases.SCALED[run.inner],
        "size": size,
        "tokens": tokens,
        "run": dataclasses.asdict(run),
        "loss": loss,
        "syncs": 3,
        "bytes": 10,
        "synchronous_bytes": 1000,
        "date": "2026-11-23",
    }


def by_key(rows) -> dict:
    return {each["size"] + Run(**each["run"]).key(): each for each in rows}
