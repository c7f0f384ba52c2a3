"""What was tried against the gap, one idea at a time."""

from bases import local_muon_evenly, muon, rising
from plans import BUDGET
from runs import Run

# What may ask for a sync at equal bytes.
SIGNALS = {
    f"budget {BUDGET} 1 1": "relative momentum change",
    f"turn {BUDGET} 1 1": "turn of the momentum",
    f"moved {BUDGET} 1 1": "relative drift",
    f"weighted {BUDGET} 0.5": "square root of the learning rate",
}


def tried() -> dict[str, tuple[Run, Run]]:
    """Ideas against the gap, one at a time: with it and without, 300 steps."""
    muon_, even, better = muon(), local_muon_evenly(), rising()
    changes = {
        "momentum from 0.8 to 0.95": (even, {"last_momentum": 0.95}),
        "momentum from 0.8 to 0.95, synchronous Muon": (muon_, {"last_momentum": 0.95}),
        "momentum from 0.8 to 0.98": (better, {"last_momentum": 0.98}),
        "momentum from 0.7 to 0.95": (better, {"momentum": 0.7}),
        "rate down to 0.2 of its peak": (even, {"final": 0.2}),
        "rate down to 0.2, rising momentum": (better, {"final": 0.2}),
        "rate down to 0, rising momentum": (better, {"final": 0.0}),
        "rate down to 0.2, synchronous Muon, rising momentum": (
            muon_.but(last_momentum=0.95),
            {"final": 0.2},
        ),
        "peak rate 0.057": (better, {"learning_rate": 0.057}),
        "peak rate 0.113": (better, {"learning_rate": 0.113}),
        "half the rate for embeddings, head, norms": (even, {"other_rate": 0.5}),
        "outer momentum 0.4 to 0": (better, {"outer": "nesterov 1.0 0.4 1.0 0.0"}),
        "outer momentum 0.2 to 0.6": (better, {"outer": "nesterov 1.0 0.2 1.0 0.6"}),
        "outer momentum 0.5": (better, {"outer": "nesterov 1.0 0.5"}),
        "outer momentum 0.3": (better, {"outer": "nesterov 1.0 0.3"}),
        "outer rate 1.4, peak rate 0.057": (
            better,
            {"outer": "nesterov 1.4 0.4", "learning_rate": 0.057},
        ),
        "outer rate 2, peak rate 0.04": (
            better,
            {"outer": "nesterov 2.0 0.4", "learning_rate": 0.04},
        ),
        "orthonormal outer step": (better, {"outer": "orthonormal 1.0 0.4"}),
        "orthonormal outer step, 1.4": (better, {"outer": "orthonormal 1.4 0.4"}),
        "orthonormal outer step, 1.4, peak rate 0.057": (
            better,
            {"outer": "orthonormal 1.4 0.4", "learning_rate": 0.057},
        ),
        "syncs as the learning rate": (even, {"trigger": f"weighted {BUDGET} 1.0"}),
        "syncs as the learning rate, rising momentum": (
            better,
            {"trigger": f"weighted {BUDGET} 1.0"},
        ),
        "syncs as the learning rate to 1/2": (
            better,
            {"trigger": f"weighted {BUDGET} 0.5"},
        ),
        "syncs as the learning rate, which falls to 0.2": (
            better.but(final=0.2),
            {"trigger": f"weighted {BUDGET} 1.0"},
        ),
        "syncs as the learning rate to -1/2": (
            better,
            {"trigger": f"weighted {BUDGET} -0.5"},
        ),
        "syncs as the relative momentum change": (
            even,
            {"trigger": f"budget {BUDGET} 1 1"},
        ),
        "syncs on each of the first 3 steps": (better, {"trigger": f"warm {BUDGET} 3"}),
        "syncs on each of the first 6 steps": (better, {"trigger": f"warm {BUDGET} 6"}),
        "momenta sent too, 1 bit": (better, {"sent_momentum": "int 1"}),
        "momenta sent too, 2 bits, from 0.9": (
            better,
            {"momentum": 0.9, "sent_momentum": "int 2"},
        ),
        "1 bit, outer momentum 0.2": (
            better,
            {"compressor": "int 1", "outer": "nesterov 1.0 0.2"},
        ),
        "scales of blocks of 1,024": (even, {"compressor": "int 2 2 1024"}),
        "scales of blocks of 1,024, rising momentum": (
            better,
            {"compressor": "int 2 2 1024"},
        ),
    }
    return {
        label: (base.but(**change), base) for label, (base, change) in changes.items()
    }


def seldom() -> dict[str, Run]:
    """Runs that spend a thousandth of the bytes, by what they change of `rising`."""
    base = rising().but(trigger=f"evenly {BUDGET / 10}")
    changes = {
        "nothing": {},
        "outer momentum 0.6": {"outer": "nesterov 1.0 0.6"},
        "outer momentum 0.2": {"outer": "nesterov 1.0 0.2"},
        "no outer momentum": {"outer": "mean"},
        "4 bits": {"compressor": "int 4"},
        "4 bits, outer momentum 0.2": {
            "compressor": "int 4",
            "outer": "nesterov 1.0 0.2",
        },
        "4 bits, no outer momentum": {"compressor": "int 4", "outer": "mean"},
    }
    return {label: base.but(**change) for label, change in changes.items()}
