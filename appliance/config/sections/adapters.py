"""LoRA adapters that requests may select: `adapters`."""

from typing import Annotated

from pydantic import Field

from appliance.config.key import Effect, Note, declare
from appliance.config.sections.values import Section

ADAPTERS = Effect("service", outputs="yes", memory=True)
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}$")]


class Adapter(Section):
    name: AdapterName = declare(
        effect=ADAPTERS,
        affects=("engine.adapters", "gateway.adapters"),
        example="support",
        clients=Note("requests can select other adapters"),
    )
    """Name that requests use as `model`."""
    path: str = declare(effect=ADAPTERS, affects="engine.adapters", is_path=True, example="adapters/support")
    """Folder that PEFT has saved: adapter_config.json and adapter_model.safetensors. Relative paths start at the
    manifest's folder."""
