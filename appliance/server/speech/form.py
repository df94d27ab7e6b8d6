"""Multipart forms: from the body of a request to a file and its validated fields. Every fault is a 400 that names the
field, or a 413 for a file that is too large."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from appliance.server.errors.api import BadRequest, InvalidBody, TooLarge
from appliance.server.http.body import RequestBody, schema_of
from appliance.server.http.fields import read_fields
from appliance.server.http.service import Service

Schema = TypeVar("Schema", bound=BaseModel)

FILE = "file"
MAX_FIELDS = 64
MAX_FIELD = 2**16  # bytes of a field that is not a file


async def read_form(service: Service, request: Request, schema: type[Schema]) -> tuple[Schema, bytes]:
    """Return the fields of a form and the contents of its file. Raise InvalidBody, BadRequest or TooLarge."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidBody("Unsupported Media Type: Only 'multipart/form-data' is allowed", "content-type")
    try:
        async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD) as form:
            data = await _file(form, service.config.limits.max_audio_file)
            values = _values(form, schema)
    except HTTPException as error:
        raise InvalidBody(f"The form cannot be read: {error.detail}", "body") from error
    read_fields(values, schema, service.config.endpoints.unknown_fields, service.unknown_fields)
    try:
        return schema.model_validate(values), data
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "body"
        raise BadRequest(f"{name}: {first['msg']}.", name) from None


async def _file(form: FormData, limit: int) -> bytes:
    file = form.get(FILE)
    if file is None:
        raise BadRequest("file is missing. Send an audio file as the field `file` of the form.", FILE)
    if not isinstance(file, UploadFile):
        raise BadRequest("file must be an uploaded file with a file name, not a text.", FILE)
    if file.size is not None and file.size > limit:
        raise FileTooLarge(limit)
    return await file.read()


def _values(form: FormData, schema: type[BaseModel]) -> dict[str, Any]:
    """Return the fields by name. A name that ends with [] is a list; of other repeated names, the last one counts."""
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name == FILE:
            continue
        if isinstance(value, UploadFile):
            raise BadRequest(f"{name[:64]} is a file; the only file of this form is `file`.", name[:64])
        if name.endswith("[]"):
            values.setdefault(name.removesuffix("[]"), []).append(value)
        elif name == "timestamp_granularities":
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return values


class FileTooLarge(TooLarge):
    """The file exceeds limits.max_audio_file."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.message = f"The audio file is larger than {limit} bytes, the server's limits.max_audio_file."
        self.param = FILE


def form_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads this form."""

    def described() -> dict[str, Any]:
        found = schema_of(schema)
        properties = {FILE: {"type": "string", "format": "binary"}, **found.pop("properties", {})}
        return {**found, "properties": properties, "required": [FILE]}

    return RequestBody("multipart/form-data", described)
