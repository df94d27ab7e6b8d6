"""Declarations behave as `dataclass(frozen=True, kw_only=True)` makes them."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import pytest

from engine.models.declared import declared

DECORATORS = (declared, dataclass)


def make(decorate: Any) -> tuple[type, type, type]:
    @decorate(frozen=True, kw_only=True)
    class Several:
        """Of two fields."""

        default: int = 3
        required: Any

        @cached_property
        def twice(self) -> int:
            return 2 * self.default

    @decorate(frozen=True, kw_only=True)
    class Single:
        """Of one field."""

        only: Any

    @decorate(frozen=True, kw_only=True)
    class Empty:
        """Of no field."""

    return Several, Single, Empty


@declared(frozen=True, kw_only=True)
class Point:
    """A class that pickle finds."""

    x: int
    y: int = 5


@pytest.mark.parametrize("decorate", DECORATORS)
def test_values_are_compared_hashed_shown_and_replaced(decorate: Any) -> None:
    several, single, empty = make(decorate)
    one, same, other = several(required=(1,)), several(required=(1,), default=3), several(required=(1,), default=4)
    assert one == same != other and hash(one) == hash(same) and len({one, same, other}) == 2
    assert one != (3, (1,)) and single(only=1) != several(required=1) and single(only=1) == single(only=1)
    assert empty() == empty() and hash(empty()) == hash(empty()) == hash(())
    assert hash(one) == hash((3, (1,))) and hash(single(only=7)) == hash((7,))
    assert repr(one).endswith("Several(default=3, required=(1,))") and repr(empty()).endswith("Empty()")
    nested = single(only=[])
    nested.only.append(nested)
    assert repr(nested).endswith("Single(only=[...])")
    assert replace(one, default=4) == other and asdict(one) == {"default": 3, "required": (1,)}
    assert one.twice == 6 and copy.deepcopy(one) == one and is_dataclass(several)
    assert [(field.name, field.kw_only) for field in fields(several)] == [("default", True), ("required", True)]
    assert several.__match_args__ == () and several.default == 3
    match one:
        case several(default=3, required=found):
            assert found == (1,)
        case _:
            raise AssertionError("no match")


@pytest.mark.parametrize("decorate", DECORATORS)
def test_values_are_frozen_and_arguments_are_checked(decorate: Any) -> None:
    several, single, _ = make(decorate)
    one = several(required=1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'default'"):
        one.default = 4
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'required'"):
        del one.required
    with pytest.raises(FrozenInstanceError):
        one.more = 1
    for wrong in (lambda: several(), lambda: several(1), lambda: several(required=1, more=2), lambda: single(1)):
        with pytest.raises(TypeError, match=r"__init__\(\)"):
            wrong()
    with pytest.raises(TypeError, match="unhashable"):
        hash(several(required=[]))


def test_a_declaration_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Point(x=1))) == Point(x=1, y=5)
