"""Sphinx configuration: python -m sphinx -W -q -b html docs docs/_build."""

import ast
import inspect
import os
import re
import shutil
import textwrap
from pathlib import Path
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
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_parser",
]
exclude_patterns = ["_build"]
autosummary_generate = False  # each function is on a page that we wrote
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static", "pictures/card.png"]
html_css_files = ["site.css"]
html_js_files = ["breaks.js"]
html_favicon = "_static/favicon.svg"
html_theme_options: dict[str, Any] = {
    "light_css_variables": {
        # Contrast of at least 5 with the background of code, too.
        "color-brand-primary": "#1a6699",
        "color-brand-content": "#1a6699",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6db3e8",
        "color-brand-content": "#6db3e8",
    },
}
# The address of the repository, such as https://github.com/owner/name; the workflow
# that publishes the site sets it. Without it links to files are plain text.
REPOSITORY = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
if REPOSITORY:
    html_theme_options |= {
        "source_repository": REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
    }
# Dashes only: curly quotes would spoil code in prose.
smartquotes_action = "D"

# The published site, for addresses that must be absolute: with GitHub's pages
# https://owner.github.io/name/.
_OWNER, _, _NAME = REPOSITORY.removeprefix("https://github.com/").partition("/")
html_baseurl = f"https://{_OWNER}.github.io/{_NAME}/" if _NAME else ""

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
myst_enable_extensions = ["deflist"]
# Pages of the repository have headings of all levels, and lists of other renderers.
suppress_warnings = ["myst.header"]

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
    (
        "py:class",
        r"Views|Replicas|Simulated|Costs|Common|Rows|P|(curvadion_jax\._layout\.)?Layout",
    ),
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


HERE = Path(__file__).parent
ROOT = HERE.parent
# Pages below another one in the side bar, which has at most 20 entries otherwise.
# Written here, since Markdown that is read elsewhere would show a list of contents.
CHILDREN = {
    "tutorial": ("one-device",),
    "own-loop": ("models", "loop-exceptions", "matrices"),
    "sharding": ("multi-host",),
    "sites": ("from-pytorch", "operate-sites", "levanter"),
    "concepts": ("glossary",),
    "papers": ("rmmc",),
    "results": (
        "repository/benchmarks/README",
        "repository/benchmarks/study/README",
        "repository/benchmarks/study/gap",
        "repository/benchmarks/peers/README",
        "repository/benchmarks/links/wan/README",
        "repository/benchmarks/links/wan/results/older",
        "repository/examples/char_lm/README",
        "repository/examples/ports/README",
    ),
}
# Pages of the repository that the site shows, in docs/repository.
MIRRORED = ("benchmarks/**/*.md", "examples/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md")


def _mirror(app: Sphinx) -> None:
    """Copies pages of the repository beside those of the site, with their pictures."""
    del app
    target = HERE / "repository"
    pages = {page for pattern in MIRRORED for page in ROOT.glob(pattern)}
    for page in sorted(pages):
        text = page.read_text("utf-8")

        def link(found: re.Match[str], page: Path = page) -> str:
            return _link(found, page.parent, pages)

        text = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)
        copy = target / page.relative_to(ROOT)
        text = f"---\norphan: true\n---\n\n{text}"
        if not copy.is_file() or copy.read_text("utf-8") != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, "utf-8")


def _link(found: re.Match[str], folder: Path, pages: set[Path]) -> str:
    """A link of a page of the repository, as its copy or a page of the site has it."""
    picture, text, address = found.groups()
    path, _, anchor = address.partition("#")
    if not path or re.match(r"\w+:", path):
        return found[0]
    file = (folder / path).resolve()
    copied = HERE / "repository" / folder.relative_to(ROOT)
    anchor = f"#{anchor}" if anchor else ""
    if picture:
        place = HERE / "repository" / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
        return found[0]
    if file.is_dir() and (file / "README.md") in pages:
        file = file / "README.md"
    if file in pages:
        place = HERE / "repository" / file.relative_to(ROOT)
    elif file.is_relative_to(HERE) and file.suffix in (".md", ".rst"):
        place = file
    else:
        return _of_repository(text, file)
    return f"[{text}]({os.path.relpath(place, copied)}{anchor})"


def _of_repository(text: str, file: Path) -> str:
    """A link to a file that is no page."""
    path = file.relative_to(ROOT)
    return f"[{text}]({REPOSITORY}/blob/main/{path})" if REPOSITORY else text


def _files(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the pages below, and leads links out of docs/ to copies or the repository.

    In the source they are relative, so that they work where the Markdown is read.
    """
    if name.startswith("repository/"):
        return
    pages = {page for pattern in MIRRORED for page in ROOT.glob(pattern)}

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found.groups()
        file = (HERE / path).resolve()
        if file in pages:
            return f"[{text}](repository/{file.relative_to(ROOT)}{anchor or ''})"
        return _of_repository(text, file)

    if pages_below := CHILDREN.get(name):
        entries = "\n".join(pages_below)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]*)(#[^)]*)?\)", link, source[0])


def _card(
    app: Sphinx, name: str, template: str, context: dict[str, Any], *_: object
) -> None:
    """Names the picture that other sites show with a link to the first page."""
    if html_baseurl and name == "index":
        card = f"{html_baseurl}_static/card.png"
        context["metatags"] += (
            f'<meta property="og:title" content="{project}" />'
            f'<meta property="og:image" content="{card}" />'
            '<meta name="twitter:card" content="summary_large_image" />'
        )


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", _card)
    app.connect("builder-inited", _mirror)
    app.connect("source-read", _files)
    app.connect("autodoc-process-signature", _signature)
    app.connect("missing-reference", _resolve)
