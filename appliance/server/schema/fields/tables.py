"""Field tables of each API.

A field that is neither in the schema nor in the table is unknown, and `endpoints.unknown_fields` determines its
handling.
"""

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel

from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.cohere import EmbedRequest
from appliance.server.schema.common import SamplingFields
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.fields.field import LABEL, Field, read_as, refused
from appliance.server.schema.fields.shared import (
    ADAPTERS,
    BEST_OF,
    LABELS,
    LENGTHS,
    SAMPLERS,
    STRUCTURED,
    TRANSFER,
    Table,
    reasoning_options,
    thinking_switch,
    verbosity,
)
from appliance.server.schema.messages import CountRequest, MessagesRequest
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from appliance.server.schema.responses import InputTokensRequest, ResponsesRequest
from appliance.server.schema.scoring import RerankRequest, ScoreRequest

_THREADS: Final = (
    "this server keeps no message threads. Send the full conversation without thread; The SDK does that by itself."
)
_TEXT_ONLY: Final = "the model generates only text."
_OLLAMA: Final = "it is a field of Ollama's API. Use the fields of this route."

_MEDIA: Final[Table] = {
    "modalities": refused(_TEXT_ONLY, ["text"], []),
    "audio": refused(_TEXT_ONLY),
    "web_search_options": refused("this server has no web search. Send a tool of your own."),
    "prediction": refused("predicted outputs are not used. Leave the field out; the reply is the same."),
    "mm_payload": refused("the model accepts only text."),
}
_GENERATION: Final[Table] = {**LABELS, **SAMPLERS, **ADAPTERS, **TRANSFER, **_MEDIA, "best_of": BEST_OF}
_MANY_STOPS: Final = refused("use stop.", [])

CHAT: Final[Table] = {
    **_GENERATION,
    **STRUCTURED,
    **LENGTHS,
    "store": refused("chat completions are not stored. Use /v1/responses.", False),
    "reasoning": Field(convert=reasoning_options),
    "enable_thinking": Field(convert=thinking_switch),
    "thinking_budget": read_as("thinking_token_budget"),
    "verbosity": Field(convert=verbosity),
    "separate_reasoning": refused("reasoning is always separate from content.", True),
    "stream_reasoning": refused("reasoning is always streamed.", True),
    "think": refused("use reasoning_effort.", False),
    "options": refused(_OLLAMA, {}),
    "format": refused("use response_format.", ""),
    "max_output_tokens": refused("use max_completion_tokens."),
    "stop_sequences": _MANY_STOPS,
    "system": refused("use a message with the role system.", ""),
    "instructions": refused("use a message with the role system.", ""),
}
COMPLETION: Final[Table] = {
    **_GENERATION,
    **STRUCTURED,
    **LENGTHS,
    "store": refused("completions are not stored. Use /v1/responses.", False),
    "max_completion_tokens": refused("use max_tokens."),
    "max_output_tokens": refused("use max_tokens."),
    "stop_sequences": _MANY_STOPS,
    "tools": refused("tools require chat messages. Use /v1/chat/completions.", []),
    "functions": refused("tools require chat messages. Use /v1/chat/completions.", []),
    "top_logprobs": refused("on this route, logprobs is the number of alternatives.", 0),
    **{
        name: refused("a chat template requires chat messages. Use /v1/chat/completions.")
        for name in ("enable_thinking", "reasoning", "reasoning_effort", "chat_template_kwargs", "verbosity")
    },
}


def _of_chat(schema: type[BaseModel]) -> Table:
    """Return chat sampling fields that a schema does not have. They are rejected unless they have their default."""
    reason = "it is a field of /v1/chat/completions, not of this route."
    return {
        name: refused(reason, field.get_default(), *((1,) if name in ("n", "repetition_penalty") else (0, [], {}, "")))
        for name, field in SamplingFields.model_fields.items()
        if name not in schema.model_fields
    }


