"""Types of the values of a manifest: quantities with units, `auto`, names; and the base class of its sections."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from appliance.config.sections.docstrings import field_docstrings

SIZES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_DURATIONS: dict[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _quantity(value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a quantity such as {example}")
    if isinstance(value, int | float):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2] not in units:
        raise ValueError(f"must be a number with a unit of {', '.join(units)}, such as {example}")
    return float(match[1]) * units[match[2]]


def _bytes(value: Any) -> int:
    size = _quantity(value, SIZES, "8GiB")
    if size < 1 or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("must be at least 1 byte, and a whole number of bytes without a unit")
    return int(size)


def _bytes_or_auto(value: Any) -> int | str:
    return "auto" if value == "auto" else _bytes(value)


def _text(value: Any) -> Any:
    """Convert an unquoted integer to text."""
    return str(value) if type(value) is int else value


def _seconds(value: Any) -> float:
    return float(_quantity(value, _DURATIONS, "30s"))


def _seconds_or_auto(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    seconds = _seconds(value)
    if seconds < 0:
        raise ValueError("must be at least 0")
    return seconds


def integer_text(value: Any) -> Any:
    """Return the integer that a flag or a variable spells, else the value itself."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _either(units: Mapping[str, float], minimum: int, *words: str) -> Any:
    text = {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({'|'.join(units)})\s*$"}
    number = {"type": "integer" if units is SIZES else "number", "minimum": minimum}
    options = [*({"const": word, "type": "string"} for word in words), text, number]
    return WithJsonSchema({"anyOf": options, "format": "size" if units is SIZES else "duration"}, mode="validation")


Bytes = Annotated[int, BeforeValidator(_bytes), _either(SIZES, 1)]
BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_bytes_or_auto), _either(SIZES, 1, "auto")]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0), _either(_DURATIONS, 0)]
SecondsOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_seconds_or_auto), _either(_DURATIONS, 0, "auto")]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CpuList = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"), BeforeValidator(_text)]
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def without_titles(schema: dict[str, Any]) -> None:
    """Remove titles that only repeat the name of the key from the JSON Schema of a section."""
    for node in schema.get("properties", {}).values():
        node.pop("title", None)


class Section(BaseModel):
    """A section of the manifest: frozen, with the declared keys only."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_extra=without_titles,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema with the docstrings of the fields as descriptions."""
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in field_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return made
