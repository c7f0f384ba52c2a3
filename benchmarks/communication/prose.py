"""Another text than source code: the English of the standard library's docstrings."""

import ast
import tempfile
from pathlib import Path

import data


def load() -> data.Corpus:
    """The docstrings of every file of the library, some two million bytes.

    Returns:
        The corpus; a file's docstrings are one text, so that no file is in both parts.
    """
    with tempfile.TemporaryDirectory() as directory:
        for file in data.library_files():
            if found := docstrings(file.read_bytes()):
                name = ".".join(file.relative_to(data.LIBRARY).parts)
                Path(directory, name).write_text("\n\n".join(found))
        return data.load(directory)


def docstrings(source: bytes) -> list[str]:
    """All docstrings of a module, its own first.

    Examples:
        >>> docstrings(b"'''A module.'''" + b"\\ndef f():\\n    '''A function.'''")
        ['A module.', 'A function.']
    """
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)
    )
    return [text for node in nodes if (text := ast.get_docstring(node))]
