"""Architectures defined by a checkpoint folder itself, in slipway_model.py with `ARCHITECTURES` and `declare(config)`.

The code runs with the permissions of the service. It is therefore run only if the operator allows it, and never for an
architecture that is supported natively.
"""

import importlib.util
from pathlib import Path

from engine.api.errors import CheckpointError, UnknownArchitecture
from engine.models.families import Declare

REMOTE_FILE = "slipway_model.py"


def remote_declaration(folder: Path, architecture: str, trust: bool) -> Declare:
    """Return `declare` of the folder's slipway_model.py. Raises UnknownArchitecture, without running code, if that is
    not allowed; CheckpointError if the file does not declare this architecture."""
    path = folder / REMOTE_FILE
    if not trust:
        raise UnknownArchitecture(
            f"{folder / 'config.json'}: the architecture {architecture!r} is not supported natively; {path} declares "
            "one, but its code is not run unless model.trust_remote_code is true (set it only if you trust that file)"
        )
    spec = importlib.util.spec_from_file_location(f"slipway_model_{abs(hash(str(path)))}", path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        names, declare = module.ARCHITECTURES, module.declare
    except Exception as error:  # any error of foreign code makes the checkpoint unusable
        raise CheckpointError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    if architecture not in names:
        raise CheckpointError(f"{path}: declares {', '.join(names)}, but config.json names {architecture!r}")
    result: Declare = declare
    return result
