"""One site that trains the same GPT with JAX, in the same run as the sites of PyTorch.

    python examples/sites_torch/jax_site.py --site oslo --run out/torch/run

Its parameters are a dict with the names and shapes of PyTorch's `named_parameters`.
"""

import time
import zlib

import gpt
import jax
import jax.numpy as jnp
import main
import numpy as np
import optax

from curvadion_jax import sites


def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """What `gpt.GPT.forward` computes."""

    def linear(name, x):
        return x @ params[f"{name}.weight"].T

    def norm(name, x):
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
        return x * scale * params[f"{name}.weight"]

    eps = jnp.finfo(jnp.float32).eps  # PyTorch's default
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    x = params["token.weight"][inputs] + params["position.weight"][:length]
    for layer in range(gpt.LAYERS):
        block = f"blocks.{layer}"
        heads = linear(f"{block}.qkv", norm(f"{block}.norm1", x))
        q, k, v = jnp.moveaxis(heads.reshape(batch, length, 3, gpt.HEADS, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"{block}.out", mixed.reshape(x.shape))
        hidden = jax.nn.relu(linear(f"{block}.up", norm(f"{block}.norm2", x)))
        x = x + linear(f"{block}.down", hidden**2)
    logits = linear("head", norm("norm", x))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def initial_params() -> dict[str, jax.Array]:
    model = gpt.GPT()
    return {name: jnp.asarray(x.detach()) for name, x in model.named_parameters()}


def train(name: str, url: str, steps: int, pace: float = 0.0) -> None:
    text, params = gpt.Text(), initial_params()
    tx = optax.contrib.muon(
        0.02,
        adam_learning_rate=3e-3,
        muon_weight_dimension_numbers={
            key: optax.contrib.MuonDimensionNumbers()
            if key.startswith("blocks.") and x.ndim == 2
            else None
            for key, x in params.items()
        },
    )

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with sites.Site(url, name, **main.RUN) as site:
        params = site.start(params)
        opt_state = tx.init(params)
        for step in range(steps):
            begun = time.monotonic()
            batch = text.batch((step, zlib.crc32(name.encode())))
            params, opt_state, loss = train_step(params, opt_state, batch)
            params = site.sync(params, tokens=batch[:, 1:].size)
            if (step + 1) % 50 == 0:
                print(f"{name} {step + 1}: {loss:.3f} {site.metrics}", flush=True)
            time.sleep(max(0.0, pace - (time.monotonic() - begun)))
        params = site.leave(params)
    loss = float(loss_fn(params, text.held_out()))
    main.report(
        name, loss, site.metrics, [np.asarray(params[x]) for x in sorted(params)]
    )


if __name__ == "__main__":
    flags = main.arguments()
    train(flags.site, flags.run, flags.steps, flags.pace)
