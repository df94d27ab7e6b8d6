"""Scheduling, cache and sampling defaults: `engine`."""

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.key import ENGINE, LIVE_OUTPUTS, Effect, declare
from appliance.config.sections.values import Auto, Bytes, Section


class Scheduling(Section):
    max_running: Annotated[int, Field(ge=1, le=4096)] | Auto = declare(
        "auto",
        effect=Effect("engine", outputs="rounding", graphs=True, memory=True),
        target="engine.scheduling.max_running",
        aliases={
            "vLLM": "max_num_seqs",
            "SGLang": "max_running_requests",
            "TGI": "max_concurrent_requests",
            "llama.cpp": "n_parallel",
            "Ollama": "num_parallel",
            "DJL Serving": "max_rolling_batch_size",
            "KServe": "containerConcurrency",
            "synonyms": ("batch_size", "max_batch_size", "max_concurrency"),
        },
        examples=(16, 512),
    )
    """Maximum requests in one step; others wait. auto is 256, or fewer if their logits would fill the memory."""
    max_step_tokens: Annotated[int, Field(ge=1)] | Auto = declare(
        "auto",
        effect=Effect("engine", outputs="rounding", graphs=True, memory=True),
        target="engine.scheduling.max_step_tokens",
        aliases={
            "vLLM": "max_num_batched_tokens",
            "SGLang": "chunked_prefill_size",
            "TGI": "max_batch_prefill_tokens",
            "llama.cpp": "n_batch",
            "DJL Serving": "max_rolling_batch_prefill_tokens",
        },
        examples=(256, 16384),
    )
    """Maximum tokens in one step (longer prompts use chunked prefill); auto is 512 on a CPU, 8192 on a GPU."""
    max_media_tokens: Annotated[int, Field(ge=1)] = declare(
        1024,
        effect=Effect("engine", outputs="rounding", memory=True),
        target="engine.scheduling.max_media_tokens",
        aliases={"vLLM": "max_num_encoder_input_tokens"},
        example=4096,
    )
    """Maximum embeddings of images, videos and audio that the tower computes in one step. A single item with more is
    computed in one step too."""
    # the gateway uses it to estimate waiting times
    policy: Literal["fcfs", "priority", "fair"] = declare(
        "fcfs",
        effect=Effect("service", outputs="rounding"),
        target=("engine.scheduling.policy", "gateway.policy"),
        aliases={"vLLM": "scheduling_policy", "SGLang": "schedule_policy"},
    )
    """Order of requests for steps and KV blocks: fcfs is by arrival; priority is by the priority field (lower first),
    then arrival; fair is by API key with the fewest computed tokens, then arrival."""
    overlap: bool = declare(True, effect=Effect("engine", outputs="rounding"), target="engine.scheduling.overlap")
    """Plan the next step while the current one runs."""


class Cache(Section):
    block_tokens: Annotated[int, Field(ge=1, le=1024)] | Auto = declare(
        "auto",
        effect=Effect("engine", outputs="rounding", caches=("prefix",), graphs=True, memory=True),
        target="engine.cache.block_tokens",
        aliases={"vLLM": "block_size", "SGLang": "page_size"},
        example=32,
    )
    """Tokens in one block of the KV cache; auto is 16, the vector width of the compiled CPU kernels."""
    prefix: bool = declare(
        True,
        effect=Effect("engine", outputs="rounding"),
        target="engine.cache.prefix",
        aliases={
            "vLLM": "enable_prefix_caching",
            "NVIDIA NIM": "NIM_ENABLE_KV_CACHE_REUSE",
            "synonyms": "prefix_caching",
        },
    )
    """Prefix caching: reuse the KV cache blocks of equal prompt prefixes."""
    media: Bytes = declare(
        256 * 2**20,
        effect=Effect("engine", memory=True),
        aliases={"vLLM": "encoder_cache_size"},
        example="1GiB",
    )
    """Memory of embeddings of images, videos and audio that an engine keeps for further requests with them."""


class Sampling(Section):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = declare(
        None, effect=LIVE_OUTPUTS, affects="gateway.sampling.temperature", example=0.7
    )
    """Default temperature of requests."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = declare(
        None, effect=LIVE_OUTPUTS, affects="gateway.sampling.top_p", example=0.8
    )
    """Default top_p of requests."""
    top_k: Annotated[int, Field(ge=0)] | None = declare(
        None, effect=LIVE_OUTPUTS, affects="gateway.sampling.top_k", example=20
    )
    """Default top_k of requests; 0 disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = declare(
        None, effect=LIVE_OUTPUTS, affects="gateway.sampling.min_p", example=0.05
    )
    """Default min_p of requests."""
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = declare(
        None, effect=LIVE_OUTPUTS, affects="gateway.sampling.repetition_penalty", example=1.1
    )
    """Default repetition_penalty of requests."""


class Engine(Section):
    scheduling: Scheduling = Scheduling()
    """Scheduling of requests into steps."""
    cache: Cache = Cache()
    """Block size and sharing of the KV cache."""
    sampling: Sampling = Sampling()
    """Sampling defaults; they override the checkpoint's generation_config.json, and a request overrides them."""
    record: str | None = declare(None, effect=ENGINE, is_path=True, example="steps.jsonl")
    """File that records every scheduler event and decision, for `slipway replay` and `slipway whatif`."""
    record_size: Bytes = declare(256 * 2**20, effect=ENGINE, target="engine.record_size", example="64MiB")
    """Maximum size of a recording, half in the file and half in a second one named .1; old steps are dropped."""
    return_routed_experts: bool = declare(
        False,
        effect=Effect("service", graphs=True, memory=True),
        target="engine.return_routed_experts",
        affects="gateway.routed_experts",
        aliases={"vLLM": "enable_return_routed_experts", "SGLang": "enable_return_routed_experts"},
    )
    """Keep the selected experts of each step, so that a request may set return_routed_experts. Only for mixtures of
    experts."""
