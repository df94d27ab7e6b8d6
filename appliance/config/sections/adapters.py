"""LoRA adapters that requests may select: `adapters`."""

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from appliance.config.key import Effect, Note, declare
from appliance.config.sections.values import Section

ADAPTERS = Effect("service", outputs="yes", memory=True)
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}$")]
URI = (
    r"^(hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9][A-Za-z0-9_./-]{0,199})?|(s3|gs|az)://[a-z0-9][a-z0-9._-]+(/\S*)?"
    r"|https?://[^/?#]+/\S*\.(tar|tar\.gz|tgz|zip)(\?[^\s#]*)?(#sha256=[0-9a-f]{64})?)$"
)


class Adapter(Section):
    name: AdapterName = declare(
        effect=ADAPTERS,
        affects=("engine.adapters", "gateway.adapters"),
        example="support",
        clients=Note("requests can select other adapters"),
    )
    """Name that requests use as `model`."""
    path: str | None = declare(
        None, effect=ADAPTERS, affects="engine.adapters", is_path=True, example="adapters/support"
    )
    """Folder that PEFT has saved: adapter_config.json and adapter_model.safetensors. Relative paths start at the
    manifest's folder."""
    uri: str | None = declare(
        None, effect=ADAPTERS, affects="engine.adapters", example="hf://org/support-lora@main", pattern=URI
    )
    """In place of path, a source that is downloaded before the start: hf://REPOSITORY@REVISION of the hub,
    s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or the URL of an archive, with #sha256=DIGEST to
    refuse other archives."""

    @model_validator(mode="after")
    def _one_source(self) -> "Adapter":
        if (self.path is None) == (self.uri is None):
            raise PydanticCustomError("one_kind", "takes exactly one of path and uri")
        return self
