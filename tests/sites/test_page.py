"""The loops and the defaults on docs/sites.md and docs/from-pytorch.md."""

import inspect
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import sites

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sites.md").read_text("utf-8")


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


def test_the_loop_of_pytorch_trains(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "from-pytorch.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["loss"] < 1  # of data whose mean square is 1
    assert found["site"].metrics.counted >= 1
    assert all(x.requires_grad for x in found["model"].parameters())
    with sites.Site(
        "out/run", "bern", outer=found["outer"], every=7, compressor=found["compressor"]
    ) as site:
        newest = site.start(dict(torch.nn.Linear(16, 4).named_parameters()))
    for name, x in found["model"].named_parameters():
        assert torch.equal(newest[name], x)


def test_the_defaults_of_the_page_are_those_of_a_site():
    given = re.search(r"^Defaults: (.*?)\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert given
    on_page = dict(re.findall(r"`(\w+)=(\w+)`", given[1]))
    signature = inspect.signature(sites.Site).parameters.values()
    own = {x.name: x.default for x in signature if x.kind is x.KEYWORD_ONLY}
    # A whole number of seconds is written without its zero.
    assert on_page == {name: str(x).removesuffix(".0") for name, x in own.items()}
