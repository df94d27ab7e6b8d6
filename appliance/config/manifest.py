"""The manifest, version 2: every key that an operator can write, with its type, default and effect.

Validation is strict: unknown keys, wrong types and out-of-range values are errors, reported with their source location
by ``appliance.config.problems``. A key exists only if it has an effect. ``auto`` values are resolved by
``appliance.planning``, with a reason. The keys are declared in ``appliance.config.sections`` (see ``key.py``).
"""

from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from appliance.config.key import NO_EFFECT, Note, declare
from appliance.config.sections.adapter_loading import AdapterLoading
from appliance.config.sections.adapters import ADAPTERS, Adapter
from appliance.config.sections.endpoints import Endpoints
from appliance.config.sections.engine import Engine
from appliance.config.sections.evaluation import EvaluationTask, TaskName
from appliance.config.sections.hardware import Hardware, Parallelism
from appliance.config.sections.lifecycle import Health, Lifecycle
from appliance.config.sections.limits import Limits
from appliance.config.sections.model import Model, Quantization
from appliance.config.sections.observability import Observability
from appliance.config.sections.secrets import SecretEnv, SecretFile
from appliance.config.sections.speculation import Speculation
from appliance.config.sections.values import SecretName, Section

API_VERSION = (
    "slipway/v2"  # older versions: appliance/config/versions.py  # older versions: appliance/config/versions.py
)
ONE_KIND = (("model", "source"),)  # sections with exactly one key  # sections with exactly one key


class Manifest(Section):
    """A manifest: one file describes one service."""

    apiVersion: Literal["slipway/v2"] = declare(effect=NO_EFFECT)
    """Version of the manifest format."""
    model: Model
    """The served checkpoint and its names."""
    adapters: tuple[Adapter, ...] = declare(
        (),
        effect=ADAPTERS,
        affects=("engine.adapters", "gateway.adapters"),
        aliases={"vLLM": "lora_modules", "SGLang": "lora_paths", "TGI": "lora_adapters", "synonyms": "lora"},
        clients=Note("requests can select other adapters"),
        example=[{"name": "support", "path": "adapters/support"}],
        strict=False,
    )
    """LoRA adapters of the model, which requests select by name (docs/adapters.md)."""
    adapter_loading: AdapterLoading = AdapterLoading()
    """LoRA adapters that are loaded and unloaded while the service runs."""
    quantization: Quantization = Quantization()
    """Number formats of weights and KV cache."""
    parallelism: Parallelism = Parallelism()
    """Number of processes that share the work."""
    hardware: Hardware = Hardware()
    """Device, and the share of it that the service uses."""
    speculation: Speculation = Speculation()
    """Speculative decoding."""
    engine: Engine = Engine()
    """Scheduling, cache and sampling defaults."""
    endpoints: Endpoints = Endpoints()
    """Address and protocol of the service."""
    limits: Limits = Limits()
    """Limits of a request and of the service."""
    health: Health = Health()
    """Time limits of starts and hangs."""
    lifecycle: Lifecycle = Lifecycle()
    """Start, restart and shutdown."""
    observability: Observability = Observability()
    """Logs, metrics and traces."""
    evaluation: dict[TaskName, EvaluationTask] = {}
    """Accuracy measurements of `slipway eval` by name, with their thresholds; serving does not read them."""
    secrets: dict[SecretName, SecretFile | SecretEnv] = {}
    """Secrets by name: references to a file or an environment variable, never values."""

    @model_validator(mode="after")
    def _named_secrets_exist(self) -> "Manifest":
        for key, name in (
            ("model.credentials", self.model.credentials),
            ("endpoints.api_keys", self.endpoints.api_keys),
            ("observability.traces.headers", self.observability.traces.headers),
        ):
            if name is not None and name not in self.secrets:
                text = "names a secret that `secrets` does not have"
                raise PydanticCustomError("unknown_secret", text, {"name": name, "key": key})
        return self

    @model_validator(mode="after")
    def _adapter_names_differ(self) -> "Manifest":
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if names.count(name) > 1 or name in self.model.names:
                what = "another adapter" if names.count(name) > 1 else "model.names"
                text = "adapters: the name {name} is also that of {what}; requests select adapters by name"
                raise PydanticCustomError("adapter_name", text, {"name": name, "what": what})
        return self
