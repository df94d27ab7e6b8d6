"""Configuration of the part of Qwen-Omni that reads media and replies with text, the thinker.

Complete checkpoints have a talker too, which generates speech, and which is not read.
"""

from typing import Any

QWEN2_5_OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
QWEN3_OMNI = "Qwen3OmniMoeThinkerForConditionalGeneration"
THINKERS = {
    **dict.fromkeys(("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel", QWEN2_5_OMNI), QWEN2_5_OMNI),
    **dict.fromkeys(("Qwen3OmniMoeForConditionalGeneration", QWEN3_OMNI), QWEN3_OMNI),
}
"""Architecture of the thinker, by the architecture in config.json."""


def thinker_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the part that replies with text, or the same one for other models."""
    names = config.get("architectures")
    known = [THINKERS[str(name)] for name in names if str(name) in THINKERS] if isinstance(names, list) else []
    if not known:
        return config
    inner = config.get("thinker_config")
    inner = inner if isinstance(inner, dict) else config
    dtypes = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    text, tied = inner.get("text_config"), {"tie_word_embeddings": inner.get("tie_word_embeddings", False)}
    # Exporters write the default of the text model, which has no head of its own.
    texts = {"text_config": {**text, **tied}} if isinstance(text, dict) else {}
    return {**inner, **dtypes, **texts, "architectures": known[:1]}
