"""Configuration of the gateway process, which the launcher writes as JSON."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from appliance.config.sections.endpoints import Endpoints
from appliance.config.sections.lifecycle import Lifecycle
from appliance.config.sections.limits import Limits
from appliance.config.sections.observability import Observability
from appliance.config.sections.values import Section
from engine.api import config as engine_config
from engine.api.config import SpeculationMethod
from engine.api.media import Modality


class SecretRef(msgspec.Struct, frozen=True):
    """Location of a secret, in exactly one of the fields. The gateway reads the secret; generated files never contain
    it.
    """

    file: str | None = None
    env: str | None = None


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS settings."""

    certificate: str  # PEM file of the certificate and its chain
    key: str  # PEM file of the private key
    least_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of requests: manifest, else generation_config.json, else the default of the API."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


Task = Literal["generate", "transcribe", "embed", "classify", "token_embed", "token_classify", "score", "encode"]


class LateReading(msgspec.Struct, frozen=True, kw_only=True):
    """Input format of a late-interaction model."""

    markers: tuple[str, str]  # markers after the first token of a query and of a document; "": none
    lengths: tuple[int, int]  # maximum tokens of a query and of a document
    skipped: tuple[str, ...] = ()  # document tokens that are not compared
    expands: bool = False  # queries are padded with mask tokens
    prompts: tuple[str, str] = ("", "")
    """Prompts of a query and of a document that is an image: {1} is the text, {2} the padding of a query, {bos} the
    first token, {image} the placeholder. Empty for models of texts alone."""
    padding: int = 0  # padding tokens that {2} is

    @property
    def reads_images(self) -> bool:
        return bool(self.prompts[1])


