"""Local Muon steps with evenly spaced, compressed syncs."""

from __future__ import annotations

from typing import Any

import jax
import optax

from curvadion_jax import _arguments, triggers
from curvadion_jax.matrices import _adamw_for_the_rest, _two_optimizers
from curvadion_jax.matrices._muon import muon
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.step._adaptive_sync import adaptive_sync
from curvadion_jax.synchronizers import Synchronizer
from curvadion_jax.synchronizers._reconcile import reconcile_in_few_bits
from curvadion_jax.triggers import Trigger

# Above 3% of the bytes more of them gain little: benchmarks/study/results/curve.md.
_BUDGET = 0.03
# It pays for 4 bits on every step, 12.9% of the bytes. At 1% 2 bits in more syncs end
# lower (benchmarks/study/gap.md); in between nothing is measured.
_BUDGET_OF_FOUR_BITS = 0.13


def local_muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    budget: float | None = None,
    bits: int | None = None,
    momentum: optax.ScalarOrSchedule = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    trigger: Trigger | None = None,
    synchronizer: Synchronizer | None = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Local Muon steps with evenly spaced, compressed syncs.

    Each replica i takes Muon steps on its own gradients, which send nothing. For a
    matrix of (fan_in, fan_out), with momentum M, gradient g and learning rate
    :math:`\eta`:

    .. math::
      M_i &\leftarrow \mu M_i + (1 - \mu)\, g_i \\
      \theta_i &\leftarrow \theta_i - \eta\,
      \sqrt{\max(1, \text{fan out}/\text{fan in})} \;
      \mathrm{orth}(\mu M_i + (1 - \mu)\, g_i)

    with orth by five Newton-Schulz iterations (and eps = 1e-7 in the norm before them),
    and up to the bias correction of `optax.contrib.muon`. Syncs are evenly spaced, as
    often as `budget` allows. At a sync the replicas average their pseudo-gradients, how
    far they are from the last common parameters (the anchor a), in 2 bits with error
    feedback. The anchor takes a Nesterov step along the mean, and all replicas continue
    from it:

    .. math::
      d &= \mathrm{mean}_i(a - \theta_i), \qquad v \leftarrow d + 0.4\, v \\
      a &\leftarrow a - (d + 0.4\, v), \qquad \theta_i \leftarrow a

    This is MuLoCo in 2 bits, with other constants in the outer step, and a byte budget
    instead of a period; `presets.muloco` has the authors' outer step. It is the
    recommended method. For syncs triggered by the momentum see :func:`curvadion`.

    Syncs by budget, in a model of large matrices, and how many steps were worth one
    step of synchronous Muon in the only model that was studied (0.85 million
    parameters, 8 replicas, 2,048 tokens each, three seeds, the best of four
    settings; ``benchmarks/study/results/curve.md``):

    ======  ============  ================
    budget  a sync every  steps for Muon's
    ======  ============  ================
    0.14    step          1.1
    0.07    step          1.2
    0.03    2.3 steps     1.2
    0.01    7 steps       1.6
    0.003   23 steps      2.5
    ======  ============  ================

    Args:
      learning_rate: of Muon, for the matrices; a number, or a schedule of steps. Start
        at 0.02.
      budget: bytes to send, as a fraction of an all-reduce of all gradients in float32
        on every step. None means 0.03; take less where steps wait for the link. From
        about 0.07 on every step has a sync, in 2 bits, and from 0.13 on in 4. What is
        left of a budget between them, or of a larger one, is not used. (Small arrays
        cost more, so a tiny model has fewer syncs.) Cannot be combined with `trigger`.
      bits: bits per element of the pseudo-gradients: 8, 4, 2 or 1. None means 4 from a
        budget of 0.13 on, and else 2. For very small budgets (0.001), try 4. Cannot be
        combined with `synchronizer`.
      momentum: decay rate of the local momentum, as AdamW's b1; a number in [0, 1) or a
        schedule. Try ``optax.linear_schedule(0.8, 0.95, steps)``, as in the table's
        rows.
      weight_decay: decoupled, of matrices only, times the learning rate.
      weight_decay_mask: which of the matrices decay: a tree of bools like the
        parameters, or a prefix of one, or a function of the parameters that returns
        one. None means all.
      mu_dtype: dtype of the momenta. None means the parameters' dtype.
      adam_learning_rate: learning rate of AdamW, which trains all other parameters
        (embeddings, output heads, norms, biases) with Nesterov momentum, b1 = 0.9,
        b2 = 0.95 and eps = 1e-7. None means `learning_rate`.
      other_optimizer: replaces that AdamW. Not with `adam_learning_rate`.
      dimension_numbers: which parameters are matrices, and along which axes. Best is
        what `dimension_numbers.from_loss` reads from your loss. Otherwise a tree (or
        prefix) of :class:`DimensionNumbers`, with None for a parameter of the other
        optimizer, or a function of the parameters that returns one. "default" or None
        means `dimension_numbers.by_name`, which warns of what names and shapes do not
        tell. A function is static under `optax.inject_hyperparams`.
      trigger: when to synchronise. None means ``triggers.evenly(budget)``.
      synchronizer: how replicas synchronise. None means the `reconcile` described
        above, which keeps momenta local and its own state in bfloat16.
      before: transformation of each replica's own gradients before the optimizer, such
        as ``optax.clip_by_global_norm(1.0)``. Around the optimizer, in `optax.chain`,
        it would clip by the norm over all replicas and send it on every step.
      mesh: where the replicas are: `replicas.make_mesh`, or `replicas.simulated` on one
        device. None means a single replica, on which the default sync sends nothing and
        takes no outer step: the result is Muon's. A mesh of one replica does take outer
        steps.
      specs: how one replica's parameters are sharded over the axes inside a replica: a
        tree (or prefix) of `jax.sharding.PartitionSpec`. Needed where these axes are
        automatic.

    Returns:
      An optimizer of rows, with state :class:`AdaptiveSyncState`.
      `curvadion_jax.metrics.read` reports syncs and bytes.

    Raises:
      TypeError: if `bits` or `budget` is an array, as under `optax.inject_hyperparams`,
        if a learning rate is no number or schedule, or if `mesh` is no mesh.
      ValueError: if an argument is out of range, or both `budget` and `trigger`, both
        `bits` and `synchronizer`, or both `other_optimizer` and `adam_learning_rate`
        are given; at `init` and `update` as for :func:`adaptive_sync`.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> # A sync in 2 bits costs 7.2% of float32 gradients: here one every two steps.
      >>> tx = local_muon(0.5, budget=0.036, mesh=mesh)
      >>> params = replicas.replicate({"kernel": jnp.zeros((32, 32))}, mesh)
      >>> target = jnp.array([2 * jnp.eye(32), 4 * jnp.eye(32)])  # one for each replica
      >>> loss_fn = lambda params, x: jnp.sum((params["kernel"] - x) ** 2) / 32
      >>> differentiate = replicas.map(jax.value_and_grad(loss_fn), mesh)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for step in range(4):
      ...     loss, gradients = differentiate(params, target)
      ...     updates, state = update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"loss {loss.mean():.1f}, {state.counters.syncs} syncs")
      loss 10.0, 0 syncs
      loss 7.2, 1 syncs
      loss 3.5, 1 syncs
      loss 2.1, 2 syncs

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    _arguments.check_numbers(weight_decay=weight_decay)
    _arguments.check_mask(weight_decay_mask)
    _arguments.check_numbers(below=1, momentum=momentum)
    _arguments.check_exclusive(budget=budget, trigger=trigger)
    _arguments.check_exclusive(bits=bits, synchronizer=synchronizer)
    other_optimizer = _adamw_for_the_rest.choose(
        other_optimizer,
        learning_rate,
        adam_learning_rate,
        mu_dtype=mu_dtype,
        nesterov=True,
    )
    if trigger is None:
        budget = _BUDGET if budget is None else budget
        _arguments.check_budget(budget)
        trigger = triggers.evenly(budget)
        if bits is None and budget >= _BUDGET_OF_FOUR_BITS:
            bits = 4

    def matrices(numbers_of):
        return muon(
            learning_rate,
            numbers_of,
            beta=momentum,
            eps=_adamw_for_the_rest.EPSILON,
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
        )

    return adaptive_sync(
        _two_optimizers.optimizer(
            matrices, other_optimizer, dimension_numbers, learning_rate
        ),
        trigger,
        synchronizer or reconcile_in_few_bits(bits, mesh),
        mesh,
        before=before,
        specs=specs,
    )
