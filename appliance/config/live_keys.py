"""Keys that a running gateway can change in place, and the fields of its configuration that each key affects."""

from collections.abc import Sequence
from functools import cache

from appliance.config.gateway import SECTIONS, GatewayConfig, value_at, with_values
from appliance.config.key import Metadata
from appliance.config.keys import metadata

FOLLOW = ("manifest_sha256", "outputs_sha256")  # identities of the manifest, which always change with it
_PREFIX = "gateway."


@cache
def live_fields() -> dict[str, tuple[str, ...]]:
    """Return the fields of GatewayConfig by live key, such as `limits.max_stop` and `sampling.top_p`."""
    return {name: _fields(name, declared) for name, declared in metadata().items() if declared.effect.live}


def _fields(key: str, declared: Metadata) -> tuple[str, ...]:
    """Return the field of the key itself if its section is passed to the gateway, and the fields that it affects."""
    own = (key,) if key.partition(".")[0] in SECTIONS else ()
    named = (*declared.affects, *declared.targets)
    return *own, *(field.removeprefix(_PREFIX) for field in named if field.startswith(_PREFIX))


def fixed_fields(now: GatewayConfig, wanted: GatewayConfig) -> tuple[str, ...]:
    """Return the differing fields that only a restart can change."""
    live = {field for fields in live_fields().values() for field in fields} | set(FOLLOW)
    whole = {field.partition(".")[0] for field in live} - set(SECTIONS)
    keys = [key for key in metadata() if key.partition(".")[0] in SECTIONS]
    names = [name for name in now.__struct_fields__ if name not in SECTIONS] + keys
    return tuple(name for name in names if name not in live | whole and value_at(now, name) != value_at(wanted, name))


def mixed(now: GatewayConfig, wanted: GatewayConfig, keys: Sequence[str], **follow: str) -> GatewayConfig:
    """Return the running configuration `now` with the values of these live keys from `wanted`."""
    fields = dict.fromkeys(field for key in keys for field in live_fields()[key])
    return with_values(now, {field: value_at(wanted, field) for field in fields} | follow)
