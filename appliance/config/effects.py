"""Effects of a change, by key: restarts, outputs, caches, CUDA graphs and memory."""

from functools import cache

from appliance.config.key import NO_EFFECT, Effect
from appliance.config.keys import metadata


@cache
def effects() -> dict[str, Effect]:
    """Return the effect of each key (Key.name). Variables take effect through the keys that use them."""
    return {**{name: declared.effect for name, declared in metadata().items()}, "variables.*": NO_EFFECT}


def effect(key: str) -> Effect:
    """Return the effect of a key, named as in a plan. `secrets.NAME` includes everything below it. Raise KeyError."""
    if key.startswith("variables."):
        return effects()["variables.*"]
    if key.startswith("secrets."):
        _, _, rest = key.partition(".")
        return effects()[f"secrets.*.{rest.partition('.')[2] or 'env'}"]
    return effects()[key]
