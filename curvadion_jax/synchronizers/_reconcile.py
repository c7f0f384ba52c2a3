"""The sync that keeps replicas together: parameters, momentum and Q."""

import jax
import optax

from curvadion_jax import _arguments, _orthonormalize, compressors
from curvadion_jax._protocols import Synchronizer
from curvadion_jax.compressors import check_compressor
from curvadion_jax.synchronizers import _fragments
from curvadion_jax.synchronizers._reconciler import Reconciler


def reconcile(
    outer: optax.GradientTransformation | None = None,
    *,
    compressor: compressors.Compressor | None = None,
    momentum: bool | compressors.Compressor = True,
    momentum_every: int = 1,
    fragments: int = 1,
    delay: int = 0,
    other_state: bool = False,
    residual_dtype: jax.typing.DTypeLike | None = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
) -> Synchronizer:
    r"""At a sync replicas take their own step and then come together.

    With :math:`\theta_i` the parameters of replica i after its local step and
    :math:`a` the anchor, the parameters all had after the last sync, the outer
    optimizer is given the mean pseudo-gradient:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad \theta_i \leftarrow a

    Afterwards the anchors of the replicas agree to the bit, and the parameters do but
    for the rounding of `params + update`, which does not add up: pseudo-gradients are
    measured from the anchor.

    The momentum of the replicas is averaged too. Q is not, since columns of different
    signs would cancel: it is recomputed by a step of power iteration on the common
    momentum, from the Q of the last sync.

    **With a delay** what a replica has after step t, :math:`\theta_i^t`, is what it
    brings, in the compressor's form and with what it owes, and the new anchor is there
    after step t + k. Nothing of the k steps waits for it:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i^t), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad
      \theta_i \leftarrow a + (\theta_i^{t+k} - \theta_i^t)

    Replicas so stay apart by their last k steps. The time of a sync can hide only where
    those steps are in the program in which it ends: `replicas.steps`. What the
    trigger says while a sync is under way is dropped, but for the step that ends it, on
    which the next can begin. The anchor is the model as of the last sync that has
    ended. Only triggers that look at counters alone are accepted.

    Args:
      outer: Optax transformation for the outer step. It is given the pseudo-gradient
        with the anchor as parameters; for DiLoCo
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. None takes a - d, the plain
        average.
      compressor: form in which pseudo-gradients are sent, with error feedback: what a
        replica sent less than it had is added to its next one. None sends them as they
        are, in at least float32.
      momentum: whether momenta are averaged: the field `momentum` (Dion), else
        `trace`, else `mu`, of the inner optimizer's state. A compressor sends them in
        its form, and what was not sent stays in the replica's own momentum; Q then
        stays its own too.
      momentum_every: k, for momenta (and the other state) to be averaged at every k-th
        sync only, or of every fragment at its own every k-th.
      fragments: n, for a sync to bring one n-th of the parameters together, in turn:
        pseudo-gradient, residual, outer step, anchor, momentum and Q of these alone,
        and the others stay as the local step left them. This is streaming: a sync sends
        1/n, and for as many bytes it comes n times as often, ``every_k(h // n)``.
        Fragments are of whole parameters (a stack of layers is one), of about equal
        size; :func:`fragment_paths` lists them. The program holds a sync for each.
      delay: k, for a sync to end k steps after it has begun, and to keep the local
        progress made meanwhile. See above.
      other_state: whether the rest of the inner optimizer's floating-point state is
        averaged, such as AdamW's moments of embeddings: arrays of a parameter's shape.
      residual_dtype: dtype in which error feedback is kept from sync to sync; None is
        float32. (For the outer step `optax.sgd` has `accumulator_dtype`.)
      orthonormalize: as for :func:`scale_by_dion`, for Q.

    Returns:
      A synchronizer for any inner optimizer. It keeps a copy of the parameters and of
      Q, with a compressor another of the parameters, and the outer optimizer's state.
      The copy has the parameters' dtype: in bfloat16 a mean move of less than half of a
      last digit (1/512 of the parameter) is rounded away at every sync, so keep
      parameters in float32 and compute in bfloat16.

    Raises:
      TypeError: if `outer` is not an Optax transformation, a compressor is not a
        Compressor, a number is not an int, or another argument of the wrong kind.
      ValueError: if a number is below 1, `momentum_every` is given and nothing is
        averaged, or with a delay something besides parameters is; at `init`, if there
        are more fragments than parameters, or momenta are to be averaged and the inner
        optimizer keeps arrays of parameters' shapes, but under none of these names.

    Example:
      >>> import jax.numpy as jnp
      >>> plain = reconcile()
      >>> diloco = reconcile(
      ...     optax.sgd(0.7, momentum=0.9, nesterov=True), momentum=False
      ... )
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> inner_state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> [each.payload(params, inner_state, {}).averaged for each in (plain, diloco)]
      [256, 128]

      A sync begins with step 4, and its anchor is there after step 6:

      >>> from curvadion_jax import adaptive_sync, triggers
      >>> later = reconcile(momentum=False, delay=2)
      >>> tx = adaptive_sync(optax.sgd(1.0), triggers.every_k(4), later)
      >>> params, anchors = {"w": jnp.zeros(1)}, []
      >>> state = tx.init(params)
      >>> for _ in range(6):
      ...     updates, state = tx.update({"w": jnp.ones(1)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     anchors.append(float(state.sync_state.anchor["w"][0]))
      >>> anchors
      [0.0, 0.0, 0.0, 0.0, 0.0, -4.0]

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, and
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
    """
    if outer is not None:
        _arguments.check_transformation(outer, "outer")
    if compressor is not None:
        compressor = check_compressor(compressor)
    if not isinstance(momentum, bool):
        what = "momentum that is neither True nor False"
        momentum = check_compressor(momentum, what)
    if residual_dtype is not None and compressor is None:
        raise ValueError(f"{residual_dtype=} without a compressor: leave it out")
    for what, number in (("fragments", fragments), ("momentum_every", momentum_every)):
        _fragments.check_number(what, number)
    if momentum_every > 1 and not momentum and not other_state:
        raise ValueError(
            f"momentum_every={momentum_every} says how often momenta are averaged, and "
            "momentum=False that they never are: leave one of them out"
        )
    _arguments.check_int(delay, "delay", at_least=0)
    if delay and (momentum or other_state):
        raise ValueError(
            f"delay={delay} is for parameters alone: a momentum that was averaged "
            "elsewhere while local steps went on would undo what they have added to "
            "it. Give momentum=False and other_state=False, or delay=0"
        )
    parts = Reconciler(
        outer=optax.with_extra_args_support(
            optax.scale(-1) if outer is None else outer
        ),
        compressor=compressor,
        whole=momentum is True,
        momentum_form=None if isinstance(momentum, bool) else momentum,
        other_state=other_state,
        residual_dtype=residual_dtype,
        orthonormalize=orthonormalize or _orthonormalize.cholesky_qr,
        fragments=fragments,
        momentum_every=momentum_every,
        delay=delay,
    )
    return Synchronizer(
        *(parts.init, parts.sync, parts.payload, parts.cycle()),
        after_local_step=True,
        delay=delay,
    )
