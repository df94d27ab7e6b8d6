"""Text for the effect of a key: short for tables, sentences for `slipway explain`."""

from appliance.config.effects import Effect

_RESTART = {
    "none": ("nothing", "No program starts again for it."),
    "gateway": ("gateway", "The gateway must start again for it; engines need not."),
    "engine": ("engines", "The engines must start again for it; the gateway need not."),
    "service": ("all", "The whole service must start again for it."),
}
_LIVE = ("reload", "No program starts again for it: `slipway reload` makes it take effect.")
_OUTPUTS = {
    "yes": ("outputs", "The same request may get another reply."),
    "rounding": (
        "rounding",
        "Sums may be rounded in another order, which can tip a close choice of a token; not on compiled kernels of a "
        "CPU, nor with hardware.batch_invariant.",
    ),
}
_CACHES = {
    "weights": ("weights", "Weights that were rounded and kept no longer fit: they are rounded anew."),
    "prefix": ("prefixes", "Blocks of prefixes that were kept no longer fit."),
}
_GRAPHS = ("graphs", "Kernels may be compiled anew, and other CUDA graphs are captured.")
_MEMORY = ("memory", "Bytes move: `slipway plan` shows where.")


def _told(effect: Effect) -> list[tuple[str, str]]:
    parts = [_LIVE if effect.live else _RESTART[effect.restart]]
    parts += [_OUTPUTS[effect.outputs]] if effect.outputs in _OUTPUTS else []
    parts += [_CACHES[cache] for cache in effect.caches]
    parts += [_GRAPHS] if effect.graphs else []
    parts += [_MEMORY] if effect.memory else []
    return parts


def in_short(effect: Effect) -> str:
    """Return a short text such as `engines; outputs, memory`: the restart, then other effects."""
    restart, *rest = (short for short, _ in _told(effect))
    return f"{restart}; {', '.join(rest)}" if rest else restart


def in_sentences(effect: Effect) -> list[str]:
    return [sentence for _, sentence in _told(effect)]
