"""Fields that several APIs have in common: samplers of other servers, structured output under other names, adapters."""

from typing import Any, Final

from appliance.server.schema.fields.field import ANY, LABEL, Field, read_as, refused

Table = dict[str, Field]

_SAMPLER: Final = "the sampler is not implemented; leave the field out."

SAMPLERS: Final[Table] = {
    # llama.cpp, KoboldCpp, text-generation-webui, TabbyAPI: disabled at the neutral value
    "mirostat": refused(_SAMPLER, 0),
    "mirostat_mode": refused(_SAMPLER, 0),
    "typical_p": refused(_SAMPLER, 1, 0),
    "typical": refused(_SAMPLER, 1, 0),
    "tfs": refused(_SAMPLER, 1),
    "tfs_z": refused(_SAMPLER, 1),
    "top_a": refused(_SAMPLER, 0),
    "top_n_sigma": refused(_SAMPLER, -1, 0),
    "nsigma": refused(_SAMPLER, 0),
    "xtc_probability": refused(_SAMPLER, 0),
    "dry_multiplier": refused(_SAMPLER, 0),
    "dynatemp_range": refused(_SAMPLER, 0),
    "dynamic_temperature": refused(_SAMPLER, False),
    "smoothing_factor": refused(_SAMPLER, 0),
    "epsilon_cutoff": refused(_SAMPLER, 0),
    "eta_cutoff": refused(_SAMPLER, 0),
    "penalty_alpha": refused(_SAMPLER, 0),
    "no_repeat_ngram_size": refused(_SAMPLER, 0),
    "encoder_repetition_penalty": refused(_SAMPLER, 1),
    "guidance_scale": refused(_SAMPLER, 1),
    "cfg_scale": refused(_SAMPLER, 1),
    "negative_prompt": refused(_SAMPLER, ""),
    "temperature_last": refused("temperature is applied before top_k, top_p and min_p; leave the field out.", False),
    "min_keep": refused(_SAMPLER, 0),
    "repeat_penalty": refused("use repetition_penalty, which counts the whole prompt and reply.", 1),
    "repetition_penalty_range": refused("repetition_penalty counts the whole prompt and reply.", 0, -1),
    "rep_pen": refused("use repetition_penalty.", 1),
    "samplers": refused("the order of samplers is fixed (docs/http.md, Sampling); leave the field out.", [], ""),
    "sampler_order": refused("the order of samplers is fixed (docs/http.md, Sampling); leave the field out.", []),
    "sampler_priority": refused("the order of samplers is fixed (docs/http.md, Sampling); leave the field out.", []),
    "logits_processors": refused("custom logits processors are not supported.", []),
    "custom_logit_processor": refused("custom logits processors are not supported.", ""),
    "custom_params": refused("custom logits processors are not supported.", {}),
    "vllm_xargs": refused("custom logits processors are not supported.", {}),
    "stop_regex": refused("use stop with fixed strings.", [], ""),
    "no_stop_trim": refused("use include_stop_str_in_output.", False),
    "spaces_between_special_tokens": refused("special tokens are always separated by spaces.", True),
    # Parameters of disabled samplers
    "mirostat_tau": Field(neutral=ANY),
    "mirostat_eta": Field(neutral=ANY),
    "xtc_threshold": Field(neutral=ANY),
    "dry_base": Field(neutral=ANY),
    "dry_allowed_length": Field(neutral=ANY),
    "dry_penalty_last_n": Field(neutral=ANY),
    "dry_range": Field(neutral=ANY),
    "dry_sequence_breakers": Field(neutral=ANY),
    "dynatemp_low": Field(neutral=ANY),
    "dynatemp_high": Field(neutral=ANY),
    "dynatemp_exponent": Field(neutral=ANY),
    "smoothing_curve": Field(neutral=ANY),
    "length_penalty": Field(neutral=ANY),
    "early_stopping": Field(neutral=ANY),
}

STRUCTURED: Final[Table] = {
    # vLLM before structured_outputs
    "guided_json": read_as("structured_outputs.json"),
    "guided_regex": read_as("structured_outputs.regex"),
    "guided_choice": read_as("structured_outputs.choice"),
    "guided_grammar": read_as("structured_outputs.grammar"),
    "guided_json_object": read_as("structured_outputs.json_object", False),
    "guided_whitespace_pattern": read_as("structured_outputs.whitespace_pattern"),
    "guided_decoding_backend": refused("there is one backend; leave the field out.", "auto"),
    # SGLang; json_schema and grammar (GBNF) exist in llama.cpp too
    "json_schema": read_as("structured_outputs.json", ""),
    "regex": read_as("structured_outputs.regex", ""),
    "ebnf": read_as("structured_outputs.grammar", ""),
    "grammar": read_as("structured_outputs.grammar", ""),
    "structural_tag": read_as("structured_outputs.structural_tag", ""),
}

ADAPTERS: Final[Table] = {
    name: refused("name the adapter in `model`; GET /v1/models lists the adapters.", "", [])
    for name in ("lora_path", "lora_name", "lora_request", "adapter_id", "adapter_name", "lora")
}

TRANSFER: Final[Table] = {
    name: refused("KV caches are not transferred between servers.", {})
    for name in ("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
}

LENGTHS: Final[Table] = {
    "max_new_tokens": read_as("max_tokens"),
    "n_predict": read_as("max_tokens", -1),
    "min_new_tokens": read_as("min_tokens"),
    "sampling_seed": read_as("seed"),
}

LABELS: Final[Table] = dict.fromkeys(
    (
        *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "request_id", "rid", "session_id", "stream_interval", "cache_prompt", "id_slot"),
        *("timings_per_token", "return_progress", "inference_geo"),
    ),
    LABEL,
)

BEST_OF: Final = Field("the server generates exactly the choices that it returns. Use n.", (1,), same_as="n")


def thinking_switch(value: Any) -> dict[str, Any]:
    """Return `enable_thinking` as chat template variables; model families use two names for it."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return {"chat_template_kwargs.enable_thinking": value, "chat_template_kwargs.thinking": value}


def reasoning_options(value: Any) -> dict[str, Any]:
    """Return OpenRouter's `reasoning` object as fields of chat completions."""
    if not isinstance(value, dict):
        raise ValueError("must be an object with effort, enabled, exclude or max_tokens")
    known = {"effort": "reasoning_effort", "max_tokens": "thinking_token_budget"}
    if wrong := value.keys() - known.keys() - {"enabled", "exclude", "summary"}:
        raise ValueError(f"has unknown members: {', '.join(sorted(wrong))[:200]}")
    flags = {name: value.get(name) for name in ("enabled", "exclude")}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name} must be true or false")
    found = {field: value[name] for name, field in known.items() if value.get(name) is not None}
    if flags["enabled"] is False:
        found["reasoning_effort"] = "none"
    if flags["exclude"]:
        found["include_reasoning"] = False
    return found


def verbosity(value: Any) -> dict[str, Any]:
    """Return `verbosity` as a chat template variable."""
    if value not in ("low", "medium", "high"):
        raise ValueError("must be low, medium or high")
    return {"chat_template_kwargs.verbosity": value}
