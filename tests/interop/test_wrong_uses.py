"""Uses that would be silently wrong, hang or fail late are refused early.

Where a part has tests of its own refusals they are there.
"""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import replicas, synchronizers, triggers

PARAMS = helpers.make_params()
TWO, SIMULATED = replicas.make_mesh(2), replicas.simulated(2)
ROWS = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
SGD = optax.sgd(0.1, 0.9)


def synced(inner=SGD, trigger=None, synchronizer=None, mesh=None, **options):
    trigger = trigger or triggers.every_k(2)
    synchronizer = synchronizer or synchronizers.reconcile()
    return cd.adaptive_sync(inner, trigger, synchronizer, mesh, **options)


def changed(name: str, leaf: Any) -> dict[str, Any]:
    return {**PARAMS, name: leaf}


def init(tx: Any, params: Any = PARAMS) -> Any:
    return jax.eval_shape(tx.init, params)


def update(tx: Any, gradients=PARAMS, params=PARAMS, initial=None, **more) -> None:
    state = init(tx, params if initial is None else initial)
    jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **more), gradients, state, params)


def swallowing(inner: Any) -> Any:
    """A wrapper that does not pass extra arguments on."""
    return optax.GradientTransformation(
        inner.init,
        lambda updates, state, params=None: inner.update(updates, state, params),
    )


def loss(params, batch):
    return jnp.sum(params["bias"]) * jnp.sum(batch)


def mapped(function, *rows, **common):
    jax.eval_shape(replicas.map(function, SIMULATED), *rows, **common)


def capturing(params, batch):
    """The whole batch, in every replica."""
    return replicas.map(lambda p: loss(p, batch), SIMULATED)(params)


def communicating(params):
    return jax.lax.pmean(params["bias"], replicas.AXIS)


change = triggers.relative_momentum_change(0.1)
FEWER = {name: leaf for name, leaf in PARAMS.items() if name != "bias"}
WIDER = changed("bias", jnp.zeros(9))
COMPLEX = changed("bias", jnp.ones(5, "complex64"))
EIGHT_BITS = changed("tall/kernel", jnp.ones((6, 4), jnp.float8_e4m3fn))
HALF = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
SHORT = changed("bias", jnp.ones(1))
AVERAGE = synchronizers.average_gradients()
QUANTIZED = synchronizers.reconcile(compressor=cd.compressors.quantize(2))
# Of an optimizer of one replica, copied to two.
STATES = jax.tree.map(lambda x: jnp.stack([x, x]), synced().init(PARAMS))
TALL, ONE_ROW = {"tall/kernel": jnp.ones((6, 4))}, {"tall/kernel": jnp.ones((1, 4))}

