"""Make ``tests/support/vectors/microsoft_dion.npz``: what microsoft/dion's update does.

    git clone https://github.com/microsoft/dion DION     # MIT licence
    python -m venv ENV && ENV/bin/pip install torch==2.13.0 numpy
    ENV/bin/python tests/support/make_dion_vectors.py DION

``dion_update`` runs uncompiled on float64 tensors. It casts to float32 inside its QR
and its column normalisation, so P and Q carry float32 rounding. Rank, orientation and
the initial Q come from their ``Dion``. For each case the file holds float64 stacks of
X, M and Q before and after 5 steps and of the gradients G, in torch's layout (fan_out,
fan_in), and as JSON what they were made with, ``provenance``.
"""

import datetime
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"tall": (9, 5), "wide": (5, 9), "square": (6, 6)}  # (fan_out, fan_in)
# On these shapes 0.01 of the smaller side, rounded up, is rank 1.
RANK_FRACTIONS = {"full": 1.0, "half": 0.5, "quarter": 0.25, "one": 0.01}
WEIGHT_DECAYS = (0.0, 0.1)
STEPS, MU, LEARNING_RATE, EPSILON = 5, 0.95, 0.1, 1e-8
OUTPUT = Path(__file__).parent / "vectors" / "microsoft_dion.npz"


def cases() -> dict[str, dict[str, Any]]:
    """Settings by case name: all shapes, ranks and decays, some with a zero first G."""
    grid = itertools.product(SHAPES, RANK_FRACTIONS, WEIGHT_DECAYS, (False, True))
    return {
        f"{shape}-{rank}-decay{decay}{'-zero_first' if zero_first else ''}": {
            "shape": SHAPES[shape],
            "rank_fraction": RANK_FRACTIONS[rank],
            "weight_decay": decay,
            "zero_first": zero_first,
        }
        for shape, rank, decay, zero_first in grid
        if not zero_first or (rank in ("full", "half") and decay)
    }


def run_case(torch: Any, module: Any, case: dict[str, Any], seed: int) -> Any:
    """Stacks of X, M, Q around every step and of G; adds the rank to ``case``."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)  # their initial Q
    x = torch.from_numpy(rng.normal(size=case["shape"]))
    optimizer = module.Dion([torch.nn.Parameter(x.clone())])
    state: dict[str, Any] = {}
    optimizer._init_opt_state_dion(x, state, case["rank_fraction"], 1)
    transpose = optimizer._get_dion_param_config(x).is_transposed
    momentum, q = state["momentum"], state["Q"]
    case |= {"rank": q.shape[1], "transpose": transpose, "seed": seed}
    numbers = {"lr": LEARNING_RATE, "mu": MU, "weight_decay": case["weight_decay"]}
    numbers = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    options = {"epsilon": EPSILON, "transpose": transpose, "power_iters": 1}
    options |= {"qr_method": "qr", "compressed_all_reduce": False}

    gradients = rng.normal(size=(STEPS, *case["shape"]))
    if case["zero_first"]:
        gradients[0] = 0.0
    states = [(x.clone(), momentum.clone(), q.clone())]
    for gradient in map(torch.from_numpy, gradients):
        # X and M are updated in place.
        q = module.dion_update(X=x, G=gradient, M=momentum, Q=q, **numbers, **options)
        states.append((x.clone(), momentum.clone(), q.clone()))
    xs, momenta, qs = (torch.stack(each).numpy() for each in zip(*states, strict=True))
    return {"X": xs, "M": momenta, "Q": qs, "G": gradients}


def main(clone: str) -> None:
    """Run every case and write the file."""
    command = ["git", "-C", clone, "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch is imported
    sys.path.insert(0, clone)
    torch = importlib.import_module("torch")
    module = importlib.import_module("dion.dion_reference")
    torch.set_num_threads(1)
    settings, arrays = cases(), {}
    for seed, (name, case) in enumerate(settings.items()):
        stacks = run_case(torch, module, case, seed)
        arrays |= {f"{name}/{key}": value for key, value in stacks.items()}
    provenance = {
        "source": "https://github.com/microsoft/dion",
        "licence": "MIT, copyright Microsoft Corporation",
        "commit": commit.strip(),
        "function": "dion_update in dion/dion_reference.py",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": {"mu": MU, "learning_rate": LEARNING_RATE, "epsilon": EPSILON},
        "cases": settings,
    }
    np.savez_compressed(OUTPUT, provenance=json.dumps(provenance), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
