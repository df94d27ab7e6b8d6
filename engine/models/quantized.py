"""Find which projections of a checkpoint are quantized, and in which format, from its quantization_config.

`engine.formats` has the formats. Others are refused with method, bits and reason.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.format import Format, UnsupportedFormat
from engine.formats.layers import all_but_skipped
from engine.formats.native import Executor, Native, fuse
from engine.formats.registry import BUILT_IN, find_method, method_names
from engine.formats.unread import UNREAD
from engine.models.parts import Model
from engine.models.sources import linear_paths, sources

_INSTEAD = (
    f"use a checkpoint in {', '.join(one.advice for one in BUILT_IN if one.advice)} or GGUF, or the unquantized "
    "checkpoint (float32, bfloat16, float16)"
)


@dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint."""

    method: str
    formats: Mapping[str, Format]  # of each quantized projection, by path

    @property
    def is_plain(self) -> bool:
        """True if no projection is quantized and rows are at most permuted."""
        return not self._quantized

    @property
    def float16_pages(self) -> bool:
        """True if the KV cache on a CPU is float16 by default, as the scales of the weights are."""
        return any(one.float16_pages for one in self._quantized)

    @property
    def quantizable(self) -> bool:
        """True if `quantization.weights` may quantize the weights that are dequantized."""
        return any(one.quantizable for one in self._quantized)

    @property
    def _quantized(self) -> tuple[Format, ...]:
        return tuple(one for one in dict.fromkeys(self.formats.values()) if one.is_quantized)

    def restores(self, path: str) -> bool:
        """Return whether a weight is dequantized when it is read."""
        found = self.formats.get(path)
        return found is not None and found.is_quantized

    def native(self, paths: tuple[str, ...], executor: Executor) -> Native | None:
        """Return the product of an executor for a matrix that is fused from these projections, or None if they are
        dequantized."""
        formats = (self.formats.get(path) for path in paths)
        return fuse(None if one is None else one.on(executor) for one in formats)

    def named(self, tensors: Container[str]) -> "Quantization | None":
        """Return the same quantization with the names that the checkpoint's tensors have, without plain projections.
        Return None if all are plain."""
        found = ((path, one.named(path, tensors)) for path, one in self.formats.items())
        formats = {path: one for path, one in found if one is not None}
        return replace(self, formats=formats) if formats else None

    def __str__(self) -> str:
        """Return a short description such as `4 bits (gptq, groups of 128)`."""
        kinds = list(dict.fromkeys(map(str, self._quantized)))
        if len(kinds) > 1 or self._quantized[0].native is None:
            return f"{self.method} ({'; '.join(kinds)})"
        bits, _, more = kinds[0].partition(", ")
        return f"{bits} ({', '.join(filter(None, (self.method, more)))})"


def read_quantization(
    config: Mapping[str, Any], model: Model, file: str, names: Mapping[str, str] | None = None
) -> Quantization | None:
    """Return the format of each quantized projection, or None if no projection is quantized. names: of projections
    that have other names in the settings than their paths.

    Raises CheckpointError with the method and the layers of an unsupported format."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    where = f"{file}: quantization_config"
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where} is {settings!r}; it must be an object with quant_method, or be left out")
    own = {(names or {}).get(path, path): path for path in linear_paths(model)}
    paths = tuple(own)
    name = str(settings.get("quant_method", "unknown"))
    head = "" if model.head is None else model.head.name
    groups = quantized_paths(settings, paths, (names or {}).get(head, head), where)
    if not groups:
        return None
    try:
        method = find_method(name)
        if method is None:
            raise UnsupportedFormat(UNREAD.get(name.lower(), f"supported are {', '.join(method_names())}"))
        known = {group: method.format(settings, group) for group in dict.fromkeys(groups.values())}
        formats = {own[path]: known[group] for path, group in groups.items()}
        if any(one.needs_inputs for one in known.values()):
            shapes = ((name.removesuffix(".weight"), shape) for name, shape in sources(model).items())
            inputs = {path: shape[1] for path, shape in shapes if path in formats}
            formats = {path: one.for_inputs(inputs[path]) if path in inputs else one for path, one in formats.items()}
        return Quantization(name, formats)
    except UnsupportedFormat as reason:
        rest = [path for path in paths if path not in groups]
        plain = f", but not {_listed(rest)}" if rest else ""
        bits = f", {settings['bits']} bits" if settings.get("bits") is not None else ""
        raise CheckpointError(
            f"{file}: the checkpoint is quantized ({name}{bits}), which is not supported: {reason}; "
            f"{len(groups)} of {len(paths)} projections are quantized, such as {next(iter(groups))}{plain}; {_INSTEAD}"
        ) from reason


def quantized_paths(settings: Mapping[str, Any], paths: tuple[str, ...], head: str, where: str) -> dict[str, str]:
    """Return the paths that are quantized, each with its group. `where`: start of error messages about the settings."""
    method = find_method(str(settings.get("quant_method")))
    return (all_but_skipped if method is None else method.groups)(settings, paths, head, where)


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
