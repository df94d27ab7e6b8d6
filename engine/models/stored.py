"""Names, shapes and types of the tensors that store a quantized projection."""

from dataclasses import dataclass

from engine.models.parts import Model
from engine.models.schemes import FP8_BLOCK, Quantization, Scheme, alike, alike_fp8
from engine.models.sources import fused_paths, routers, sources, stacked_paths

PLAIN = ("F32", "BF16", "F16", "F64")
SCALES = ("F16", "BF16", "F32")
FP8 = ("F8_E4M3",)
SCALE_SUFFIX = {"gptq": "scales", "awq": "scales", "packed": "weight_scale", "int8": "weight_scale"}


@dataclass(frozen=True)
class Stored:
    """Shape and types of a stored tensor."""

    shape: tuple[int, ...]  # (1,) also accepts a scalar tensor
    types: tuple[str, ...] = PLAIN  # as in safetensors headers; empty: any ggml type
    optional: bool = False  # a checkpoint may lack it

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.shape == (1,) and shape == ())


def stored_tensors(model: Model, quantization: Quantization | None) -> dict[str, Stored]:
    """Return every tensor that a checkpoint of this model has or may have, by name."""
    schemes = {} if quantization is None else quantization.schemes
    found: dict[str, Stored] = {}
    for name, shape in sources(model).items():
        path = name.removesuffix(".weight")
        if path in schemes and path != name:
            rows, inputs = shape
            parts = _parts(schemes[path], rows, inputs)
            found |= {f"{path}.{suffix}": one for suffix, one in parts.items()}
        else:
            found[name] = Stored(shape)
    # Some exporters write a bias of zeros for a projection without bias.
    extra = [path for path, scheme in schemes.items() if scheme.form in ("gptq", "awq")]
    shapes = sources(model)
    for path in extra:
        if f"{path}.weight" in shapes:  # not for a head that a pooling model does not use
            found.setdefault(f"{path}.bias", Stored(shapes[f"{path}.weight"][:1], optional=True))
    return found


def _parts(scheme: Scheme, rows: int, inputs: int) -> dict[str, Stored]:
    """Return the tensors of a projection by the last component of their names."""
    groups = 1 if scheme.group is None else -(-inputs // scheme.group)
    each = 32 // scheme.bits if scheme.bits else 0
    match scheme.form:
        case "gptq":
            return {
                "qweight": Stored((_words(inputs, each), rows), ("I32",)),
                "qzeros": Stored((groups, _words(rows, each)), ("I32",)),
                "scales": Stored((groups, rows), SCALES),
                "g_idx": Stored((inputs,), ("I32", "I64"), optional=not scheme.ordered),
            }
        case "awq":
            return {
                "qweight": Stored((inputs, _words(rows, each)), ("I32",)),
                "qzeros": Stored((groups, _words(rows, each)), ("I32",)),
                "scales": Stored((groups, rows), SCALES),
            }
        case "packed":
            found = {
                "weight_packed": Stored((rows, _words(inputs, each)), ("I32",)),
                "weight_scale": Stored((rows, groups), SCALES),
                "weight_shape": Stored((2,), ("I64", "I32"), optional=True),
            }
            if scheme.zeros:
                found["weight_zero_point"] = Stored((_words(rows, each), groups), ("I32",))
            if scheme.ordered:
                found["weight_g_idx"] = Stored((inputs,), ("I32", "I64"))
            return found
        case "int8":
            return {"weight": Stored((rows, inputs), ("I8",)), "weight_scale": Stored((rows, groups), SCALES)}
        case "gguf" | "turned":
            return {"weight": Stored((rows, inputs), ())}
        case "fp8":
            blocks = _words(rows, FP8_BLOCK), _words(inputs, FP8_BLOCK)
            shape = {"block": blocks, "channel": (rows, 1)}.get(scheme.scales or "", (1,))
            found = {"weight": Stored((rows, inputs), FP8), scheme.named[0]: Stored(shape, SCALES)}
            if scheme.inputs == "static":
                found[scheme.named[1]] = Stored((1,), SCALES)
            return found


def _words(count: int, each: int) -> int:
    return -(-count // each)


def resident_weights(model: Model, quantization: Quantization | None) -> dict[str, Scheme]:
    """Return the weights that compiled kernels multiply by as the checkpoint's integers, by name. A fused matrix whose
    sources have different formats is dequantized instead."""
    if quantization is None:
        return {}
    schemes = quantization.schemes
    found: dict[str, Scheme] = {}
    for paths in fused_paths(model):
        if alike(schemes.get(path) for path in paths):
            found |= {f"{path}.weight": schemes[path] for path in paths}
    return found


def fp8_weights(model: Model, quantization: Quantization) -> tuple[str, ...]:
    """Return the paths of projections that Triton kernels multiply by in the checkpoint's fp8. Others are dequantized:
    routers, routed experts, the head, and a fused matrix whose sources have different formats."""
    schemes = quantization.schemes
    found: list[str] = []
    if not any(scheme.form == "fp8" for scheme in schemes.values()):
        return ()
    kept = {name.removesuffix(".weight") for name in routers(model)} | stacked_paths(model)
    kept |= {"" if model.head is None else model.head.name}
    for paths in fused_paths(model):
        if alike_fp8(schemes.get(path) for path in paths) and kept.isdisjoint(paths):
            found += paths
    return tuple(found)
