"""Architectures that other packages declare.

A package registers an entry point of the group `slipway.models` for each architecture name in config.json:

    [project.entry-points."slipway.models"]
    ToyForCausalLM = "toy_model:declare"

`declare(config)` returns a `Model` of the parts in engine/models/parts. Its module is imported only for a checkpoint
that names this architecture. A built-in architecture has precedence.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.families import Declare
from engine.models.parts import Model

GROUP = "slipway.models"


def plugin_declaration(architecture: str) -> Declare | None:
    """Return the declaration of a package, or None. Raises CheckpointError if the package is unusable."""
    found = next(iter(entry_points(group=GROUP, name=architecture)), None)
    if found is None:
        return None
    package = found.dist.name if found.dist is not None else found.module
    try:
        declare = found.load()
    except Exception as error:  # any code of another package
        raise CheckpointError(
            f"architecture {architecture}: {found.value} of the package {package} cannot be imported: {error!r}; "
            "repair or remove that package"
        ) from error

    def checked(config: Mapping[str, Any]) -> Model:
        model = declare(config) if callable(declare) else declare
        if not isinstance(model, Model):
            raise CheckpointError(
                f"architecture {architecture}: {found.value} of the package {package} returns no Model; update it"
            )
        return model

    return checked
