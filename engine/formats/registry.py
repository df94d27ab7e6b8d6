"""All quantization formats: built-in ones, and those of other packages.

Another package registers a `Method` as an entry point of the group `slipway.formats`, under its `quant_method`:

    [project.entry-points."slipway.formats"]
    toy = "toy_format:METHOD"

Its module is imported only for a checkpoint that names this method. A built-in name has precedence.
"""

from importlib.metadata import entry_points

from engine.api.errors import CheckpointError
from engine.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fbgemm,
    fp8,
    gptq,
    hqq,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from engine.formats.format import Method

GROUP = "slipway.formats"
BUILT_IN = (
    gptq.METHOD,
    awq.METHOD,
    fp8.METHOD,
    modelopt.METHOD,
    compressed_tensors.METHOD,
    mxfp4.METHOD,
    bitsandbytes.METHOD,
    auto_round.METHOD,
    *auto_round.ALIASES,
    hqq.METHOD,
    torchao.METHOD,
    quark.METHOD,
    fbgemm.METHOD,
)


def find_method(name: str) -> Method | None:
    """Return the method of this name, or None. Raises CheckpointError if the package that registers it is unusable."""
    own = next((one for one in BUILT_IN if one.name == name), None)
    found = None if own else next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        return own
    package = found.dist.name if found.dist is not None else found.module
    try:
        method = found.load()
    except Exception as error:  # any code of another package
        raise CheckpointError(
            f"quant_method {name}: {found.value} of the package {package} cannot be imported: {error!r}; "
            "repair or remove that package"
        ) from error
    if not isinstance(method, Method) or method.name != name:
        raise CheckpointError(
            f"quant_method {name}: {found.value} of the package {package} is not a Method of this name; update it"
        )
    return method


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, built-in ones first."""
    others = sorted(one.name for one in entry_points(group=GROUP))
    return tuple(dict.fromkeys((*(one.name for one in BUILT_IN), *others)))


def settings_files() -> tuple[Method, ...]:
    """Return the methods that may have their settings in a file of their own."""
    return tuple(one for one in BUILT_IN if one.file)
