"""The methods that the study compares, and what of each is tuned."""

import dataclasses
from collections.abc import Mapping

from runs import Run


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the comparison, and what of it is tuned on seed 0, in this order.

    Attributes:
        label: Its name in the tables.
        run: Everything but what is tuned.
        rates: Learning rates.
        momenta: Decay rates of the local momentum, at the best learning rate.
        outers: Outer steps, at the best of both.
        grid: Learning rates and outer steps together, where one after the other ends in
            a corner.
    """

    label: str
    run: Run
    rates: tuple[float, ...]
    momenta: tuple[float, ...] = ()
    outers: tuple[str, ...] = ()
    grid: Mapping[float, tuple[str, ...]] = dataclasses.field(default_factory=dict)


BUDGET = 0.01
_SYNCHRONOUS = Run("dion 1.0", 0.08, momentum=0.9)
_LOCAL = _SYNCHRONOUS.but(trigger=f"evenly {BUDGET}", sync="reconcile")
_CURVADION = _LOCAL.but(inner="curvadion", compressor="int 2", outer="nesterov 0.7 0.6")
_MULOCO = _LOCAL.but(inner="muon", compressor="int 4", outer="nesterov 0.7 0.6")
_ADAMW = Run("adamw", 0.01)
_RATES, _MOMENTA = (0.04, 0.08, 0.16), (0.7, 0.8, 0.95)
_ADAM_RATES = (0.005, 0.01, 0.02, 0.04, 0.08)

_OUTERS = (
    *("nesterov 0.5 0.6", "nesterov 1.0 0.6", "nesterov 1.4 0.6"),
    *("nesterov 0.7 0.8", "nesterov 1.0 0.4", "nesterov 1.0 0.2"),
)

_LOW = ("mean", "nesterov 0.3 0.6", "nesterov 0.5 0.3")

METHODS = {
    "dion": Method("Dion, synchronous", _SYNCHRONOUS, (0.02, *_RATES), _MOMENTA),
    "muon": Method(
        "Muon, synchronous", _SYNCHRONOUS.but(inner="muon"), _RATES, _MOMENTA
    ),
    "adamw": Method("AdamW, synchronous", _ADAMW, _ADAM_RATES),
    "local_muon": Method("`local_muon`, tuned", _CURVADION, _RATES, _MOMENTA, _OUTERS),
    "muloco": Method("MuLoCo, 4 bits", _MULOCO, _RATES, _MOMENTA, _OUTERS),
    "muloco_2_bits": Method(
        "MuLoCo, 2 bits",
        _MULOCO.but(compressor="int 2"),
        _RATES,
        _MOMENTA,
        ("nesterov 1.0 0.6", "nesterov 1.0 0.4"),
    ),
    "diloco": Method(
        "DiLoCo, 4 bits",
        _MULOCO.but(inner="adamw", momentum=0.95),
        _ADAM_RATES,
        (),
        (
            *("nesterov 0.3 0.6", "nesterov 0.5 0.6", "nesterov 1.0 0.6"),
            *("nesterov 0.7 0.9", "nesterov 0.5 0.3"),
        ),
        grid={
            0.01: ("mean",),
            0.02: (*_LOW, "nesterov 1.0 0.3"),
            0.04: (
                *(*_LOW, "nesterov 0.7 0.3", "nesterov 1.0 0.3"),
                *("nesterov 0.2 0.6", "nesterov 0.3 0.8"),
            ),
            0.08: ("nesterov 0.3 0.6",),
        },
    ),
    "sparseloco": Method(
        "SparseLoCo-style, top 1/32 in 2 bits",
        _MULOCO.but(
            inner="adamw", momentum=0.95, compressor="top_k 0.03125 2", outer="mean"
        ),
        _ADAM_RATES,
        (),
        ("nesterov 0.6 0.0", "nesterov 1.6 0.0"),
    ),
    "sparseloco_muon": Method(
        "top 1/32 in 2 bits, Muon inside",
        _MULOCO.but(compressor="top_k 0.03125 2", outer="mean"),
        _RATES,
    ),
    "as_it_comes": Method(
        "`local_muon`, momentum and outer step as they come",
        _CURVADION.but(outer="nesterov 1.0 0.4"),
        (0.08,),
    ),
    "quantised": Method(
        "Muon, gradients in 2 and their mean in 4 bits",
        _SYNCHRONOUS.but(inner="muon", compressor="int 2 4"),
        _RATES,
    ),
    "local_dion": Method(
        "local steps of Dion, evenly spaced syncs",
        _CURVADION.but(inner="curvadion 1.0"),
        _RATES,
    ),
    "local_dion_quarter": Method(
        "local steps of Dion at rank 1/4, evenly spaced syncs",
        _CURVADION.but(inner="curvadion 0.25"),
        _RATES,
    ),
    "dion_quarter_4_bits": Method(
        "Dion at rank 1/4, synchronous factors in 4 bits",
        _SYNCHRONOUS.but(inner="dion 0.25", sync="factors", compressor="int 4"),
        _RATES,
    ),
    "powersgd": Method(
        "PowerSGD-style: Muon, gradients at rank 2 in 4 bits",
        _SYNCHRONOUS.but(inner="muon", compressor="low_rank 2 4"),
        (0.02, *_RATES),
    ),
    "local_sgd": Method(
        "local SGD, 4 bits",
        _MULOCO.but(inner="sgd", momentum=0.95, outer="mean"),
        (0.1, 0.2, 0.4, 0.8, 1.6),
    ),
    "paper": Method(
        "the paper's formula, threshold 0.3",
        Run("paper 1.0 0.3", 0.04),
        (0.02, 0.04, 0.08, 0.16, 0.32),
    ),
    "authors_code": Method(
        "the rules of the authors' code, threshold 0.3",
        Run("authors_code 1.0 0.3", 0.04),
        (0.005, 0.01, 0.02, 0.04, 0.08),
    ),
}
