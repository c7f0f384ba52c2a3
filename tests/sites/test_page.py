"""The loops and the defaults on docs/sites.md and docs/from-pytorch.md."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from curvadion_jax import sites

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sites.md").read_text("utf-8")


def test_the_program_of_the_page_trains_as_it_is_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["loss"] < 0.9 * (found["wanted"] ** 2).sum(0).mean()
    assert found["site"].metrics.counted >= 1
    assert (tmp_path / "out/run/commits").is_dir()


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
