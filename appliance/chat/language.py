"""`response_format` and `structured_outputs` of a request to one `Language`, or none."""

import json
from typing import Any

from appliance.chat.format.constraint import Language, check_grammar, check_language
from appliance.schema.common import ResponseFormat, SamplingFields, StructuredOutputs
from engine.api.errors import RequestError

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ANY_OBJECT = {"type": "object"}


def _schema(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: the schema is no JSON: {error}", param) from error
    if not isinstance(parsed, dict):
        raise RequestError(f"{param}: the schema must be a JSON object", param)
    return parsed


def _from_outputs(outputs: StructuredOutputs) -> Language:
    param = "structured_outputs"
    given = {kind: getattr(outputs, "json_" if kind == "json" else kind) for kind in _KINDS}
    used = [kind for kind in _KINDS if given[kind] is not None and given[kind] is not False]
    names = ", ".join(_KINDS[:-1])
    if not used:
        raise RequestError(f"You must use one kind of structured output of {names}; none is given.", param)
    if len(used) > 1:
        message = f"You can only use one kind of structured output, but {', '.join(used)} are given."
        raise RequestError(message, param)
    kind = used[0]
    if kind == "json":
        return Language("json_schema", _schema(given["json"], param), param)
    if kind == "json_object":
        return Language("json_schema", _ANY_OBJECT, param)
    if kind == "regex":
        return Language("regex", given[kind], param)
    if kind == "choice":
        return Language("choice", given[kind], param)
    if kind == "grammar":
        return Language("grammar", given[kind], param)
    raise _no_structural_tags(param)


def _no_structural_tags(param: str) -> RequestError:
    return RequestError(f"{param}: structural tags are not supported; use a json schema, a regex or a grammar", param)


def _from_format(form: ResponseFormat) -> Language | None:
    param = "response_format"
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Language("json_schema", _ANY_OBJECT, param)
    if form.type == "structural_tag":
        raise _no_structural_tags(param)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise RequestError("response_format of type json_schema needs json_schema with a schema in it.", param)
    return Language("json_schema", form.json_schema.schema_, param)


def asked_language(request: SamplingFields) -> Language | None:
    """The language that the reply must stay in. Raises RequestError if there are several, or if it is none at all."""
    wanted = _from_format(request.response_format) if request.response_format else None
    if request.structured_outputs is not None:
        if wanted is not None:
            message = "You can only use one kind of structured output: response_format or structured_outputs."
            raise RequestError(message, "structured_outputs")
        wanted = _from_outputs(request.structured_outputs)
    if wanted is not None:
        check_language(wanted)
        check_grammar(wanted.grammar(), wanted.param)
    return wanted
