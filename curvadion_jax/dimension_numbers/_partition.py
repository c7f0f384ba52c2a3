"""What is known of each parameter: is it a matrix, along which axes, and why."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _matrix_view, _trees

DimensionNumbers = optax.contrib.MuonDimensionNumbers


class PartitionWarning(UserWarning):
    """Nothing tells whether some parameters are matrices, or along which axes.

    The message names each of them, says why, and prints what to pass.
    """


class Finding(NamedTuple):
    """What is known of one parameter.

    Attributes:
      path: the names along its path, such as ``'layers/attention/kernel'``.
      shape: of the parameter.
      kind: ``'matrix'``; ``'asked'`` if it is not known; or what it is instead:
        ``'head'``, ``'table'``, ``'tied'`` for both, ``'convolution'``, ``'vector'``,
        ``'elementwise'``, ``'unused'``, or ``'other'`` by an answer.
      numbers: the axes of a matrix; None if the other optimizer trains the parameter.
      why: the reason in a few words, and the line of the program.
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    numbers: DimensionNumbers | None
    why: str


@dataclasses.dataclass(frozen=True)
class Partition:
    """Which parameters are matrices, along which axes, and why.

    Pass it to an optimizer as ``dimension_numbers=``, or to `optax.contrib.muon` as
    ``muon_weight_dimension_numbers=``: it is a function from parameters to a tree of
    `optax.contrib.MuonDimensionNumbers` and None. It may be called with a part of the
    parameters, as within `optax.masked`. Printed, it has one line for each parameter.

    Attributes:
      findings: one for each parameter, in the order of the leaves.

    Example:
      >>> numbers = DimensionNumbers(reduction_axis=0, output_axis=1)
      >>> partition = Partition((Finding("up", (4, 8), "matrix", numbers, "given"),))
      >>> partition({"up": jax.numpy.ones((4, 8))})
      {'up': MuonDimensionNumbers(reduction_axis=0, output_axis=1)}
      >>> print(partition)
      parameter  shape   kind    matrices  fan_in  fan_out  why
      up         (4, 8)  matrix  1         4       8        given
    """

    findings: tuple[Finding, ...]

    def __call__(self, params: Any) -> Any:
        """The dimension numbers of parameters, in a tree of their structure.

        Args:
          params: arrays or abstract values with the paths and shapes of `findings`; all
            of them, or a part.

        Raises:
          ValueError: if the partition has no such path, or another shape for it.
          TypeError: if it is called with a step number, as a schedule is.
        """
        numbers = [each.numbers for each in self.of(params)]
        return jax.tree.unflatten(jax.tree.structure(params), numbers)

    def of(self, params: Any) -> list[Finding]:
        """The findings of parameters, in the order of the leaves; raises as a call."""
        known = {found.path: found for found in self.findings}
        result = []
        for path, leaf in _trees.leaves_with_path(params):
            shape, found = tuple(leaf.shape), known.get(path)
            if found is None and not path and not shape:
                raise TypeError(
                    "dimension_numbers is a Partition that was called with a number. "
                    "optax.inject_hyperparams takes a function for a schedule: pass "
                    "static_args=('dimension_numbers',)."
                )
            if found is None or found.shape != shape:
                has = f"shape {found.shape}" if found else "no such parameter"
                raise ValueError(
                    f"Parameter {path!r} has shape {shape}, the partition has {has}. "
                    "Make the partition of the parameters that are trained, those of "
                    "one replica without rows: "
                    "cd.dimension_numbers.from_loss(loss_fn, params, batch). If it is "
                    "of these, and the parameters have rows, give the optimizer the "
                    "mesh."
                )
            result.append(found)
        return result

    def __str__(self) -> str:
        """A table: path, shape, kind, matrices, fan_in, fan_out, why."""
        return table(self.findings)


