"""All that the gateway process is told: one resolved value, written as JSON by the launcher. Nothing is `auto` here."""

from pathlib import Path
from typing import Literal

import msgspec


class SecretRef(msgspec.Struct, frozen=True):
    """Where a secret lies; exactly one is set. The gateway reads it itself, so that no generated file holds it."""

    file: str | None = None
    env: str | None = None


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files of the certificate, with what leads to its root behind it, and of its private key."""

    certificate: str
    key: str
    least_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that names no value gets: manifest over generation_config.json over the API's own default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoints.connections` of the manifest; durations in seconds."""

    max: int = 8192
    max_idle: int = 1024
    max_per_address: int = 2048
    max_head_bytes: int = 64 * 2**10
    max_headers: int = 100
    head_timeout_s: float = 15.0
    body_timeout_s: float = 60.0


Task = Literal["generate", "embed", "classify", "token_embed", "token_classify", "score"]


class LateReading(msgspec.Struct, frozen=True, kw_only=True):
    """How a model of late interaction reads a query and a document: `markers` behind the first token ("": none),
    `lengths` in tokens. `skipped` tokens of a document are not compared; `expands`: queries are filled up with mask
    tokens."""

    markers: tuple[str, str]
    lengths: tuple[int, int]
    skipped: tuple[str, ...] = ()
    expands: bool = False


class PooledModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answers that pools its prompts. `labels` are those of a classifier, by number; `width` counts the
    numbers of a vector. `dimensions` are the lengths that a request may cut it to, where the model was trained for it:
    `any_dimensions` stands for all up to `width`. `activation` is what `activate` switches off: unit length of vectors,
    or what a classifier does to its logits.

    `pairs` says how a pair of texts becomes one prompt: `tokenizer`, its own way of joining two (with their segments);
    `template`, the checkpoint's template with `query` and `document`; `reranker`, that of Qwen3's yes-or-no form;
    `none`, not at all: vectors are compared, by `similarity`. A text to embed may have `max_input` tokens, in
    pieces of a window each (0: one piece). `prompts` are texts put in front, by name, and
    `default_prompt` is the name of that which goes without being asked for ("": none). `late`: of a model that compares
    vectors of tokens."""

    labels: tuple[str, ...] = ()
    width: int = 0
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    max_input: int = 0
    activation: Literal["none", "normalize", "softmax", "sigmoid"] = "none"
    pairs: Literal["none", "tokenizer", "template", "reranker"] = "none"
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    late: LateReading | None = None


class SourceModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder-decoder model can read: a source of up to `longest` tokens, and a reply of up to `reply`
    with what it begins with, which is `begins` unless a request says otherwise. No reply has one of `never`."""

    longest: int
    reply: int
    begins: tuple[int, ...]
    never: tuple[tuple[int, ...], ...] = ()


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engines` are the Unix sockets of the engine processes; `names` the served names, canonical first. Durations in
    seconds, sizes in bytes. `eos_token_ids` end a reply (config.json and generation_config.json). `vocab_size` counts
    the model's logits. `format` is how it writes calls and reasoning, `model_type` what config.json calls it.
    `outputs_sha256` changes with what may change a reply's tokens, and with nothing else. `hold_s`: new requests wait
    for an engine whose restart takes no longer. `policy` is the engines' order of requests. In the first
    `drain_linger_s` of the `drain_s` that open requests get after SIGTERM new ones are still taken. `pardons` is the
    pipe to the sentinel (appliance/supervisor/monitor.py), `control` the socket on which the launcher reloads
    (server/control.py). `door` is the socket on which the launcher lends the listener (runtime/listener.py); empty: the
    gateway opens its own. `run` is the run directory: the gateway writes there what was open when an engine died, and
    reads whether the appliance is parked. What happened to the last `stories` sequences is kept. `journal` is the file
    of durable replies, empty for none: they are kept for `journal_keep_s`, in `journal_bytes`, and generated on for
    `linger_s` without a client. `key_requests_per_minute` and `key_tokens_per_minute` limit each API key that names no
    limit of its own. `tls`: the listener speaks it. `chaos`: faults may be made on purpose. `responses` is the file of
    stored responses, empty for none: at most `responses_count` and `responses_bytes` of them, each for
    `responses_keep_s`. `tasks` are what the model can be asked for, and `pooled` is set unless that is generation
    alone. `sources`: of a model that reads a prompt by an encoder and replies by a decoder."""

    host: str
    port: int
    names: tuple[str, ...]
    model: str
    engines: tuple[str, ...]
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tasks: tuple[Task, ...] = ("generate",)
    pooled: PooledModel | None = None
    sources: SourceModel | None = None
    chat_template: str | None = None
    format: str = "auto"
    model_type: str = ""
    api_keys: SecretRef | None = None
    tls: Tls | None = None
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
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
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
    drain_s: float = 8.0
    drain_linger_s: float = 0.0
    hold_s: float = 10.0
    pardons: str = ""
    control: str = ""
    door: str = ""
    run: str = ""
    journal: str = ""
    journal_keep_s: float = 900.0
    journal_bytes: int = 64 * 2**20
    key_requests_per_minute: int | None = None
    key_tokens_per_minute: int | None = None
    linger_s: float = 60.0
    chaos: bool = False
    responses: str = ""
    responses_keep_s: float = 86400.0
    responses_bytes: int = 64 * 2**20
    responses_count: int = 10_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    log_outputs: Literal["off", "final", "deltas"] = "off"
    vllm_metrics: bool = True
    stories: int = 1000
    version: str = ""
    manifest_sha256: str = ""
    outputs_sha256: str = ""

    @property
    def system_fingerprint(self) -> str:
        """Of replies: the version, and what may change their tokens."""
        return f"slipway-{self.version}-{self.outputs_sha256[:8]}"


def read_config(path: Path) -> GatewayConfig:
    """The configuration in a JSON file; raises msgspec.DecodeError or OSError: the file is our own."""
    return msgspec.json.decode(path.read_bytes(), type=GatewayConfig)


def write_config(config: GatewayConfig, path: Path) -> None:
    """In one piece, whoever reads it meanwhile."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
    new.replace(path)
