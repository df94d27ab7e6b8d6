"""Limits of requests and of the service: `limits`."""

from typing import Annotated

from pydantic import Field

from appliance.config.key import LIVE, LIVE_OUTPUTS, Limit, declare
from appliance.config.sections.values import Bytes, Count, Seconds, Section


class PerKey(Section):
    requests_per_minute: Count | None = declare(None, effect=LIVE, example=600)
    """Requests per minute of an API key; further ones get 429 with Retry-After."""
    tokens_per_minute: Count | None = declare(None, effect=LIVE, example=400000)
    """Computed prompt and reply tokens per minute of an API key; further requests get 429."""


class Limits(Section):
    max_waiting: Annotated[int, Field(ge=0)] = declare(
        1024,
        effect=LIVE,
        aliases={"SGLang": "max_queued_requests", "synonyms": ("max_num_queued_reqs", "max_queue")},
        clients=Limit("more requests get 503 under load"),
        example=256,
    )
    """Maximum requests that wait for the engine; further ones get 503 with Retry-After."""
    max_waiting_tokens: Count | None = declare(
        None,
        effect=LIVE,
        aliases={"synonyms": "max_num_queued_tokens"},
        clients=Limit("more requests get 503 under load"),
        example=400000,
    )
    """Maximum prompt tokens of requests without a first token; further requests get 503 with Retry-After."""
    max_body: Bytes = declare(
        32 * 2**20,
        effect=LIVE,
        aliases={"TGI": "payload_limit"},
        clients=Limit("larger bodies get 413"),
        example="1MiB",
    )
    """Maximum size of a request body; larger ones get 413."""
    max_audio_file: Bytes = declare(
        25 * 2**20,
        effect=LIVE,
        clients=Limit("larger audio files get 413"),
        example="10MiB",
    )
    """Maximum size of an audio file; larger ones get 413. limits.max_body must have room for it."""
    max_audio_seconds: Annotated[Seconds, Field(gt=0)] = declare(
        3600.0,
        effect=LIVE,
        clients=Limit("longer recordings get 400"),
        example="10m",
    )
    """Maximum duration of a recording; longer ones get 400."""
    max_output_tokens: Count | None = declare(
        None,
        effect=LIVE_OUTPUTS,
        clients=Limit("longer replies are cut"),
        example=4096,
    )
    """Maximum tokens of a reply, regardless of the request."""
    max_choices: Count = declare(
        128,
        effect=LIVE,
        aliases={"TGI": "max_best_of"},
        clients=Limit("a larger n gets 400"),
        example=4,
    )
    """Maximum n of a request."""
    max_prompts: Count = declare(1024, effect=LIVE, clients=Limit("more prompts in a request get 400"), example=16)
    """Maximum prompts in one completions request."""
    max_logprobs: Annotated[int, Field(ge=-1)] = declare(
        20, effect=LIVE, clients=Limit("requests for more get 400"), examples=(5, -1)
    )
    """Maximum logprobs per token in a request; -1 permits the complete vocabulary."""
    max_stop: Count = declare(
        16,
        effect=LIVE,
        aliases={"TGI": "max_stop_sequences"},
        clients=Limit("more stop strings get 400"),
        example=4,
    )
    """Maximum stop strings in one request."""
    per_key: PerKey = PerKey()
    """Limits of API keys without their own limits in the list of keys."""
    grammar_size: Bytes = declare(
        256 * 2**10,
        effect=LIVE,
        clients=Limit("larger schemas and grammars get 400"),
        example="1MiB",
    )
    """Maximum size of a schema, expression or grammar of structured output or tools; larger ones get 400."""
    grammar_time: Annotated[Seconds, Field(gt=0)] = declare(
        5.0,
        effect=LIVE,
        clients=Limit("schemas and grammars that take longer to compile get 400"),
        example="2s",
    )
    """Time limit of the compilation of one; the request gets 400 beyond it."""
    grammar_memory: Bytes = declare(
        512 * 2**20,
        effect=LIVE,
        clients=Limit("schemas and grammars that take more memory to compile get 400"),
        example="256MiB",
    )
    """Memory limit of the compilation of one; the request gets 400 beyond it."""
