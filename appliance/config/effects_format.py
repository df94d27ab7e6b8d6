"""Text for the effect of a key: short for tables, sentences for `slipway explain`."""

from appliance.config.key import Effect

_RESTART = {
    "none": ("nothing", "No program restarts."),
    "gateway": ("gateway", "The gateway must restart; engines keep running."),
    "engine": ("engines", "The engines must restart; the gateway keeps running."),
    "service": ("all", "The whole service must restart."),
}
_LIVE = ("reload", "No restart: `slipway reload` applies it.")
_OUTPUTS = {
    "yes": ("outputs", "The same request may get another reply."),
    "rounding": (
        "rounding",
        "The order of sums may change, which can change a token when two are almost equally likely; not on compiled "
        "kernels of a CPU, nor with hardware.batch_invariant.",
    ),
}
_CACHES = {
    "weights": ("weights", "Cached quantized weights no longer match: they are quantized again."),
    "prefix": ("prefixes", "The prefix cache is empty after it."),
}
_GRAPHS = ("graphs", "Kernels may be compiled again, and CUDA graphs are captured again.")
_MEMORY = ("memory", "Memory use changes: `slipway plan` shows the bytes.")


def _descriptions(effect: Effect) -> list[tuple[str, str]]:
    parts = [_LIVE if effect.live else _RESTART[effect.restart]]
    parts += [_OUTPUTS[effect.outputs]] if effect.outputs in _OUTPUTS else []
    parts += [_CACHES[cache] for cache in effect.caches]
    parts += [_GRAPHS] if effect.graphs else []
    parts += [_MEMORY] if effect.memory else []
    return parts


def in_short(effect: Effect) -> str:
    """Return a short text such as `engines; outputs, memory`: the restart, then other effects."""
    restart, *rest = (short for short, _ in _descriptions(effect))
    return f"{restart}; {', '.join(rest)}" if rest else restart


def in_sentences(effect: Effect) -> list[str]:
    return [sentence for _, sentence in _descriptions(effect)]
