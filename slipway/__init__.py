"""Offline inference in Python: `from slipway import LLM, AsyncLLM, Params` (docs/library.md)."""

from typing import Any

_NAMES = {
    "LLM": "slipway.llm",
    "AsyncLLM": "engine.async_llm",
    "BeamParams": "engine.beam_search",
    "Generation": "engine.llm",
    "Params": "engine.llm",
}


def __getattr__(name: str) -> Any:
    """Import a class on first use, because its module loads torch."""
    from importlib import import_module

    if name not in _NAMES:
        raise AttributeError(f"module 'slipway' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
