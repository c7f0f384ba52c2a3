"""One-line faults in the core, each of which the fast tests should notice.

    python tests/mutants.py [NAME ...]

Each fault is put into a copy of the tree, and the narrowest fast tests are run on it.
It prints whether they fail ("killed") or pass ("SURVIVED"), and ends with the number of
survivors. Not collected by pytest.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("curvadion_jax", "tests", "benchmarks", "examples", "pyproject.toml")


class Mutant(NamedTuple):
    """A piece of a file that occurs once, what is put in its place, and the tests."""

    file: str
    old: str
    new: str
    tests: str  # files in tests/, and an expression for pytest's -k
    expression: str = ""


CORE, SYNC = "step/_adaptive_sync.py", "synchronizers/_reconcile.py"
STEP, PART, TRIGGERS = "step/_step.py", "mesh/_group.py", "triggers.py"
DECISIONS, FAULTS = "core/test_decisions.py", "core/test_faults.py"
WHO, CHECKSUMS = "core/test_participation.py", "core/test_checksums.py"
STARTS, METRICS = "core/test_starts.py", "core/test_metrics.py"
BUDGET, INTERVALS = "triggers/test_budget.py", "triggers/test_at_intervals.py"
CHANGE = "triggers/test_momentum_change.py"
WRAPPERS = "interop/test_transformations.py"
BY_NAME = "dimension_numbers/test_by_name.py"
RECORD = "dimension_numbers/test_record.py"

MUTANTS = {
    # Decisions.
    "pmax is pmin": Mutant("mesh/_group.py", "lax.pmax(", "lax.pmin(", DECISIONS),
    "nan requests nothing": Mutant(
        TRIGGERS, "~(value <= threshold)", "(value > threshold)", DECISIONS
    ),
    "a value at the threshold requests": Mutant(
        TRIGGERS, "~(value <= threshold)", "~(value < threshold)", DECISIONS
    ),
    "a replica without weight votes": Mutant(CORE, " & present", "", WHO, "requests"),
    "replicas vote on every step": Mutant(
        CORE,
        "if due is True:",
        "if True:",
        "core/test_local_program.py",
        "sends_nothing_or_one_integer",
    ),
    "a step that is not due synchronises": Mutant(
        CORE, "fire = False if due is False else fire & due", "fire = fire", INTERVALS
    ),
    # Who takes part.
    "the mean is over those present": Mutant(
        SYNC, "x * jnp.asarray(part.share_present, x.dtype)", "x", WHO, "absent"
    ),
    "excluded replicas are expected": Mutant(
        PART, "jnp.sum(weights >= 0)", "weights.size", FAULTS, "spoilt"
    ),
    "weights are not normalised": Mutant(
        PART,
        "jnp.where(own > 0, own, 0) / jnp.where(mean > 0, mean, 1)",
        "jnp.where(own > 0, own, 0)",
        WHO,
        "weighted",
    ),
    "the sum of weights overflows": Mutant(
        PART,
        "unit = jnp.where(jnp.any(weights > 0), jnp.max(weights), 1)",
        "unit = jnp.ones_like(weights[0])",
        WHO,
        "weighted",
    ),
    "nobody is somebody": Mutant(
        PART, "someone=jnp.any(present)", "someone=jnp.array(True)", WHO, "nobody"
    ),
    "the outer state moves without anybody": Mutant(
        STEP,
        "once(part.someone, sync",
        "once(jnp.array(True), sync",
        WHO,
        "nobody",
    ),
    "negative weights count": Mutant(
        PART, "jnp.isfinite(given) & (given > 0)", "jnp.isfinite(given)", WHO, "weight"
    ),
    "infinite weights count": Mutant(
        PART, "jnp.isfinite(given) & (given > 0)", "given > 0", WHO, "weight"
    ),
    "an absent replica loses its drift": Mutant(
        STEP, "where(healthy & ~part.present, ahead", "where(False, ahead", WHO
    ),
    "an absent dion loses its momentum": Mutant(
        "synchronizers/_factors.py",
        "_keep_momenta(inner_state, before, local, ~part.present)",
        "_keep_momenta(inner_state, before, local, False)",
        WHO,
        "dion",
    ),
    # What replicas owe.
    "what is owed is not sent": Mutant(
        "compressors.py",
        "jax.tree.map(add_cast, contribution, residual)",
        "contribution",
        WHO,
        "owes",
    ),
    "what is owed is forgotten at a bad outer step": Mutant(
        SYNC,
        "jax.tree.map(jnp.where, is_finite, new_residual, residual)",
        "new_residual",
        FAULTS,
        "outer",
    ),
    "a spoilt residual is sent": Mutant(
        STEP,
        "residual = _finite.or_zeros(healthy, old.residual)",
        "residual = old.residual",
        FAULTS,
        "spoilt and residual",
    ),
    "a drift has more digits than its dtype": Mutant(
        STEP, "moved = _dtypes.rounded(", "moved = (", WHO, "dtype"
    ),
    "a spoilt residual stays where nobody is": Mutant(
        STEP,
        "residual = _finite.or_zeros(part.someone | healthy, new.residual)",
        "residual = new.residual",
        WHO,
        "spoilt",
    ),
    # What is not finite.
    "a gradient that is not finite is given to before": Mutant(
        CORE,
        "        gradients = _finite.or_zeros(finite, gradients)\n"
        "        if self.before",
        "        if self.before",
        FAULTS,
        "before",
    ),
    "what before returns is taken": Mutant(
        CORE,
        "gradients = _finite.or_zeros(sound, gradients)",
        "pass",
        FAULTS,
        "before",
    ),
    "a gradient without a norm is taken": Mutant(
        CORE,
        "sound = _finite.norms_finite(gradients)",
        "sound = _finite.all_finite(gradients)",
        FAULTS,
        "before",
    ),
    "updates that are not finite are returned": Mutant(
        CORE, "_finite.finite_elements(outcome.updates)", "outcome.updates", FAULTS
    ),
    "a spoilt state does not begin again": Mutant(
        STEP,
        "keep = is_sound if jnp.ndim(x) else",
        "keep = True if jnp.ndim(x) else",
        FAULTS,
    ),
    "a spoilt number does not begin again": Mutant(
        STEP,
        "if jnp.ndim(x) else _finite.is_kept(x)",
        "if jnp.ndim(x) else True",
        FAULTS,
        "single",
    ),
    "every state begins again": Mutant(
        STEP,
        "keep = is_sound if jnp.ndim(x) else",
        "keep = False if jnp.ndim(x) else",
        FAULTS,
        "begins",
    ),
    "a spoilt state is averaged": Mutant(
        STEP,
        "healthy = inner_sound & _finite.all_finite([moved, residual])",
        "healthy = _finite.all_finite([moved, residual])",
        FAULTS,
        "spoilt",
    ),
    "the outer step may be anything": Mutant(
        SYNC, "jnp.where, is_finite, target, anchor", "jnp.add, target, 0", FAULTS
    ),
    "the outer state may be anything": Mutant(
        SYNC,
        "_finite.repaired(_dtypes.cast_like(outer_state, state), state)",
        "_dtypes.cast_like(outer_state, state)",
        FAULTS,
        "overflows",
    ),
    "the outer state may hold no infinite number": Mutant(
        "_finite.py",
        "jnp.isfinite(x) if jnp.ndim(x) else ~jnp.isnan(x)",
        "jnp.isfinite(x)",
        "core/test_finite.py",
        "put_back",
    ),
    # What is counted and refused.
    "what is zeroed is counted twice": Mutant(
        "metrics.py",
        "prepared.finite & outcome.zeroed",
        "outcome.zeroed",
        FAULTS,
        "twice",
    ),
    "what every step sends is a sync's too": Mutant(
        "replicas/_audit.py",
        "(reached(names, set()) - always for",
        "(reached(names, set()) for",
        "replicas/test_audit.py",
        "who_calls",
    ),
    "every condition is a sync's": Mutant(
        "replicas/_audit.py",
        'if name and re.search(rf"{condition}(?!.*branch_)", name[1])',
        "if True",
        "replicas/test_audit.py",
    ),
    "both branches of a sync's condition are the sync": Mutant(
        "replicas/_audit.py",
        "inside[condition].add(names[-1])",
        "inside[condition].update(names)",
        "replicas/test_audit.py",
        "who_calls",
    ),
    "slices are numbered as the mesh has them": Mutant(
        "replicas/_audit.py",
        "zip(slices, replica.tolist(), strict=False)",
        "zip(sorted(slices), replica.tolist(), strict=False)",
        "replicas/test_audit.py",
        "slices",
    ),
    "the checksum is constant": Mutant(
        "_checksum.py", "total += of_array", "total += 0 * of_array", CHECKSUMS
    ),
    "elements may change places": Mutant(
        "_checksum.py", "words ^ (place *", "words ^ (0 * place *", CHECKSUMS
    ),
    "arrays may change places": Mutant(
        "_checksum.py", "        start += _words(x)\n", "", CHECKSUMS, "place"
    ),
    "displaced is never counted": Mutant(
        CORE, "(checksum != counters.checksum)", "(checksum != checksum)", CHECKSUMS
    ),
    "a sync is compared with the old anchor": Mutant(
        STEP,
        "anchor=_checksum.of(new.anchor)",
        "anchor=_checksum.of(common.anchor)",
        CHECKSUMS,
        "leaves",
    ),
    "copies are not refused": Mutant(
        "step/_refuse_copies.py", "if is_copy and old is not new", "if False", STARTS
    ),
    "where a run began is refused": Mutant(
        "step/_refuse_copies.py", "is_copy and old is not new", "is_copy", STARTS
    ),
    "a drift of two rounds counts twice": Mutant(
        CORE,
        "jnp.where(outcome.met, 0, weight)",
        "jnp.where(outcome.met & ~outcome.absent, 0, weight)",
        WHO,
        "length",
    ),
    "a sync of nobody forgets weights": Mutant(
        CORE,
        "jnp.where(outcome.met, 0, weight)",
        "jnp.where(outcome.met | outcome.absent | outcome.excluded, 0, weight)",
        WHO,
        "wait",
    ),
    "a gradient without weight stays in a momentum": Mutant(
        "synchronizers/_factors.py",
        "for name, pair in ranks.items() if reduces_factors(*pair)",
        "for name, pair in ranks.items()",
        WHO,
        "without_weight_counts",
    ),
    "forced syncs move the threshold": Mutant(
        TRIGGERS,
        "(value_requests & requested).astype",
        "jnp.asarray(requested).astype",
        BUDGET,
    ),
    "refused requests move the threshold": Mutant(
        TRIGGERS,
        "(value_requests & requested).astype",
        "value_requests.astype",
        BUDGET,
    ),
    "all replicas draw the same noise": Mutant(
        CORE,
        "inner_state = group.own_keys(inner_state)",
        "pass",
        "interop/test_transformations.py",
        "own_noise",
    ),
    "updates lie as the inner optimizer left them": Mutant(
        "step/_step.py",
        "self.layout.place(_dtypes.cast_like(updates, params))",
        "_dtypes.cast_like(updates, params)",
        "sharded/test_sharded_places.py",
        "lie_otherwise",
    ),
    "unequal rows are not refused": Mutant(
        CORE, "            _refuse_unequal(state.counters.checksum)\n", "", STARTS
    ),
    # Triggers.
    "every_k is off by one": Mutant(
        TRIGGERS,
        "return Trigger(due=lambda clock: (clock.steps + 1) % k == 0)",
        "return Trigger(due=lambda clock: clock.steps % k == 0)",
        "triggers/test_triggers.py",
        "schedule",
    ),
    "at_least_every is off by one": Mutant(
        TRIGGERS,
        "clock.since + 1 >= k",
        "clock.since >= k",
        "triggers/test_triggers.py",
        "schedule",
    ),
    "a met request is not cleared": Mutant(
        TRIGGERS, "(seen.clock.since == 0) | (value", "(value", INTERVALS
    ),
    "a request does not wait": Mutant(
        TRIGGERS,
        "(seen.clock.since == 0) | (value > largest.value)",
        "jnp.array(True)",
        INTERVALS,
    ),
    "a change is remembered over a restart": Mutant(
        CORE,
        "optax.tree.where(outcome.restarted, fresh, remembered)",
        "remembered",
        CHANGE,
        "requests_one_sync",
    ),
    "the first step has a change": Mutant(
        TRIGGERS, "jnp.where(seen.clock.steps == 0, _LARGEST, change)", "change", CHANGE
    ),
    "a gradient that is not finite is a change": Mutant(
        TRIGGERS,
        "jnp.where(seen.finite, _relative_change(new, last), 0)",
        "_relative_change(new, last)",
        CHANGE,
        "finite",
    ),
    "the budget has no cap": Mutant(
        TRIGGERS, "requested & (spent + 1 <= paid + ahead)", "requested", BUDGET
    ),
    "the budget has no floor": Mutant(
        TRIGGERS, " | (spent < paid - behind)", "", BUDGET
    ),
    "the threshold falls on requests": Mutant(
        TRIGGERS, "state.log_factor + gain *", "state.log_factor - gain *", BUDGET
    ),
    "evenly rounds up": Mutant(
        TRIGGERS,
        "(step + 1) * syncs // period > step * syncs // period",
        "-(-(step + 1) * syncs // period) > -(-step * syncs // period)",
        "triggers/test_triggers.py",
        "evenly or schedule",
    ),
    "the floor is 0.2": Mutant(
        "methods/_authors.py",
        "jnp.where(old < 0.1, 0,",
        "jnp.where(old < 0.2, 0,",
        CHANGE,
    ),
    "the floor is inclusive": Mutant(
        "methods/_authors.py",
        "jnp.where(old < 0.1, 0,",
        "jnp.where(old <= 0.1, 0,",
        CHANGE,
    ),
    # Optimizers.
    "the budget of curvadion has layers of its own": Mutant(
        "methods/_curvadion.py",
        "triggers.FIRST_THRESHOLD, dimension_numbers",
        "triggers.FIRST_THRESHOLD",
        "dion/test_curvadion.py",
        "given",
    ),
    "b2 is 0.999": Mutant(
        "matrices/_adamw_for_the_rest.py",
        "rate, 0.9, 0.95, eps",
        "rate, 0.9, 0.999, eps",
        WRAPPERS,
    ),
    "adam has the rate of the matrices": Mutant(
        "matrices/_adamw_for_the_rest.py",
        "rate = learning_rate if adam_learning_rate is None else adam_learning_rate",
        "rate = learning_rate",
        WRAPPERS,
        "adamw",
    ),
    "error feedback by the mean of R": Mutant(
        "matrices/_dion.py",
        "B, P, R = total[name], left[name], right[name]",
        "B, P, R = total[name], left[name], mean_right[name]",
        "dion/test_dion_axis.py equivalences/test_equivalences.py",
        "mean_gradient or factors",
    ),
    "a sync starts from each replica's own Q": Mutant(
        "synchronizers/_factors.py",
        "start = _with_qs(before, qs)",
        "start = before",
        "equivalences/test_equivalences.py",
        "factors",
    ),
    "Q is averaged when resized": Mutant(
        "replicas/_resize.py",
        "copied(x)._replace(momentum=averaged(x.momentum))",
        "averaged(x)",
        "dion/test_dion_state.py",
        "resized",
    ),
    "before comes after the trigger": Mutant(
        CORE,
        "gradients=gradients,\n                    params=params,",
        "gradients=row[0],\n                    params=params,",
        "triggers/test_triggers.py",
        "sees",
    ),
    "adamw beside muon is not nesterov's": Mutant(
        "methods/_local_muon.py", "nesterov=True", "nesterov=False", WRAPPERS, "adamw"
    ),
    "muon's epsilon is Optax's": Mutant(
        "methods/_local_muon.py",
        "eps=_adamw_for_the_rest.EPSILON",
        "eps=1e-8",
        "dion/test_muon.py",
        "epsilon",
    ),
    "adamw has the dtype of the parameters": Mutant(
        "matrices/_adamw_for_the_rest.py",
        "weight_decay=0.0, mu_dtype=mu_dtype",
        "weight_decay=0.0, mu_dtype=None",
        "interop/test_dtypes.py",
        "first_moment",
    ),
    "curvadion has half of the rank": Mutant(
        "methods/_curvadion.py",
        "_RANK = 1.0",
        "_RANK = 0.5",
        "dion/test_curvadion.py",
        "rank",
    ),
    "all ranks but one are full": Mutant(
        "matrices/_power_iteration.py",
        "R.shape[-1] == view.cols",
        "R.shape[-1] >= view.cols - 1",
        "dion/test_dion_reference.py",
    ),
    "a column is absent at a rounding": Mutant(
        "matrices/_power_iteration.py",
        "100 * jnp.finfo(R.dtype).eps",
        "jnp.finfo(R.dtype).eps",
        "dion/test_dion_degenerate.py",
        "absent",
    ),
    "columns that are nearly dependent are copies": Mutant(
        "matrices/_orthonormalize.py",
        "_COPY = 1e-3",
        "_COPY = 0.1",
        "dion/test_orthonormalize.py",
        "copy",
    ),
    "mu is looked at before trace": Mutant(
        "matrices/_momentum.py",
        '("momentum", "trace", "mu")',
        '("momentum", "mu", "trace")',
        "core/test_momentum_found.py",
        "both",
    ),
    "of merged axes the first decides": Mutant(
        "mesh/_layout.py",
        "bool(merged) and not any(known.get(axis) for axis in merged[1:])",
        "bool(merged)",
        "sharded/test_sharded_places.py",
        "merged",
    ),
    # The sync of the default, and its numbers.
    "the outer momentum is 0.5": Mutant(
        SYNC,
        "_OUTER_MOMENTUM = 1.0, 0.4",
        "_OUTER_MOMENTUM = 1.0, 0.5",
        "synchronizers/test_reconcile.py",
        "default",
    ),
    "the outer step is not nesterov's": Mutant(
        SYNC,
        "nesterov=True, accumulator",
        "nesterov=False, accumulator",
        "synchronizers/test_reconcile.py",
        "default",
    ),
    "a residual that is not finite is averaged with gradients": Mutant(
        STEP,
        "_finite.all_finite([given.params, residual])",
        "_finite.all_finite([given.params])",
        "synchronizers/test_gradients.py",
        "finite",
    ),
    "a mean adds up 16-bit numbers": Mutant(
        PART,
        "self._sums(jax.tree.map(_dtypes.at_least_float32, tree))",
        "self._sums(tree)",
        "core/test_means.py",
        "16_bits",
    ),
    "an outer step is rounded before the anchor": Mutant(
        "_dtypes.py",
        "dtype = promoted(x.dtype, y.dtype)\n    return (x",
        "dtype = x.dtype\n    return (x",
        "synchronizers/test_reconcile.py",
        "16_bit",
    ),
    # Bytes.
    "the weights have no bytes": Mutant(
        "metrics.py",
        "(costs.gathered + costs.number)",
        "costs.gathered",
        "core/test_bytes.py",
    ),
    "the blocks that replicas fill up have no bytes": Mutant(
        "compressors.py",
        "if replicas > 2 else 1",
        "if replicas < 2 else 1",
        "core/test_bytes.py",
    ),
    "votes have no bytes": Mutant(
        "metrics.py", " + votes * costs.number", "", "core/test_bytes.py"
    ),
    # Which parameters are matrices, by their names, and what a state keeps of it.
    "an own w may be turned over": Mutant(
        "dimension_numbers/_by_name.py",
        'name == "kernel" or (bias and shape[0] != shape[1])',
        "True",
        BY_NAME,
    ),
    "one kernel of the other order makes none doubtful": Mutant(
        "dimension_numbers/_by_name.py",
        'if path.rpartition("/")[2] not in turned',
        "if True",
        BY_NAME,
    ),
    "a head as long as the vocabulary is a matrix": Mutant(
        "dimension_numbers/_by_name.py",
        "and shapes[path][1:] not in vocabularies",
        "",
        BY_NAME,
    ),
    "vectors of a scan are matrices": Mutant(
        "dimension_numbers/_by_name.py",
        "and stacked.isdisjoint(_modules(path))",
        "",
        BY_NAME,
    ),
    "raw inputs and classes are matrices": Mutant(
        "dimension_numbers/_by_name.py", "_LONGEST = 8", "_LONGEST = 800", BY_NAME
    ),
    "a square follows its own product": Mutant(
        "dimension_numbers/_reader.py",
        "_values.open_of(others) - own",
        "_values.open_of(others)",
        "dimension_numbers/test_constructs.py",
        "right_or_asked and biases",
    ),
    "drawn choices are no end of a way": Mutant(
        "dimension_numbers/_reader.py",
        "if value is None or _is_float(variable):",
        "if True:",
        "dimension_numbers/test_constructs.py",
        "right_or_asked",
    ),
    "an update takes another partition": Mutant(
        "matrices/_two_optimizers.py",
        "_record.check(state.partition, partition)",
        "",
        RECORD,
    ),
    "a checkpoint is restored into another partition": Mutant(
        "checkpoint.py",
        "if differs := _record.difference(saved, now):",
        "if differs := False:",
        "checkpoint/test_partitions.py",
    ),
}


def run(mutant: Mutant) -> str:
    """What became of a mutant."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.npz.tmp")
                shutil.copytree(source, copy / each, ignore=ignore)
            else:
                shutil.copy(source, copy / each)
        file = copy / "curvadion_jax" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return f"STALE: {text.count(mutant.old)} places"
        file.write_text(text.replace(mutant.old, mutant.new))
        tests = [f"tests/{each}" for each in mutant.tests.split()]
        options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        if mutant.expression:
            options += ["-k", mutant.expression]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    if ended.returncode == 0:
        return "SURVIVED"
    if ended.returncode != 1:
        return f"ERROR {ended.returncode}: {ended.stdout[-400:]}"
    failed = [x for x in ended.stdout.splitlines() if x.startswith("FAILED")]
    return f"killed by {failed[0].split(' - ')[0][7:]}" if failed else "killed"


def main() -> None:
    names = sys.argv[1:] or list(MUTANTS)
    survivors = 0
    for name in names:
        start = time.monotonic()
        result = run(MUTANTS[name])
        survivors += not result.startswith("killed")
        print(f"{name:48} {time.monotonic() - start:4.0f} s  {result}", flush=True)
    print(f"{survivors} of {len(names)} not killed")


if __name__ == "__main__":
    main()
