"""Declaration of a manifest key: everything that the rest of Slipway derives about it, next to its field.

`declare()` makes the pydantic field and attaches a `Metadata` to it; `declared()` collects the metadata of a manifest.
Flags, environment variables, effects, live keys, notes for clients, names of other servers, the JSON Schema and
docs/manifest.md follow from it, and planning passes the value on to `targets`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

Path = tuple[str, ...]


@dataclass(frozen=True)
class Effect:
    """Effect of changing a key.

    It describes only its own key. If a key determines the `auto` of another (`hardware.kv_cache_memory` that of
    `model.max_context`), compare resolved values: the effect of the other key covers the rest.
    """

    restart: Literal["none", "gateway", "engine", "service"]
    """Smallest restart that applies the change: "engine" keeps the gateway and its requests, "service" is
    everything.
    """
    live: bool = False  # `slipway reload` applies the change to a running gateway without a restart (server/live.py)
    outputs: Literal["no", "rounding", "yes"] = "no"
    """Change of the reply to the same request with the same seed. "rounding": only through the order of floating-point
    sums, which depends on batching and threads; this excludes compiled CPU kernels and hardware.batch_invariant.
    """
    caches: tuple[Literal["weights", "prefix"], ...] = ()
    """Caches that become invalid: the file of quantized weights, or prefix cache blocks."""
    graphs: bool = False  # kernels are compiled or graphs captured differently
    memory: bool = False  # memory use changes


NO_EFFECT = Effect("none")
LIVE = Effect("none", live=True)
LIVE_OUTPUTS = Effect("none", live=True, outputs="yes")
GATEWAY = Effect("gateway")
ENGINE = Effect("engine")
SERVICE = Effect("service")
NUMBERS = Effect("engine", outputs="yes", caches=("prefix",), graphs=True, memory=True)
# the routes of the gateway change, too
TASK = Effect("service", outputs="yes", caches=("prefix",), graphs=True, memory=True)
EVERYTHING = Effect("service", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)


@dataclass(frozen=True)
class Limit:
    """Note for clients about a limit. null means unlimited, and so does -1 if allowed."""

    beyond: str  # effect on requests beyond a tighter limit


@dataclass(frozen=True)
class Switch:
    """Note for clients about a key that is true or false."""

    off: str  # effect of false
    on: str  # effect of true


@dataclass(frozen=True)
class Note:
    """Note for clients about any other change of a key."""

    text: str


Server = Literal["vLLM", "SGLang", "TGI", "llama.cpp", "Ollama", "DJL Serving", "NVIDIA NIM", "KServe", "synonyms"]
"""A server with its own name for a key; "synonyms" are other words that operators write."""


@dataclass(frozen=True)
class Metadata:
    """Facts about one key that its type, default and description do not contain."""

    effect: Effect
    targets: tuple[str, ...] = ()
    """Fields of the process configurations that get the resolved value unchanged, such as `engine.model.max_context`.
    The gateway also has the sections `endpoints`, `limits`, `lifecycle` and `observability` as they are.
    """
    affects: tuple[str, ...] = ()  # other fields of these configurations, which planning computes from the value
    aliases: Mapping[Server, tuple[str, ...]] = field(default_factory=dict)
    clients: Limit | Switch | Note | None = None  # effect of a change on clients, for `slipway diff`
    flags: tuple[str, ...] = ()  # short forms of the flag, such as -p
    is_path: bool = False  # the value names a file or folder; a relative path starts at the folder of its file


def declare(
    default: Any = ...,
    *,
    effect: Effect,
    target: str | tuple[str, ...] = (),
    affects: str | tuple[str, ...] = (),
    aliases: Mapping[Server, str | tuple[str, ...]] | None = None,
    clients: Limit | Switch | Note | None = None,
    flags: tuple[str, ...] = (),
    is_path: bool = False,
    example: Any = None,
    examples: tuple[Any, ...] = (),
    **constraints: Any,
) -> Any:
    """Return the pydantic field of a key. Without a default the key is required.

    `examples` are written in the documentation; keys with fixed words, true or false need none. `constraints` are
    arguments of `pydantic.Field`.
    """
    shown = examples if example is None else (example, *examples)
    if shown:
        constraints["examples"] = list(shown)
    made: FieldInfo = Field(default, **constraints)
    names = {server: _tuple(names) for server, names in (aliases or {}).items()}
    made.metadata.append(Metadata(effect, _tuple(target), _tuple(affects), names, clients, flags, is_path))
    return made


def _tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def declared(section: type[BaseModel], path: Path = ()) -> Iterator[tuple[Path, Metadata]]:
    """Yield the path and the metadata of every key below a section.

    `*` matches a name that the operator chooses, or the items of a list.
    """
    for name, info in section.model_fields.items():
        at = (*path, name)
        found = [one for one in info.metadata if isinstance(one, Metadata)]
        for inner, below in _sections(info.annotation, at):
            yield from declared(inner, below)
        for one in found:
            yield at, one


def _sections(annotation: Any, path: Path) -> Iterator[tuple[type[BaseModel], Path]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, path
        return
    inner = (*path, "*") if get_origin(annotation) in (dict, tuple) else path
    for one in get_args(annotation):
        yield from _sections(one, inner)