_RESPONSE_LENGTH: Final = refused("use max_output_tokens.")
RESPONSES: Final[Table] = {
    **_GENERATION,
    **_of_chat(ResponsesRequest),
    **STRUCTURED,
    "prediction": _MEDIA["prediction"],
    "max_tokens": _RESPONSE_LENGTH,
    "max_completion_tokens": _RESPONSE_LENGTH,
    "max_new_tokens": _RESPONSE_LENGTH,
    "messages": refused("use input.", []),
    "response_format": refused("use text.format."),
    "reasoning_effort": refused("use reasoning.effort."),
    "enable_thinking": Field(convert=thinking_switch),
    "functions": refused("use tools.", []),
    "function_call": refused("use tool_choice.", "none"),
    "logprobs": refused('use include: ["message.output_text.logprobs"].', False),
    "enable_response_messages": refused("input and output messages are not returned.", False),
    "media_io_kwargs": refused("the model accepts only text.", {}),
    "mm_processor_kwargs": refused("the model accepts only text.", {}),
}
MESSAGES: Final[Table] = {
    **_GENERATION,
    **_of_chat(MessagesRequest),
    **{name: refused("use output_config.format.", *field.neutral) for name, field in STRUCTURED.items()},
    **dict.fromkeys(("cache_control", "diagnostics", "betas", "user_profile_id"), LABEL),
    "thread": Field(_THREADS, error_code="thread_unsupported_request"),
    "container": refused("this server does not run code.", {}),
    "context_management": refused(
        "the context is not edited. Shorten the conversation in the client.", {}, {"edits": []}
    ),
    "speed": refused("the speed cannot be selected. Leave the field out.", "standard"),
    "stop": refused("use stop_sequences.", [], ""),
    "max_completion_tokens": refused("use max_tokens."),
    "max_new_tokens": refused("use max_tokens."),
    "enable_thinking": refused('use thinking, {"type": "enabled", "budget_tokens": …} or {"type": "disabled"}.'),
    "reasoning_effort": refused("use output_config.effort."),
    "functions": refused("use tools.", []),
    "response_format": refused("use output_config.format.", {"type": "text"}),
    "structured_outputs": refused("use output_config.format."),
}
POOLING: Final[Table] = {
    **LABELS,
    **ADAPTERS,
    **TRANSFER,
    "softmax": refused("use use_activation."),
    "activation": refused("use use_activation."),
    "truncate": refused("use truncate_prompt_tokens.", False, "NONE"),
}
_CUT: Final = refused("the results of this route have no dimensions.")

_BY_SCHEMA: Final[tuple[tuple[type[BaseModel], Table], ...]] = (
    (ChatRequest, CHAT),
    (CompletionRequest, COMPLETION),
    (ResponsesRequest, RESPONSES),
    (InputTokensRequest, {**RESPONSES, **dict.fromkeys(ResponsesRequest.model_fields, LABEL)}),
    (MessagesRequest, MESSAGES),
    (CountRequest, {**MESSAGES, **dict.fromkeys(MessagesRequest.model_fields, LABEL)}),
    (EmbeddingRequest, POOLING),
    (PoolingRequest, POOLING),
    (ClassifyRequest, {**POOLING, "dimensions": _CUT}),
    (ScoreRequest, {**POOLING, "dimensions": _CUT}),
    (RerankRequest, {**POOLING, "dimensions": _CUT}),
    (EmbedRequest, POOLING),
)
TABLES: Final[Mapping[type[BaseModel], Mapping[str, Field]]] = {
    schema: {name: field for name, field in table.items() if name not in schema.model_fields}
    for schema, table in _BY_SCHEMA
}
"""Tables by schema, without the fields of the schema itself."""


def table_of(schema: type[BaseModel]) -> Mapping[str, Field]:
    """The table of a schema, empty for one without."""
    return TABLES.get(schema, {})
