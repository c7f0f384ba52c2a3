"""Sphinx configuration: python -m sphinx -W -q -b html docs docs/_build."""

import ast
import inspect
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import curvadion_jax

project = "curvadion_jax"
author = "The curvadion_jax authors"
project_copyright = author
release = version = curvadion_jax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_parser",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Dashes only: curly quotes would spoil code in prose.
smartquotes_action = "D"

add_module_names = False
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 72
# Fields of a NamedTuple are listed by the Attributes section of its docstring, so its
# members are never asked for; types stand in the signature.
napoleon_attr_annotations = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
myst_heading_anchors = 3

# In a docstring, single backticks are code; a name of the library becomes a link.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # Only the default role makes these, mostly for arguments and expressions.
    ("py:obj", r".*"),
    # Types of other projects, whose inventories lie on the network.
    ("py:class", r"(collections|jax|jnp|np|optax|os)\..*"),
    # The same, imported by their names.
    ("py:class", r"Any|AxisType|Callable|Iterable|Mapping|Mesh|Sequence"),
    # Aliases, and what only a Group shows.
    ("py:class", r"Views|(curvadion_jax\._layout\.)?Layout"),
]


def _signature(
    app: Sphinx, what: str, name: str, value: object, *_: object
) -> tuple[str, str | None] | None:
    """The signature as it is written: evaluated, Optax's type aliases fill a page."""
    value = value.__func__ if inspect.ismethod(value) else value  # of a class
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    if isinstance(tree, ast.FunctionDef):
        arguments = tree.args
        if what == "method":
            del arguments.args[0]
        returns = None if tree.returns is None else _plain(tree.returns)
        return f"({_plain(arguments)})", returns
    if isinstance(tree, ast.ClassDef):
        fields = [item for item in tree.body if isinstance(item, ast.AnnAssign)]
        return f"({', '.join(map(_plain, fields))})", None
    return None


def _plain(tree: ast.AST) -> str:
    """Source text without the private modules that names come from."""
    return re.sub(r"\b_\w+\.", "", ast.unparse(tree))


def _resolve(
    app: Sphinx,
    env: object,
    node: addnodes.pending_xref,
    content: nodes.TextElement,
) -> nodes.reference | None:
    """Finds a name of the library that is used outside its own module."""
    if node.get("refdomain") != "py":
        return None
    domain: Any = app.env.get_domain("py")
    target = node["reftarget"]
    if node["reftype"] == "obj":  # Single backticks may as well name an argument.
        name = f"{project}.{target}"
        entry = domain.objects.get(name)
        found = [(name, entry)] if entry and entry.objtype != "module" else []
    else:
        found = domain.find_obj(app.env, "", "", target, None, searchmode=1)
        found = [(name, entry) for name, entry in found if not entry.aliased]
    if len(found) != 1:
        return None
    name, entry = found[0]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, content, name
    )


def _files(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to files that are no pages get MyST's word for them.

    In the source they are plain, so that they work where the Markdown is read. There is
    no place inside of such a file to link to.
    """
    del app, name
    link = r"(?<!!)(\[[^\]]*\]\()(\.\./[^)#]*|\w+\.ipynb)(#[^)]*)?\)"
    source[0] = re.sub(link, r"\1path:\2)", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _files)
    app.connect("autodoc-process-signature", _signature)
    app.connect("missing-reference", _resolve)
