"""Request bodies: from bytes to a validated schema.

Every fault is a 400 that names the field (ER-01, 02, 03, 19, 20, 21).
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from appliance.server.errors.api import ApiError, BadRequest, InvalidBody
from appliance.server.http.counts import check_counts
from appliance.server.http.fields import read_fields
from appliance.server.http.service import Service, service_of
from appliance.server.schema.numbers import TEXT_NUMBERS

if TYPE_CHECKING:
    from _collections_abc import dict_items

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""Header of Amazon SageMaker that names the adapter, in place of the field `model`."""
LARGE = 2**14  # size from which parsing a body takes longer than starting a thread
MAX_ENTRIES = 10
MAX_ENTRY = 1000
MAX_INPUT = 200


async def read_json(request: Request) -> bytes:
    """Return the body of a request with a JSON content type. Raise InvalidBody for another content type."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidBody("Unsupported Media Type: Only 'application/json' is allowed", "content-type")
    return await request.body()


async def read_body(request: Request, schema: type[Schema]) -> Schema:
    """Return the request's JSON body as `schema`.

    Raise InvalidBody, or BadRequest if a validator names its `param` or a field outside the schema is rejected.
    """
    return await parse_body(await read_json(request), schema, service_of(request), request)


async def parse_body(body: bytes, schema: type[Schema], service: Service, request: Request | None = None) -> Schema:
    """Return a JSON body as `schema`. Raise the same errors as read_body.

    A header of `request` may name the adapter. An adapter that the body names is loaded if the manifest allows it.
    """
    parsed: Schema = await apart(len(body), _parsed_body, body, schema, service)
    if "model" in schema.model_fields:
        model = None if request is None else request.headers.get(ADAPTER)
        if model:
            parsed = parsed.model_copy(update={"model": model})
        await service.adapters.load_named(parsed.model)  # type: ignore[attr-defined]  # a field of this schema
    return parsed


async def apart(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of `work` on a body of `size` bytes, in a thread if the body is large."""
    return work(*arguments) if size < LARGE else await asyncio.to_thread(work, *arguments)


def _parsed_body(body: bytes, schema: type[Schema], service: Service) -> Schema:
    config = service.config
    try:
        value = _object(body)
        if value is None:
            return schema.model_validate_json(body)  # raises a ValidationError that describes the fault
        check_counts(value, len(body))
        read_fields(value, schema, config.endpoints.unknown_fields, service.unknown_fields)
        return schema.model_validate(value, context={TEXT_NUMBERS: config.endpoints.compat == "vllm"})
    except ValidationError as error:
        raise _invalid(error, body) from None


def _object(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body, or None for anything else."""
    try:
        value = from_json(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class RequestBody(dict[str, Any]):
    """An `openapi_extra` whose JSON Schema is made when it is read: FastAPI does so for the first /openapi.json. Making
    the schemas of all routes takes 0.15 s, which the start should not wait for."""

    def __init__(self, media_type: str, schema: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(requestBody={})  # FastAPI ignores an empty dict
        self._media_type, self._schema = media_type, schema

    def items(self) -> "dict_items[str, Any]":
        body = {"required": True, "content": {self._media_type: {"schema": dict(self._schema())}}}
        return {"requestBody": body}.items()

    def __getitem__(self, name: str) -> Any:
        return dict(self.items())[name]


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a body. docs.py moves the definitions to the components."""
    return model.model_json_schema(ref_template="#/components/schemas/{model}")


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads this body."""
    return RequestBody("application/json", lambda: schema_of(schema))


def _invalid(error: ValidationError, body: bytes) -> ApiError:
    details = error.errors(include_url=False)
    first = details[0]
    named = first.get("ctx", {}).get("param")
    if named is not None:
        return BadRequest(first["msg"], str(named))
    value = _parsed(body)
    entries = [_entry(detail, value) for detail in details[:MAX_ENTRIES]]
    if len(details) > MAX_ENTRIES:
        entries.append(f"… and {len(details) - MAX_ENTRIES} more")
    count = f"{len(details)} validation error{'s' if len(details) > 1 else ''}:"
    return InvalidBody("\n".join([count, *entries]), _path(first, value))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _path(detail: ErrorDetails, value: Any) -> str:
    """Return the dotted path as the client wrote it, without pydantic's names of union branches and validators."""
    parts = ["body"]
    for at, part in enumerate(detail["loc"]):
        if _is_key(part, value):
            value = value[part]
        elif detail["type"] != "missing" or at + 1 < len(detail["loc"]):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _is_key(part: str | int, value: Any) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _entry(detail: ErrorDetails, value: Any) -> str:
    shown = _shortened(repr(detail["input"]), MAX_INPUT)
    line = f"  {_path(detail, value)}: {detail['msg']} [type={detail['type']}, input={shown}]"
    return _shortened(line, MAX_ENTRY)


def _shortened(text: str, limit: int) -> str:
    # A lone surrogate cannot be encoded, so it is shown as its escape.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
