"""hardware.executor: an executor of another package, in place of torch's functions."""

from appliance.config.settings import Settings
from appliance.constraints.rule import TORCH, View
from appliance.planning.choice import refuse
from engine.lowering.executors import executor_names, unknown_executor
from engine.models.parts import Model

KEY = "hardware.executor"


def check_executor(settings: Settings, model: Model, view: View) -> None:
    """Raise Refused if the executor is not installed, or would have no effect."""
    name = settings.manifest.hardware.executor
    if name is None:
        return
    if name not in executor_names():
        refuse(settings, KEY, f"{unknown_executor(name)}; install its package, or leave the key out")
    if view.kernels != TORCH:
        used = f"replaces functions of torch, and {view.kernels} kernels are used"
        refuse(settings, KEY, f"{used}; set hardware.kernels to torch")
    if model.foreign is not None:
        refuse(settings, KEY, "has no effect: the model is computed by transformers' code; leave the key out")
