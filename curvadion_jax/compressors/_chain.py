"""One form of sending inside another."""

from curvadion_jax.compressors import _base


def chain(first: _base.Compressor, *rest: _base.Compressor) -> _base.Compressor:
    """The form in which the parts of the first are sent in the form of the next.

    ``chain(low_rank(0.25), quantize(8))`` sends the factors, and what `low_rank` sends
    whole, in 8 bits. What a replica put in is what arrived of it, so that error
    feedback holds the loss of all forms together.

    Args:
      first: the outermost form. `low_rank` has parts; `exact`, `quantize` and `top_k`
        (which takes `bits` of its own) have none.
      *rest: forms from the outside in; all but the last must have parts, and all of
        them must have no state.

    Returns:
      The compressor; without `rest` it is `first`. Its state is that of `first`.

    Raises:
      TypeError: if an argument is no compressor.
      ValueError: if one before the last has no parts that could be sent in another
        form, or one after the first has a state.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax.compressors import low_rank, quantize
      >>> both = chain(low_rank(2), quantize(8))
      >>> both.payload({"w": jnp.ones((512, 256))}, {})  # 2 (512 + 256) and 6 scales
      Payload(averaged=1560, gathered=0)
    """
    forms = (first, *rest)
    checked = [
        _base.check_compressor(form, f"argument {index} of chain")
        for index, form in enumerate(forms)
    ]
    result = forms[-1] if len(forms) == 1 else checked[-1]
    for index, form in reversed(list(enumerate(forms[:-1]))):
        if form.through is None:
            raise ValueError(
                f"argument {index} of chain has no parts to be sent in another form: "
                "give low_rank there, which has (its factors); exact, quantize and "
                "top_k have none, nor has a chain that says already how its factors "
                "are sent. For values of top_k in few bits give it bits"
            )
        _base.check_stateless(result, f"argument {index + 1} of chain")
        result = form.through(result)
    return result
