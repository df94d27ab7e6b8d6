"""Decorator of declarations: a frozen, keyword-only dataclass, whose class is made in a fifth of the time.

`dataclasses.dataclass` compiles six functions for each frozen class. For the 146 classes of engine/models/parts and
engine/lowering/operations that was 0.2 s of CPU time in every program that reads a model. Here all classes share the
code of their methods, and take 0.04 s.
"""

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["declared"]

if TYPE_CHECKING:
    from dataclasses import dataclass as declared
else:

    def declared(*, frozen: bool, kw_only: bool) -> Callable[[type], type]:
        """Return a decorator that has the effect of `dataclass(frozen=True, kw_only=True)`. Defaults are values."""
        assert frozen and kw_only, "declarations are frozen and have no positional arguments"
        return _make


def _make(cls: type) -> type:
    dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
    names = [one.name for one in fields(cls)]
    defaults = {one.name: one.default for one in fields(cls) if one.default is not MISSING}
    known, required = frozenset(names), frozenset(names) - defaults.keys()

    def __init__(self: Any, /, **values: Any) -> None:
        if not (known.issuperset(values) and required.issubset(values)):
            wrong = sorted(values.keys() - known) or sorted(required - values.keys())
            what = "got an unexpected" if values.keys() - known else "misses a"
            raise TypeError(f"{cls.__qualname__}.__init__() {what} keyword argument {wrong[0]!r}")
        self.__dict__.update(defaults, **values)

    read: Callable[[Any], tuple[Any, ...]]
    read = attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)

    def __eq__(self: Any, other: Any) -> Any:
        return read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(read(self))

    @recursive_repr("...")
    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({shown})"

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    methods = {"__init__": __init__, "__eq__": __eq__, "__hash__": __hash__, "__repr__": __repr__}
    for name, method in methods.items():
        setattr(cls, name, method)
    cls.__setattr__, cls.__delattr__ = _refuse_to_assign, _refuse_to_delete  # type: ignore[assignment,method-assign]
    return cls


def _refuse_to_assign(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
