"""LoRA adapters of the manifest: read and checked before anything starts."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from appliance.checkpoints.facts import Facts
from appliance.config import exits
from appliance.config.problems import Problem, Refused, unread
from appliance.config.settings import Settings
from appliance.planning.choice import refuse
from engine.api.errors import EngineError
from engine.lowering.adapters import adapters_problem, check_ranks, fitted_adapters
from engine.models.adapters import Adapter, read_adapter
from engine.models.checkpoint import Checkpoint


def read_adapters(settings: Settings, checkpoint: Checkpoint) -> tuple[Adapter, ...]:
    """Return the adapters in the order of the manifest. Raise Refused with a problem for each that the model cannot
    have."""
    found, problems, loading = [], list[Problem](), settings.manifest.adapter_loading
    unsuited = None if loading.max_active is None else adapters_problem(checkpoint.model)
    if unsuited is not None:
        refuse(settings, "adapter_loading.max_active", unsuited)
    for number, wanted in enumerate(settings.manifest.adapters):
        key = ("adapters", number, "path")
        try:
            adapter = read_adapter(wanted.name, settings.file(key))
            fitted_adapters(checkpoint.model, [adapter])
            if loading.max_active is not None:
                check_ranks(adapter, loading.max_rank)
        except EngineError as error:
            problems.append(unread(settings.place(key), key, str(error)))
        else:
            found.append(adapter)
    if problems:
        raise Refused(problems, exits.CHECKPOINT)
    return tuple(found)


def other_bases(settings: Settings, checkpoint: Checkpoint, known: Facts) -> Iterator[Problem]:
    """Yield a warning for each adapter that names another base model."""
    own = {_last(name).lower() for name in (known.name, known.shown, str(checkpoint.path)) if name}
    own |= {_last(str(checkpoint.config.get("_name_or_path") or "")).lower()}
    for number, adapter in enumerate(checkpoint.adapters):
        if adapter.base and _last(adapter.base).lower() not in own:
            what = f"adapter {adapter.name} was trained for {adapter.base}, by its base_model_name_or_path"
            place = settings.place(("adapters", number, "path"))
            hint = "check that it is the served model; the shapes agree"
            yield Problem(place, f"adapters[{number}].path", f"{what}; {hint}", hint=hint, code="other-base")


def _last(name: str) -> str:
    return PurePosixPath(name.rstrip("/")).name
