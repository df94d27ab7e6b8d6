"""Names, shapes and types of the tensors of a checkpoint, and the matrices that executors multiply by as stored."""

from engine.formats.format import Stored
from engine.formats.native import Executor, Role
from engine.models.media import media_sources
from engine.models.parts import Model
from engine.models.quantized import Quantization
from engine.models.sources import expansions, fused_paths, sources, stacked_paths, unquantized


def stored_tensors(model: Model, quantization: Quantization | None) -> dict[str, Stored]:
    """Return every tensor that a checkpoint of this model has or may have, by name."""
    formats = {} if quantization is None else quantization.formats
    found: dict[str, Stored] = {}
    for name, shape in sources(model).items():
        path = name.removesuffix(".weight")
        if path in formats and path != name:
            rows, inputs = shape
            found |= {f"{path}.{suffix}": one for suffix, one in formats[path].tensors(rows, inputs).items()}
        else:
            found[name] = Stored(shape)
    if model.head is not None and model.head.ids:
        found[model.head.ids] = Stored((model.head.rows,), ("I64", "I32"))
    if model.media is not None:
        found |= {name: Stored(shape) for name, shape in media_sources(model.media).items()}
    return found


def native_paths(model: Model, quantization: Quantization | None, executor: Executor) -> tuple[str, ...]:
    """Return the paths of projections that an executor multiplies by as the checkpoint stores them. A fused matrix
    whose sources have different formats is dequantized instead, and so are matrices in other roles than the executor
    has."""
    if quantization is None or not any(one.on(executor) for one in quantization.formats.values()):
        return ()
    roles, found = matrix_roles(model), list[str]()
    dequantized = expansions(model)
    if model.head is not None and model.head.unit_rows:
        dequantized |= {model.head.name}
    for paths in fused_paths(model):
        native = quantization.native(paths, executor)
        if native is None or not dequantized.isdisjoint(paths):
            continue
        if all(roles.get(path, "projection") in native.roles(executor) for path in paths):
            found += paths
    return tuple(found)


def matrix_roles(model: Model) -> dict[str, Role]:
    """Return the roles of all matrices but plain projections, by path."""
    roles: dict[str, Role] = dict.fromkeys(stacked_paths(model), "expert")
    roles |= {name.removesuffix(".weight"): "exact" for name in unquantized(model)}
    return roles | ({} if model.head is None else {model.head.name: "head"})
