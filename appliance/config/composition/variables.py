"""Resolution of `variables`, which may refer to the environment and to each other in any order."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.config.composition.interpolate import MAX_WHOLE, Names, Part, Reference, Unreadable, join, parse, written
from appliance.config.document import is_secret_variable
from appliance.config.merge import at, fault
from appliance.config.yaml_loader import Fault, Interpolated, Tree

PATTERN = r"[a-z][a-z0-9_]*"
MAX_CHAIN = 50  # maximum length of a chain of variables that refer to each other


def resolve(tree: Tree, environ: Mapping[str, str]) -> tuple[Names, list[Fault]]:
    """Return the names available to interpolation, and the faults in the tree's `variables`."""
    given = tree.value.get("variables", {})
    if not isinstance(given, dict):
        what = "must be a mapping of names to values"
        return Names(environ, {}), [fault(tree, ("variables",), what, code="wrong-value")]
    work = _Resolver(tree, environ)
    for name, value in given.items():
        work.check(name, value)
    for name in given:
        work.resolve(name, ())
    return Names(environ, work.values, frozenset(work.broken), work.written, _shared(tree)), work.faults


_NAMED = re.compile(r"\$\{var\.([a-z][a-z0-9_]*)")


def _shared(tree: Tree) -> frozenset[str]:
    """Return the variables that more than one text refers to."""
    texts = (text for path in tree.dollars if isinstance(text := at(tree, path), str))
    count = Counter(name for text in texts for name in _NAMED.findall(text))
    return frozenset(name for name, times in count.items() if times > 1)


class _Resolver:
    """Values resolved so far. A variable in `broken` has a fault, or refers to a variable that has one."""

    def __init__(self, tree: Tree, environ: Mapping[str, str]) -> None:
        self._tree = tree
        self._environ = environ
        self.values: dict[str, Any] = {}
        self.written: dict[str, Interpolated] = {}
        self.broken: set[str] = {str(f.path[1]) for f in tree.faults if f.path[:1] == ("variables",) and f.path[1:]}
        self.faults: list[Fault] = []
        self._size = 0

    def check(self, name: str, value: Any) -> None:
        path = ("variables", name)
        if not re.fullmatch(PATTERN, name):
            what = f"not a name for a variable; must match ^{PATTERN}$"
            self._break(name, Fault(path, self._tree.keys[path], what, code="wrong-layer"))
        elif is_secret_variable(name):
            what = "has the name of a secret, and secrets cannot be values"
            hint = "name it below secrets, as in secrets: {name: {file: path}}"
            self._break(name, Fault(path, self._tree.keys[path], what, (), hint, "literal-secret"))
        elif value is None or isinstance(value, dict | list):
            kind = "empty" if value is None else "a list" if isinstance(value, list) else "a mapping"
            what = f"{kind}; must be text, a number, true or false"
            self._break(name, fault(self._tree, path, what, code="wrong-value"))

    def _break(self, name: str, why: Fault) -> None:
        self.faults.append(why)
        self.broken.add(name)

    def resolve(self, name: str, chain: tuple[str, ...]) -> None:
        """Resolve one variable after those that it refers to. `chain` are the variables being resolved, to detect
        cycles.
        """
        if name in self.values or name in self.broken:
            return
        path, value = ("variables", name), self._tree.value["variables"][name]
        if path not in self._tree.dollars:
            self.values[name], self.written[name] = value, Interpolated(str(value), self._tree.values[path])
            return
        try:
            parts = parse(value)
            for reference in _variables_in(parts):
                self._first(reference, (*chain, name))
            names = Names(self._environ, self.values, frozenset(self.broken), self.written)
            self.values[name] = self._bounded(join(parts, names))
            self.written[name] = written(value, parts, names, self._tree.values[path])
        except Unreadable as error:
            self.broken.add(name)
            if error.message:
                self.faults.append(error.fault(path, self._tree.dollars[path]))

    def _bounded(self, value: Any) -> Any:
        self._size += len(str(value))
        if self._size > MAX_WHOLE:
            raise Unreadable(0, f"all variables together have more than {MAX_WHOLE:,} characters", code="wrong-layer")
        return value

    def _first(self, reference: Reference, chain: tuple[str, ...]) -> None:
        name = reference.name.removeprefix("var.")
        if len(chain) > MAX_CHAIN:
            what = f"more than {MAX_CHAIN} nested variables"
            raise Unreadable(reference.dollar, what, code="wrong-layer")
        if name in chain:
            circle = " → ".join((*chain[chain.index(name) :], name))
            raise Unreadable(reference.dollar, f"{reference.text} refers to itself: {circle}", code="wrong-layer")
        if name in self._tree.value["variables"]:
            self.resolve(name, chain)


def _variables_in(parts: tuple[Part, ...]) -> Iterator[Reference]:
    for part in parts:
        if isinstance(part, Reference):
            if part.name.startswith("var."):
                yield part
            yield from _variables_in(part.default or ())
