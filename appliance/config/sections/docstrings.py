"""Docstrings of the fields of a class: the strings below them in its file.

pydantic's `use_attribute_docstrings` reads them when a class is created, which takes 0.1 s of the start of each process
that imports the manifest. This module reads them only for the JSON Schema, and each file once.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases by name."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        file = getattr(sys.modules.get(one.__module__), "__file__", None)
        if file is not None and one.__module__.partition(".")[0] not in ("pydantic", "builtins"):
            found |= _docstrings(file).get(one.__qualname__, {})
    return found


@cache
def _docstrings(file: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields in a file by class and name."""
    with open(file, encoding="utf-8") as source:
        return dict(_classes(ast.parse(source.read()).body, ""))


def _classes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, dict(_fields(node.body))
            yield from _classes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _classes(node.body, f"{prefix}{node.name}.<locals>.")


def _fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in zip(body, body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                yield name, inspect.cleandoc(docstring)