# What is wrong -> (use, error, a piece of the message: what was given).
CASES = {
    # Numbers that would train something else.
    "learning rate NaN": (lambda: cd.dion(float("nan")), ValueError, "nan"),
    "rate in percent": (lambda: cd.triggers.evenly(10), ValueError, "got 10"),
    "momentum of 1": (lambda: cd.curvadion(0.1, momentum=1), ValueError, "got 1"),
    "threshold below 0": (
        lambda: cd.curvadion(0.1, threshold=-0.3),
        ValueError,
        "-0.3",
    ),
    "budget in percent": (lambda: cd.curvadion(0.1, budget=10), ValueError, "10"),
    "learning rate of a row each": (
        lambda: cd.local_muon(jnp.ones(2)),
        *(TypeError, "learning_rate must be a number or a schedule"),
    ),
    "optimizer for a learning rate": (
        lambda: cd.local_muon(optax.adam(1e-3)),
        *(TypeError, r"learning_rate is an optimizer.*adaptive_sync\("),
    ),
    "optimizer for another learning rate": (
        lambda: cd.dion(0.1, adam_learning_rate=optax.adam(1e-3)),
        *(TypeError, r"adam_learning_rate is an optimizer.*adaptive_sync\("),
    ),
    "optimizer for a preset's learning rate": (
        lambda: cd.presets.diloco(optax.adam(1e-3)),
        *(TypeError, r"learning_rate is an optimizer.*adaptive_sync\("),
    ),
    "rank 2.0": (lambda: cd.dion(0.1, rank=2.0), ValueError, "2.0"),
    "injected rank": (
        lambda: init(optax.inject_hyperparams(cd.dion)(0.1, rank=2)),
        *(TypeError, "static_args"),
    ),
    "injected bits": (
        lambda: init(optax.inject_hyperparams(cd.local_muon)(0.1, bits=2)),
        *(TypeError, r"bits must be a Python value.*static_args=\('bits',\)"),
    ),
    "injected budget": (
        lambda: init(optax.inject_hyperparams(cd.local_muon)(0.1, budget=0.1)),
        *(TypeError, r"budget must be a Python value.*static_args=\('budget',\)"),
    ),
    "injected dtype": (
        lambda: init(optax.inject_hyperparams(cd.dion)(0.1, mu_dtype=jnp.bfloat16)),
        *(TypeError, r"mu_dtype must be a Python value.*static_args=\('mu_dtype',\)"),
    ),
    "momentum of integers": (
        lambda: cd.local_muon(0.1, mu_dtype=jnp.int8, other_optimizer=optax.sgd(0.1)),
        *(ValueError, "mu_dtype is int8, which is no dtype of real"),
    ),
    "Dion's momentum of integers": (
        lambda: cd.scale_by_dion(2, mu_dtype="int8"),
        *(ValueError, "mu_dtype is int8, which is no dtype of real"),
    ),
    "residual of integers": (
        lambda: cd.synchronizers.reconcile(residual_dtype=jnp.int32),
        *(ValueError, "residual_dtype is int32, which is no dtype of real"),
    ),
    "bits of text": (lambda: cd.local_muon(0.1, bits="2"), ValueError, "bits is '2'"),
    "bits of a float": (lambda: cd.compressors.quantize(2.0), ValueError, r"2\.0"),
    "replicas of text": (lambda: replicas.make_mesh("2"), TypeError, "got '2'"),
    "axis of text": (
        lambda: replicas.make_mesh(2, {"fsdp": "2"}),
        *(TypeError, "got '2'"),
    ),
    "mask of other parameters": (
        lambda: init(cd.dion(0.1, weight_decay_mask={"tall": True})),
        *(ValueError, "weight_decay_mask has another structure"),
    ),
    "mask function of other parameters": (
        lambda: init(cd.local_muon(0.1, weight_decay_mask=lambda p: [True])),
        *(ValueError, "weight_decay_mask has another structure"),
    ),
    "one value for a mask": (
        lambda: cd.local_muon(0.1, weight_decay_mask=False),
        *(TypeError, "weight_decay_mask is False"),
    ),
    # Arguments of which one would be ignored.
    "threshold and budget": (
        lambda: cd.curvadion(0.1, threshold=0.3, budget=0.01),
        *(ValueError, "threshold.*budget"),
    ),
    # Trees that do not belong together.
    "no parameters": (
        lambda: cd.dion(0.1).update(PARAMS, cd.dion(0.1).init(PARAMS)),
        *(ValueError, "params"),
    ),
    "no gradient of bias": (lambda: update(synced(), FEWER), ValueError, "bias"),
    "gradient of another shape": (lambda: update(synced(), WIDER), ValueError, "bias"),
    "gradient that would be broadcast": (
        lambda: update(cd.scale_by_dion(), ONE_ROW, TALL),
        *(ValueError, r"\(1, 4\), expected \(6, 4\)"),
    ),
    "complex parameter": (lambda: init(synced(), COMPLEX), TypeError, "complex64"),
    "integer parameter": (
        lambda: init(synced(), changed("bias", jnp.arange(5))),
        *(TypeError, "int32"),
    ),
    "float8 parameter": (lambda: init(synced(), EIGHT_BITS), TypeError, "float8"),
    "two parameters of one path": (
        lambda: init(cd.dion(0.1), {"a/b": jnp.ones(3), "a": {"b": jnp.ones((2, 3))}}),
        *(ValueError, "a/b"),
    ),
    "no matrix": (
        lambda: init(cd.local_muon(0.1), {"embedding": jnp.ones((5, 3))}),
        *(ValueError, "describe_partition"),
    ),
    "attention or a stack of layers": (
        lambda: init(cd.dion(0.1), {"query": jnp.ones((8, 2, 4))}),
        *(cd.dimension_numbers.PartitionWarning, r"query \(8, 2, 4\)"),
    ),
    "other things as dimension numbers": (
        lambda: init(cd.dion(0.1, dimension_numbers=lambda params: "dion")),
        *(TypeError, "'dion'"),
    ),
    "bias for scale_by_dion": (lambda: init(cd.scale_by_dion()), ValueError, "bias"),
    "weight of one replica": (
        lambda: update(synced(mesh=SIMULATED), ROWS, ROWS, weight=1.0),
        *(ValueError, "one number for each replica"),
    ),
    "state of a head of another length": (
        lambda: update(synced(), WIDER, WIDER, PARAMS),
        *(ValueError, r"bias is float32\[5\], and float32\[9\] now. Call init"),
    ),
    "state of a head that would be broadcast": (
        lambda: update(synced(), SHORT, SHORT, PARAMS),
        *(ValueError, r"bias is float32\[5\], and float32\[1\] now. Call init"),
    ),
    "state of a model with a layer more": (
        lambda: update(synced(), FEWER, FEWER, PARAMS),
        *(ValueError, r"bias is float32\[5\], and missing now. Call init"),
    ),
    "state of parameters in other dtypes": (
        lambda: update(synced(), HALF, HALF, PARAMS),
        *(ValueError, r"bias is float32\[5\], and bfloat16\[5\] now. Call init"),
    ),
    "state of a synchronous optimizer": (
        lambda: jax.eval_shape(
            cd.local_muon(0.1, mesh=SIMULATED).update,
            *(ROWS, init(cd.presets.synchronous_muon(0.1, mesh=SIMULATED), ROWS), ROWS),
        ),
        *(ValueError, "another optimizer: bias is missing, and float32.*Call init"),
    ),
    "state of another inner optimizer": (
        lambda: jax.eval_shape(
            synced(optax.adamw(0.1)).update, PARAMS, init(synced()), PARAMS
        ),
        *(ValueError, "The state is another optimizer's: .*Give what this"),
    ),
    "state of another compressor": (
        lambda: jax.eval_shape(
            synced(synchronizer=QUANTIZED).update, PARAMS, init(synced()), PARAMS
        ),
        *(ValueError, "residual.* is missing, and float32.* in this one's"),
    ),
    # Parts that are none.
    "trigger that is not called": (
        lambda: synced(trigger=triggers.always),
        *(TypeError, r"trigger is <function always.*triggers\.evenly\(0\.03\)"),
    ),
    "synchronizer that is not called": (
        lambda: synced(synchronizer=synchronizers.reconcile),
        *(TypeError, r"synchronizer is <function reconcile.*reconcile\(\)"),
    ),
    "trigger and synchronizer exchanged": (
        lambda: cd.adaptive_sync(SGD, synchronizers.reconcile(), triggers.always()),
        *(TypeError, "trigger is AfterStep"),
    ),
    "optimizer that is not called": (
        lambda: synced(optax.adam),
        *(TypeError, "inner is <function adam"),
    ),
    "number for a clip": (
        lambda: cd.local_muon(0.1, before=1.0),
        *(TypeError, r"before is 1\.0"),
    ),
    "schedule where Optax takes none": (
        lambda: cd.presets.diloco(0.1, outer_momentum=lambda step: 0.9),
        *(TypeError, r"outer_momentum is a schedule\. Give a number"),
    ),
    "function for an extra argument": (
        lambda: update(synced(mesh=SIMULATED), ROWS, ROWS, value_fn=loss),
        *(TypeError, "'value_fn' is a function"),
    ),
    "state that would be broadcast by an optimizer without an anchor": (
        lambda: update(
            synced(optax.adam(0.1), synchronizer=AVERAGE), SHORT, SHORT, PARAMS
        ),
        *(ValueError, r"bias is float32\[5\], and float32\[1\] now. Call init"),
    ),
    "no value for an inner optimizer that needs one": (
        lambda: update(synced(optax.contrib.reduce_on_plateau())),
        *(TypeError, "missing 1 required keyword-only argument: 'value'"),
    ),
    # Parts that do not go together.
    "RMMC without a momentum": (
        lambda: update(synced(optax.sgd(0.1), change)),
        *(ValueError, "momentum"),
    ),
    "factors of AdamW": (
        lambda: init(
            synced(optax.adamw(0.1), synchronizer=synchronizers.average_factors())
        ),
        *(ValueError, "dion"),
    ),
    "wrapper that drops extra arguments": (
        lambda: update(
            synced(
                swallowing(cd.dion(0.1)),
                synchronizer=synchronizers.average_factors(),
                mesh=SIMULATED,
            ),
            *(ROWS, ROWS),
        ),
        *(ValueError, "extra argument"),
    ),
    "step inside of map": (
        lambda: mapped(synced().update, ROWS, STATES, ROWS),
        *(ValueError, "mapped, each replica would train alone"),
    ),
    "init inside of map": (
        lambda: mapped(synced().init, ROWS),
        *(ValueError, "mapped, each replica would train alone"),
    ),
    # Arrays that are no rows.
    "parameters of one": (
        lambda: init(synced(mesh=SIMULATED)),
        *(ValueError, r"'bias'.*\(5,\).*replicas\.replicate"),
    ),
    "parameters of one at update": (
        lambda: update(synced(mesh=SIMULATED), ROWS, PARAMS, ROWS),
        *(ValueError, r"Parameter\['bias'\] has shape \(5,\).*replicas\.replicate"),
    ),
    "dictionaries for a state": (
        lambda: synced(mesh=SIMULATED).update(ROWS, {"rows": ROWS}, ROWS),
        *(TypeError, "state is a dict, and no AdaptiveSyncState.*without a target"),
    ),
    "dictionaries for counters": (
        lambda: cd.metrics.read({"counters": {"steps": jnp.zeros([])}}),
        *(ValueError, "0 optimizers.*without one it has dictionaries"),
    ),
    "rows of others": (
        lambda: init(synced(mesh=replicas.simulated(4)), ROWS),
        *(ValueError, r"\(2, 5\).*each of 4 replicas"),
    ),
    "gradients of one": (
        lambda: update(synced(mesh=SIMULATED), PARAMS, ROWS),
        *(ValueError, "bias"),
    ),
    "batch that replicas cannot share": (
        lambda: replicas.split({"x": jnp.ones((5, 4))}, SIMULATED),
        *(ValueError, r"batch\['x'\].*\(5, 4\).*among 2 replicas"),
    ),
    "batch that is not split": (
        lambda: mapped(loss, ROWS, jnp.ones((8, 4))),
        *(ValueError, r"Argument 1.*\(8, 4\).*replicas\.split"),
    ),
    "batch from outside": (
        lambda: jax.eval_shape(capturing, ROWS, jnp.ones((2, 4))),
        *(ValueError, "arrays that are not its arguments"),
    ),
    "mean inside map": (
        lambda: mapped(communicating, ROWS),
        *(ValueError, "The optimizer averages, at syncs: drop the pmean"),
    ),
    # Meshes that are none.
    "number for a mesh": (lambda: synced(mesh=2), TypeError, r"mesh must be .* got 2"),
    "mesh of another axis": (
        lambda: synced(mesh=jax.make_mesh((2,), ("data",))),
        *(ValueError, "needs an axis 'replica' of type Auto"),
    ),
    "replicated twice": (
        lambda: replicas.replicate(replicas.replicate(PARAMS, TWO), TWO),
        *(ValueError, "sharded over 'replica' already"),
    ),
    "no replica at all": (lambda: replicas.simulated(0), ValueError, "got 0"),
    # Names of old.
    "axis_name": (
        lambda: cd.local_muon(0.1, axis_name="replica"),
        *(TypeError, "unexpected keyword argument 'axis_name'"),
    ),
    "budget by its place": (
        lambda: cd.local_muon(0.02, 0.01),
        *(TypeError, "takes 1 positional argument"),
    ),
    "threshold of local_muon": (
        lambda: cd.local_muon(0.1, threshold=0.3),
        *(TypeError, "unexpected keyword argument 'threshold'"),
    ),
}


