"""Keys that a running gateway can change in place, and the fields of its configuration that each key affects."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from appliance.config.gateway import GatewayConfig
from appliance.config.keys import metadata

FOLLOW = ("manifest_sha256", "outputs_sha256")  # identities of the manifest, which always change with it
_PREFIX = "gateway."


@cache
def live_fields() -> dict[str, tuple[str, ...]]:
    """Return the fields of GatewayConfig by live key. `sampling.x` is a single sampling default."""
    return {
        name: tuple(
            field.removeprefix(_PREFIX) for field in (*declared.affects, *declared.targets) if field.startswith(_PREFIX)
        )
        for name, declared in metadata().items()
        if declared.effect.live
    }


def mixed(now: GatewayConfig, wanted: GatewayConfig, keys: Sequence[str], **follow: str) -> GatewayConfig:
    """Return the running configuration `now` with the values of these live keys from `wanted`."""
    changed: dict[str, Any] = dict(follow)
    for path in dict.fromkeys(field for key in keys for field in live_fields()[key]):
        name, _, part = path.partition(".")
        value = getattr(wanted, name)
        if part:
            value = msgspec.structs.replace(changed.get(name, getattr(now, name)), **{part: getattr(value, part)})
        changed[name] = value
    return msgspec.structs.replace(now, **changed)