class PooledModel(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs of a pooling model."""

    labels: tuple[str, ...] = ()  # labels of a classifier, by index
    width: int = 0  # length of a vector
    dimensions: tuple[int, ...] = ()
    """Vector lengths that a request may ask for, if the model was trained for truncation."""
    any_dimensions: bool = False  # any length up to `width` is allowed
    max_input: int = 0  # maximum tokens of a text to embed, split into windows; 0: one window
    activation: Literal["none", "normalize", "softmax", "sigmoid"] = "none"
    """Default activation, which a request can disable: unit length of vectors, or the activation of a classifier."""
    pairs: Literal["none", "tokenizer", "template", "reranker"] = "none"
    """How two texts become one prompt: joined by the tokenizer (with segment ids), by the checkpoint's template with
    `query` and `document`, or by the template of Qwen3 rerankers; none: vectors are compared.
    """
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"  # comparison of vectors in score requests
    prompts: dict[str, str] = {}  # text prefixes by name
    default_prompt: str = ""  # name of the prefix of requests that name none; "": no prefix
    late: LateReading | None = None  # set for models that compare vectors of tokens
    is_dual: bool = False  # texts and images have encoders of their own
    padding: int | None = None  # token with which texts are padded to the longest prompt
    canonical: Literal["", "lower", "words"] = ""  # texts are in lower case; words: and without punctuation


class EncoderLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an encoder-decoder model."""

    max_input: int  # maximum tokens of the encoder input
    reply: int  # maximum tokens of a reply, including `decoder_start_ids`
    decoder_start_ids: tuple[int, ...]  # first tokens of a reply, unless the request sets others
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that a reply must not contain


class SpeechModel(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and replies of a speech model."""

    mels: int  # bands of a spectrogram
    positions: int  # of a window of audio, 0.02 s each
    reply: int  # maximum tokens of a reply, including those it begins with
    multilingual: bool  # replies begin with a language and a task
    latest_first: int | None = None  # largest first timestamp, in units of 0.02 s
    suppressed: tuple[int, ...] = ()  # tokens that are never sampled
    suppressed_first: tuple[int, ...] = ()  # nor as the first token of a transcript


class HardwareLimits(msgspec.Struct, frozen=True):
    """Throughput of the hardware of one engine, from the table of devices."""

    flops: int  # floating-point operations per second
    bandwidth: int  # bytes of memory per second


class Transcriber(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt with which a decoder transcribes audio."""

    prompt: str  # {audio} is the placeholder of the recording, {language} the language, {prompt} a text of the request
    language: str  # text of a language with the code {code} or the name {name}; without a language, it is empty
    marker: str = ""  # text before the transcript, in a reply to a prompt without a language


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the gateway: the sections of the manifest that it reads, and values that planning computes.
    Durations are in seconds, sizes in bytes. Keys of the sections that only engines read, and paths as they are
    written, have their defaults.
    """

    endpoints: Endpoints = Endpoints()
    limits: Limits = Limits()
    lifecycle: Lifecycle = Lifecycle()
    observability: Observability = Observability()
    names: tuple[str, ...]  # served names, canonical first
    model: str
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters, which requests use as `model`
    adapter_folders: tuple[str, ...] = ()  # folders from which adapters may be loaded; empty: none may be
    adapters_on_request: bool = False  # load an adapter that a request names as its model
    engines: tuple[str, ...]  # Unix sockets of the engine processes
    max_context: int
    vocab_size: int  # size of the model's logits
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a reply (config.json and generation_config.json)
    tasks: tuple[Task, ...] = ("generate",)  # tasks that requests may use
    pooled: PooledModel | None = None  # set unless the only task is generation
    encoder: EncoderLimits | None = None  # set for encoder-decoder models
    speech: SpeechModel | None = None  # set for speech models
    routed_experts: tuple[int, ...] = ()
    """Experts per token in each layer with experts, if requests may return them."""
    transcriber: Transcriber | None = None  # set for decoders that transcribe audio
    modalities: tuple[Modality, ...] = ()  # of prompts beside text, as far as `limits.media` permits them
    embedded_modalities: tuple[Modality, ...] = ()  # whose embeddings requests may have in place of files
    media_width: int = 0  # columns of these embeddings
    chat_template: str | None = None
    format: str = "auto"  # format of tool calls and reasoning
    model_type: str = ""  # model type in config.json
    api_keys: SecretRef | None = None  # the secret that `endpoints.api_keys` names
    trace_headers: SecretRef | None = None  # the secret that `observability.traces.headers` names
    tls: Tls | None = None  # `endpoints.tls` with complete paths; the listener uses TLS if set
    speculation: SpeculationMethod = "off"  # of the engines
    profiler: bool = False  # `observability.profiler_folder` is set
    hardware: HardwareLimits | None = None  # set if it is known and `observability.mfu_metrics` is set
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"  # order of requests in the engines
    sampling: SamplingDefaults = SamplingDefaults()
    drain_s: float = 8.0  # resolved `lifecycle.drain`: time for open requests after SIGTERM
    drain_linger_s: float = 0.0  # resolved `lifecycle.linger`: first part of drain_s, in which requests are accepted
    crash_exemptions: str = ""  # pipe to the restart monitor (appliance/runtime/crash_exemption.py)
    control: str = ""  # socket on which the launcher reloads the configuration (server/control.py)
    listener: str = ""
    """Socket on which the launcher passes its listener (runtime/listener.py); "": the gateway opens its own."""
    run: str = ""  # run directory, for the in-flight snapshot of a crashed engine and the halted state
    journal: str = ""  # file of durable replies; "" disables them
    responses: str = ""  # file of stored responses; "" disables them
    version: str = ""
    manifest_sha256: str = ""
    outputs_sha256: str = ""  # hash of all inputs that can change generated tokens

    @property
    def system_fingerprint(self) -> str:
        """Fingerprint in replies: the version, and a hash of all inputs that can change generated tokens."""
        return f"slipway-{self.version}-{self.outputs_sha256[:8]}"


SECTIONS = ("endpoints", "limits", "lifecycle", "observability")


def value_at(config: Any, path: str) -> Any:
    """Return the value of a field such as `limits.max_stop`."""
    return reduce(getattr, path.split("."), config)


def with_values(config: GatewayConfig, values: Mapping[str, Any]) -> GatewayConfig:
    """Return the configuration with these values of its fields, such as `limits.max_stop`, set in order. They are not
    validated. Raise AttributeError for an unknown field."""
    return engine_config.with_values(config, values, _replaced)


def _replaced(section: Any, **values: Any) -> Any:
    if isinstance(section, BaseModel):
        return section.model_copy(update=values)
    return msgspec.structs.replace(section, **values)


def read_config(path: Path) -> GatewayConfig:
    """Read the configuration from a JSON file. Raise msgspec.DecodeError, ValidationError or OSError, because Slipway
    wrote the file."""
    config: GatewayConfig = decode(path.read_bytes(), GatewayConfig)
    return config


def write_config(config: GatewayConfig, path: Path) -> None:
    """Write the file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.format(encode(config), indent=1) + b"\n")
    new.replace(path)


def encode(value: Any) -> bytes:
    """Return a configuration, or a message that contains one, as JSON."""
    return msgspec.json.encode(value, enc_hook=lambda section: section.model_dump(mode="json"))


def decode(text: bytes, kind: Any) -> Any:
    """Return a value of this type from JSON. Raise msgspec.DecodeError or ValidationError."""
    return msgspec.json.decode(text, type=kind, dec_hook=_section)


def _section(section: type[Section], value: Any) -> Section:
    return section.model_validate(value, strict=False)  # JSON has lists in place of tuples