# As YAML reads 2e-2, and JSON whatever was quoted.
OF_TEXT = {
    "learning_rate": lambda x: cd.local_muon(x),
    "adam_learning_rate": lambda x: cd.local_muon(0.1, adam_learning_rate=x),
    "weight_decay": lambda x: cd.dion(0.1, weight_decay=x),
    "momentum": lambda x: cd.local_muon(0.1, momentum=x),
    "threshold": lambda x: cd.curvadion(0.1, threshold=x),
    "ahead": lambda x: triggers.budget(0.1, ahead=x),
    "b1": lambda x: cd.presets.synchronous_adamw(0.1, b1=x),
    "outer_learning_rate": lambda x: cd.presets.diloco(0.1, outer_learning_rate=x),
    "outer_momentum": lambda x: cd.presets.muloco(0.1, outer_momentum=x),
    "local_learning_rate": lambda x: cd.presets.paper(0.1, local_learning_rate=x),
}
PRESETS = [getattr(cd.presets, name) for name in cd.presets.__all__]


@pytest.mark.parametrize("name", OF_TEXT)
def test_text_for_a_number_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be a number.*got '2e-2'.*YAML"):
        OF_TEXT[name]("2e-2")


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion, cd.dion, *PRESETS])
def test_text_for_a_learning_rate_is_refused(make):
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        make("2e-2")


@pytest.mark.parametrize("name", CASES)
def test_wrong_use_is_refused(name):
    use, error, given = CASES[name]
    with pytest.raises(error, match=given):
        use()
