"""Sites can be used without the rest of the package, and changed apart from it."""

import ast
from pathlib import Path

import pytest

from curvadion_jax import sites

FOLDER = Path(sites.__file__).parent


def imported(source: str) -> set[str]:
    """Full names of what is imported, `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda x: x.name)
def test_a_file_imports_public_compressors_trees_and_sites_alone(file):
    names = {x for x in imported(file.read_text()) if x.startswith("curvadion_jax")}
    own = {x for x in names if x.startswith("curvadion_jax.sites.")}
    others = names - own - {"curvadion_jax._trees"}
    assert all(x.startswith("curvadion_jax.compressors") for x in others)
    assert not any("._" in x for x in others)
