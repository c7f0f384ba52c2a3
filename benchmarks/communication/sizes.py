"""The model and the data of all runs of a study, by name."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """What is the same in all runs that are compared.

    Attributes:
        layers, width, heads: The model's size.
        length: Tokens of a sequence.
        tokens: Tokens of a step of all replicas together, so that runs with fewer
            replicas see the same data.
        evaluation: Held-out sequences in an evaluation.
        every: Steps between evaluations.
        data: Text or token shards, as for the example; None is the standard library.
        products: dtype of the matrix products; parameters are float32.
        at_once: Sequences of a replica in one backward pass; None is all of them.
    """

    layers: int
    width: int
    heads: int
    length: int
    tokens: int
    evaluation: int
    every: int
    data: str | None = None
    products: str = "float32"
    at_once: int | None = None


# The gradient noise scale of `cpu`, tr(covariance) / |gradient|^2 in tokens, grows
# from 800 at step 50 over 6 000 at step 150 to 40 000 at step 300 (synchronous Dion,
# rate 0.02): a step of 8192 tokens lies near the critical batch, a replica's 1024
# below it. `30m` and `160m` are for accelerators and have not been run.
# Eight sequences at once are a quarter faster than 256, since they stay in the cache.
SIZES = {
    "test": Size(1, 16, 1, 16, 256, 8, 2),
    "cpu": Size(2, 64, 2, 64, 8192, 1024, 100),
    "cpu-32k": Size(2, 64, 2, 64, 32_768, 1024, 100),
    "cpu-128k": Size(2, 64, 2, 64, 131_072, 1024, 100, at_once=8),
    "cpu-512k": Size(2, 64, 2, 64, 524_288, 1024, 100, at_once=8),
    "30m": Size(8, 512, 8, 512, 131_072, 256, 100, None, "bfloat16", 32),
    "160m": Size(12, 768, 6, 1024, 524_288, 256, 100, None, "bfloat16", 16),
}
