"""One entry of the tables: a field that a route's schema does not have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Body = Mapping[str, Any]
ANY: tuple[Any, ...] = (object(),)
"""`neutral` of a field that has no effect by itself, such as the parameter of a disabled sampler."""


@dataclass(frozen=True)
class Field:
    """A field is accepted without effect, read as another field, or rejected. Null is always accepted."""

    reason: str = ""
    """Why values other than the neutral ones are rejected, as a sentence that names an alternative."""

    neutral: tuple[Any, ...] = ()
    """Values without an effect, or `ANY`."""

    same_as: str = ""
    """Another field of the request, whose value is neutral as well."""

    alias: str = ""
    """The field as which it is read; `a.b` is member `b` of `a`."""

    convert: Callable[[Any], dict[str, Any]] | None = None
    """Returns the fields as which it is read, by name in the form of `alias`. Raises ValueError for a wrong value."""

    error_code: str = ""
    """Error code of the rejection, in the details of the error, for clients that branch on it."""

    def is_neutral(self, value: Any, body: Body) -> bool:
        if value is None or self.neutral is ANY:
            return True
        if self.same_as and value == body.get(self.same_as):
            return True
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)


def refused(reason: str, *neutral: Any) -> Field:
    return Field(reason, neutral)


def read_as(alias: str, *neutral: Any) -> Field:
    return Field(alias=alias, neutral=neutral)


LABEL = Field(neutral=ANY)
"""A field without influence on the output, such as user names, cache hints or timings."""
