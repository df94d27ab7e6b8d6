"""Check of the activations that a declaration names. Independent of torch and of the kernels."""

from collections.abc import Iterator

from engine.api.errors import CheckpointError
from engine.models.config import ACTIVATIONS
from engine.models.parts import MLP, XIELU, Experts, LayerInput, Model, all_bodies, encoder_bodies


def check_parts(model: Model, place: str) -> None:
    """Raise CheckpointError for an activation that torch lacks, too. `place`: the file that names it."""
    known = set(ACTIVATIONS.values())
    for act, is_mlp in _acts(model):
        if act not in known and not (is_mlp and act == XIELU):
            raise CheckpointError(f"{place}: declares an MLP with act={act!r}; there are {', '.join(sorted(known))}")


def _acts(model: Model) -> Iterator[tuple[str, bool]]:
    """Yield the activation of every MLP, and whether it is no expert; the routed experts of a layer count as one."""
    for body in (*encoder_bodies(model), *all_bodies(model)):
        if isinstance(body, MLP | Experts | LayerInput):
            yield body.act, isinstance(body, MLP)
        if isinstance(body, Experts) and body.shared is not None:
            yield body.shared.act, True
