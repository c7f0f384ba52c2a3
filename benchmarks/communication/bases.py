"""The runs that the plans of `gap.py` start from, and what their methods are called."""

from plans import BUDGET, METHODS
from runs import Run

# How the tables name the methods.
SCALED = {
    "muon": "Muon, synchronous",
    "dion 1.0": "Dion, synchronous",
    "local_muon": "`local_muon`",
    "curvadion 1.0": "`curvadion`, rank 1.0",
    "adamw": "DiLoCo, 4 bits",
}


def muon() -> Run:
    """Synchronous Muon with the values that won at size `cpu`."""
    return METHODS["muon"].run.but(learning_rate=0.08, momentum=0.8)


def dion(size: str) -> Run:
    """Synchronous Dion with the rate that won at this size."""
    return METHODS["dion"].run.but(learning_rate=0.04 if size == "cpu" else 0.08)


def local_muon_evenly() -> Run:
    """What lost least at size `cpu`."""
    return METHODS["local_muon"].run.but(
        inner="local_muon", momentum=0.8, outer="nesterov 1.0 0.4"
    )


def rising() -> Run:
    """The same with a momentum that rises, which lost less."""
    return local_muon_evenly().but(last_momentum=0.95)


def rising_muon() -> Run:
    """Synchronous Muon with a momentum that rises alike."""
    return muon().but(last_momentum=0.95)


def rising_curvadion() -> Run:
    """`curvadion` with that momentum, and the bounds that won at size `cpu`."""
    return rising().but(inner="curvadion 1.0", trigger=f"budget {BUDGET} 1 1")


def diloco() -> Run:
    """DiLoCo with the values that won at size `cpu`."""
    return METHODS["diloco"].run.but(learning_rate=0.04, outer="nesterov 0.7 0.3")
