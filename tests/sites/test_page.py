"""The loop and the defaults on docs/sites.md."""

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from curvadion_jax import sites

PAGE = (Path(__file__).parents[2] / "docs" / "sites.md").read_text("utf-8")


def test_the_loop_of_the_page_trains(tmp_path):
    """With a folder in place of the bucket, and the reader's model and data."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert code.count('"s3://bucket/run-7"') == 1
    loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    found = {
        "params": {"w": jnp.ones((4, 3))},
        "data": [np.ones((8, 4), np.float32)] * 14,
        "loss_fn": loss_fn,
    }
    before = loss_fn(found["params"], found["data"][0])
    exec(code.replace('"s3://bucket/run-7"', repr(str(tmp_path))), found)
    assert found["loss"] < before
    assert found["site"].metrics.counted >= 1


def test_the_defaults_of_the_page_are_those_of_a_site():
    given = re.search(r"^Defaults: (.*?)\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert given
    on_page = dict(re.findall(r"`(\w+)=(\w+)`", given[1]))
    signature = inspect.signature(sites.Site).parameters.values()
    own = {x.name: x.default for x in signature if x.kind is x.KEYWORD_ONLY}
    # A whole number of seconds is written without its zero.
    assert on_page == {name: str(x).removesuffix(".0") for name, x in own.items()}
