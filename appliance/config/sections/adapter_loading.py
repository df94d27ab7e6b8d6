"""LoRA adapters that are loaded and unloaded while the service runs: `adapter_loading`."""

from typing import Annotated

from pydantic import Field

from appliance.config.key import GATEWAY, Effect, Note, Switch, declare
from appliance.config.sections.values import Bytes, Section

_SLOTS = Effect("engine", memory=True)


class AdapterLoading(Section):
    max_active: Annotated[int, Field(ge=1, le=1024)] | None = declare(
        None,
        effect=_SLOTS,
        target="engine.adapter_loading.max_active",
        aliases={"vLLM": "max_loras", "SGLang": "max_loras_per_batch"},
        example=4,
    )
    """Number of LoRA adapters on the device at a time. There may be more of them: a request waits for a free slot, and
    the least recently used adapter leaves. null loads the adapters of the manifest at the start, and no others."""
    max_rank: Annotated[int, Field(ge=1, le=4096)] = declare(
        16,
        effect=_SLOTS,
        target="engine.adapter_loading.max_rank",
        aliases={"vLLM": "max_lora_rank", "SGLang": "max_lora_rank"},
        example=64,
    )
    """Largest rank of an adapter; it determines the size of a slot."""
    host_cache: Bytes = declare(
        256 * 2**20,
        effect=_SLOTS,
        target="engine.adapter_loading.host_cache",
        aliases={"vLLM": "max_cpu_loras", "SGLang": "max_loaded_loras"},
        example="2GiB",
    )
    """Host memory of each rank for adapters that are ready to enter a slot. Others are read from their files."""
    folders: tuple[str, ...] = declare(
        (),
        effect=GATEWAY,
        affects="gateway.adapter_folders",
        clients=Note("adapters can be loaded from other folders"),
        example=["/models/adapters"],
        strict=False,
    )
    """Folders whose sub-folders clients may load as adapters, with POST /v1/load_lora_adapter. Symbolic links to other
    places are refused. Relative paths start at the manifest's folder."""
    on_request: bool = declare(
        False,
        effect=GATEWAY,
        target="gateway.adapters_on_request",
        clients=Switch(off="adapters must be loaded first", on="a request may name a folder of `folders` as its model"),
    )
    """Load an adapter when a request names its folder, relative to one of `folders`, as the model."""
