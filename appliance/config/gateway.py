"""Configuration of the gateway process: one resolved value without `auto`, which the launcher writes as JSON."""

from pathlib import Path
from typing import Literal

import msgspec


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


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoints.connections` of the manifest. Durations are in seconds."""

    max: int = 8192
    max_idle: int = 1024
    max_per_address: int = 2048
    max_head_bytes: int = 64 * 2**10
    max_headers: int = 100
    head_timeout_s: float = 15.0
    body_timeout_s: float = 60.0


Task = Literal["generate", "embed", "classify", "token_embed", "token_classify", "score"]


class LateReading(msgspec.Struct, frozen=True, kw_only=True):
    """Input format of a late-interaction model."""

    markers: tuple[str, str]  # markers after the first token of a query and of a document; "": none
    lengths: tuple[int, int]  # maximum tokens of a query and of a document
    skipped: tuple[str, ...] = ()  # document tokens that are not compared
    expands: bool = False  # queries are padded with mask tokens


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


class EncoderLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an encoder-decoder model."""

    max_input: int  # maximum tokens of the encoder input
    reply: int  # maximum tokens of a reply, including `decoder_start_ids`
    decoder_start_ids: tuple[int, ...]  # first tokens of a reply, unless the request sets others
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that a reply must not contain


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the gateway. Durations are in seconds, sizes in bytes."""

    host: str
    port: int
    names: tuple[str, ...]  # served names, canonical first
    model: str
    engines: tuple[str, ...]  # Unix sockets of the engine processes
    max_context: int
    vocab_size: int  # size of the model's logits
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a reply (config.json and generation_config.json)
    tasks: tuple[Task, ...] = ("generate",)  # tasks that requests may use
    pooled: PooledModel | None = None  # set unless the only task is generation
    encoder: EncoderLimits | None = None  # set for encoder-decoder models
    chat_template: str | None = None
    format: str = "auto"  # format of tool calls and reasoning
    model_type: str = ""  # model type in config.json
    api_keys: SecretRef | None = None
    tls: Tls | None = None  # the listener uses TLS if set
    compat: Literal["openai", "vllm"] = "openai"
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    invocations_without_key: bool = False
    cors_origins: tuple[str, ...] = ()
    keep_alive_s: float = 75.0
    stream_keep_alive_s: float = 15.0
    connections: ConnectionLimits = ConnectionLimits()
    trust_request_chat_template: bool = False
    docs: bool = True
    page: bool = True
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"  # order of requests in the engines
    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    max_body_bytes: int = 32 * 2**20
    max_output_tokens: int | None = None
    max_choices: int = 128
    max_prompts: int = 1024
    max_logprobs: int = 20
    max_stop: int = 16
    grammar_bytes: int = 256 * 2**10
    grammar_time_s: float = 5.0
    grammar_memory_bytes: int = 512 * 2**20
    sampling: SamplingDefaults = SamplingDefaults()
    drain_s: float = 8.0  # time for open requests after SIGTERM
    drain_linger_s: float = 0.0  # first part of drain_s, in which new requests are still accepted
    hold_s: float = 10.0  # maximum wait of new requests for a restarting engine
    crash_exemptions: str = ""  # pipe to the restart monitor (appliance/runtime/crash_exemption.py)
    control: str = ""  # socket on which the launcher reloads the configuration (server/control.py)
    listener: str = ""
    """Socket on which the launcher passes its listener (runtime/listener.py); "": the gateway opens its own."""
    run: str = ""  # run directory, for the in-flight snapshot of a crashed engine and the halted state
    journal: str = ""  # file of durable replies; "" disables them
    journal_keep_s: float = 900.0  # retention time of durable replies
    journal_bytes: int = 64 * 2**20  # maximum size of durable replies
    key_requests_per_minute: int | None = None  # limit of API keys that set none
    key_tokens_per_minute: int | None = None  # limit of API keys that set none
    linger_s: float = 60.0  # time that a durable reply is generated after its client disconnects
    chaos: bool = False  # fault injection is allowed
    responses: str = ""  # file of stored responses; "" disables them
    responses_keep_s: float = 86400.0  # retention time of stored responses
    responses_bytes: int = 64 * 2**20  # maximum size of stored responses
    responses_count: int = 10_000  # maximum number of stored responses
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    log_outputs: Literal["off", "final", "deltas"] = "off"
    vllm_metrics: bool = True
    timelines: int = 1000  # number of sequences with a request timeline
    version: str = ""
    manifest_sha256: str = ""
    outputs_sha256: str = ""  # hash of all inputs that can change generated tokens

    @property
    def system_fingerprint(self) -> str:
        """Fingerprint in replies: the version, and a hash of all inputs that can change generated tokens."""
        return f"slipway-{self.version}-{self.outputs_sha256[:8]}"


def read_config(path: Path) -> GatewayConfig:
    """Read the configuration from a JSON file. Raise msgspec.DecodeError or OSError, because Slipway wrote the file."""
    return msgspec.json.decode(path.read_bytes(), type=GatewayConfig)


def write_config(config: GatewayConfig, path: Path) -> None:
    """Write the file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
    new.replace(path)
