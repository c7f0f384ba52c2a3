"""The counts of the short rule on public codebases, on the 25 that are kept."""

import json

import by_name
import codebases


def test_counts_of_the_trees_that_are_kept():
    found = by_name.counts(codebases.TREES.glob("*.json"))
    assert found["models"] == 25
    assert found["wrong"] == 0
    arrays = [
        name for file in codebases.TREES.glob("*.json") for name in codebases.read(file)
    ]
    assert sum(found.values()) == len(arrays) + 25


def test_a_mistake_is_counted(tmp_path):
    """A layer named as Flax names it, whose axes are the other way round."""
    right = {"mlp/kernel": [[8, 16], [[[1], [0]]]], "mlp/bias": [[16]]}
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"parameters": right}), "utf-8")
    found = by_name.counts([file])
    assert found == {"models": 1, "wrong": 1, "matrix": 1, "vector": 1}
    assert "| matrix | 1 | 100% |" in by_name.table(found)
