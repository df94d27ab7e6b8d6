"""Fields of a body that its route's schema does not have: accepted, read as other fields, rejected or unknown."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from appliance.server.errors.api import BadRequest
from appliance.server.schema.fields.field import Field
from appliance.server.schema.fields.tables import table_of

Unknown = Literal["refuse", "warn", "ignore"]

MAX_REPORTED = 256  # number of distinct fields; more would fill the log and the memory
_SHOWN = 64  # characters of a name


class UnknownFields:
    """Reports each unknown field of a route once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._reported: set[tuple[str, str]] = set()

    def report(self, schema: type[BaseModel], name: str) -> None:
        key = (schema.__name__, name[:_SHOWN])
        if key in self._reported or len(self._reported) >= MAX_REPORTED:
            return
        self._reported.add(key)
        self._warn(f"{key[0]}: unknown field {key[1]!r} is ignored (endpoints.unknown_fields is warn)")


def read_fields(body: dict[str, Any], schema: type[BaseModel], unknown: Unknown, reports: UnknownFields) -> None:
    """Convert the fields of `body` to those of its schema.

    Raise BadRequest for a field that requests something unsupported, and for an unknown field if `unknown` is "refuse".
    """
    known = schema.model_fields.keys() | {field.alias for field in schema.model_fields.values() if field.alias}
    table = table_of(schema)
    for name in [name for name in body if name not in known]:
        field = table.get(name)
        if field is not None:
            _read(name, field, body)
        elif unknown == "refuse":
            message = (
                f"{name[:_SHOWN]!r} is not a field of this route. Remove it. (endpoints.unknown_fields is refuse.)"
            )
            raise BadRequest(message, name[:_SHOWN])
        elif unknown == "warn":
            reports.report(schema, name)


def _read(name: str, field: Field, body: dict[str, Any]) -> None:
    value = body.pop(name)
    if field.is_neutral(value, body):
        return
    if field.alias:
        _put(name, field.alias, value, body)
    elif field.convert is not None:
        try:
            found = field.convert(value)
        except ValueError as error:
            raise BadRequest(f"{name} {error}.", name) from None
        for target, each in found.items():
            _put(name, target, each, body)
    else:
        details = {"error_code": field.error_code} if field.error_code else None
        raise BadRequest(f"{name} is not supported: {field.reason}", name, details=details)


def _put(name: str, target: str, value: Any, body: dict[str, Any]) -> None:
    """Set a field, or a member of a field, to a value that was sent under another name."""
    outer, _, member = target.partition(".")
    given = body.get(outer)
    if member and given is not None and not isinstance(given, dict):
        return  # the schema rejects it
    if (given or {}).get(member) is not None if member else given is not None:
        raise BadRequest(f"{name} and {target} are the same field. Leave one of them out.", name)
    body[outer] = {**(given or {}), member: value} if member else value
