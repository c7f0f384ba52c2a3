"""The values of DiLoCo that its peers are run with, and `presets.diloco` with them."""

import race

import curvadion_jax as cd

RATE, PERIOD, OUTER_RATE, OUTER_MOMENTUM = 0.01, 30, 0.7, 0.9
SETTING = f"DiLoCo, AdamW {RATE}, every {PERIOD}, outer {OUTER_RATE} {OUTER_MOMENTUM}"


def ours(task: race.Task, nudge: bool = False) -> race.Ours:
    """Our preset; for `nudge` see `race.Ours`."""
    rate = race.schedule(RATE, task.run.steps)
    values = PERIOD, OUTER_RATE, OUTER_MOMENTUM
    tx = cd.presets.diloco(rate, *values, axis_name=race.AXIS)
    return race.Ours(task, tx, nudge)