def table(findings: Sequence[Finding]) -> str:
    """One line for each parameter."""
    rows = [("parameter", "shape", "kind", "matrices", "fan_in", "fan_out", "why")]
    for found in findings:
        rows.append(
            (found.path, str(found.shape), found.kind, *_sizes(found), found.why)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _sizes(found: Finding) -> tuple[str, str, str]:
    """How many matrices a parameter holds, their inputs and their outputs."""
    if found.numbers is None:
        return "", "", ""
    view = _matrix_view.make_view(found.shape, *found.numbers)
    return str(math.prod(view.batch)), str(view.fan_in), str(view.fan_out)


def with_answers(
    findings: Sequence[Finding], answers: Mapping[str, DimensionNumbers | None] | None
) -> tuple[Finding, ...]:
    """The findings, in which the user's answers replace what was found or asked.

    Args:
      findings: one for each parameter.
      answers: dimension numbers or None by a parameter's path, or by a part of paths
        such as ``mlp/gate``. Where several match a path the last one holds.

    Raises:
      TypeError: if an answer is neither dimension numbers nor None.
      ValueError: if no parameter has the path, or not these axes.
    """
    if not isinstance(answers, Mapping | None):
        raise TypeError(
            f"answers is {answers!r:.80}. Give a dictionary from paths, or parts of "
            "paths, to dimension numbers or None."
        )
    found = {each.path: each for each in findings}
    for part, numbers in (answers or {}).items():
        if not isinstance(numbers, DimensionNumbers | None):
            raise TypeError(
                f"The answer for {part!r} is {numbers!r:.80}. Give None, or "
                "cd.DimensionNumbers(reduction_axis, output_axis) for a matrix."
            )
        paths = [path for path in found if f"/{part}/" in f"/{path}/"]
        if not paths:
            raise ValueError(
                f"answers names {part!r}, and no parameter has it in its path. Give a "
                "part of a path as print(partition) shows it."
            )
        for path in paths:
            shape = found[path].shape
            if numbers is not None:
                _check(path, shape, numbers)
            kind = "other" if numbers is None else "matrix"
            found[path] = Finding(path, shape, kind, numbers, "given")
    return tuple(found.values())


def _check(path: str, shape: tuple[int, ...], numbers: DimensionNumbers) -> None:
    """Rejects axes that a parameter of this shape does not have."""
    try:
        _matrix_view.make_view(shape, *numbers)
    except ValueError as error:
        wrong = str(error).partition(". ")[0]
        raise ValueError(
            f"The answer for {path!r}, of shape {shape}, does not fit: {wrong}. "
            "Give the axes of its inputs and of its outputs, or None."
        ) from error


def warn(
    findings: Sequence[Finding], line: str | None = None, stacklevel: int = 3
) -> None:
    """Warns of all parameters that are asked about, in one warning or none.

    Args:
      findings: one for each parameter.
      line: what the user should pass. None means the answers to `from_loss`.
      stacklevel: as for `warnings.warn`; 3 is the caller of this function's caller.
    """
    asked = [each for each in findings if each.kind == "asked"]
    if not asked:
        return
    size = lambda several: sum(math.prod(each.shape) for each in several)
    seen = "\n".join(f"  {each.path} {each.shape}: {each.why}" for each in asked)
    if line is None:
        known = [each.path for each in findings if each.kind != "asked"]
        answers = dict.fromkeys(_short(each.path, known) for each in asked)
        line = (
            f"{as_argument(answers)}, with cd.DimensionNumbers(reduction_axis, "
            "output_axis) in place of None for a matrix"
        )
    warnings.warn(
        f"AdamW trains {size(asked) / size(findings):.1%} of the parameters, because "
        f"nothing tells whether these are matrices:\n{seen}\nPass {line}.",
        PartitionWarning,
        stacklevel=stacklevel,
    )


def as_argument(answers: Mapping[str, DimensionNumbers | None]) -> str:
    """Answers as a user writes them."""
    short = lambda numbers: numbers and f"cd.DimensionNumbers{tuple(numbers)}"
    items = (f"{path!r}: {short(numbers)}" for path, numbers in answers.items())
    return f"answers={{{', '.join(items)}}}"


def _short(path: str, known: Sequence[str]) -> str:
    """The last two names of a path, so that one answer is for all layers.

    The path itself if a parameter that is known has the same last names.
    """
    part = "/".join(path.split("/")[-2:])
    return path if any(f"/{part}/" in f"/{other}/" for other in known) else part


def axes_of(axes: Any) -> Any:
    """Axes as `MuonDimensionNumbers` has them: one is an int, several are a tuple."""
    ordered = tuple(sorted(axes))
    return ordered[0] if len(ordered) == 1 else ordered
