"""Configuration of an engine process: fully resolved values (no `auto`), written as JSON by the appliance."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from engine.api.errors import ConfigError
from engine.api.golden import Recorded

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
WeightBits = Literal["stored", "int8", "int6", "int4", "fp8"]
HeadBits = Literal["auto", "stored", "int8", "int6", "int4"]
EmbeddingBits = Literal["stored", "int6"]
SpeculationMethod = Literal["off", "jump-ahead", "ngram", "suffix", "draft", "eagle", "eagle3", "mtp"]
MatmulPrecision = Literal["highest", "high", "medium", "bfloat16"]
Config = TypeVar("Config")
MEDIA_TOKENS = 1024  # default of max_media_tokens
MEDIA_CACHE = 256 * 2**20  # default of `cache.media`
MAX_RUNNING = 256  # default of max_running, and the maximum that the manifest's `auto` selects


def _check_positive(section: str, config: msgspec.Struct, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{section}.{name}={getattr(config, name)}: must be at least 1")


class Place(msgspec.Struct, frozen=True):
    """CPUs of one rank."""

    cpus: tuple[int, ...] = ()  # one for each thread of the compiled kernels
    process_cpus: tuple[int, ...] = ()  # CPUs that the whole process may use


class TaskConfig(msgspec.Struct, frozen=True):
    """Task of the checkpoint and its pooling, where they differ from the checkpoint's own configuration."""

    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    normalize: bool | None = None  # scale vectors to unit length; None: as in the checkpoint
    dimensions: tuple[int, ...] = ()  # allowed vector lengths after truncation; empty: as in the checkpoint
    score_tokens: tuple[str, str] = ("yes", "no")  # answers of a reranker; its score is the probability of the first
    text_only: bool = False  # serve only the text decoder of a multimodal model
    images: bool = True  # load the tower of a model that reads images, unless its prompts attend in both directions
    audio: bool = True  # load the tower of a model that reads audio
    encoder_only: bool = False  # serve only the towers of a multimodal model: their outputs are vectors of tokens
    accepts_embeddings: bool = False  # prompts may have embeddings of media, also without the towers


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint."""

    path: str  # a folder or a file
    dtype: Dtype = "float32"  # of activations
    max_context: int
    """Maximum number of tokens of prompt and reply together."""
    load: Literal["checkpoint", "random"] = "checkpoint"
    """With "random", weights are random numbers, and only config.json is read."""
    trust_remote_code: bool = False
    task: TaskConfig = TaskConfig()

    def __post_init__(self) -> None:
        _check_positive("model", self, "max_context")


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files in the folder of a LoRA adapter."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter."""

    name: str
    """Name by which requests select it."""
    path: str
    """Folder with adapter_config.json and adapter_model.safetensors."""


class AdapterLoadingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that enter and leave slots of the device while the engine runs."""

    max_active: int | None = None
    """Number of slots. None: the adapters of the configuration are loaded at the start, and there are no others."""
    max_rank: int = 16
    """Largest rank of an adapter."""
    host_cache: int = 1 << 30
    """Bytes of adapters that are kept ready in the host's memory, of each rank."""

    def __post_init__(self) -> None:
        _check_positive("adapter_loading", self, "max_rank")
        if self.max_active is not None:
            _check_positive("adapter_loading", self, "max_active")


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number formats of weights and KV cache."""

    weights: WeightBits = "stored"
    """Number format to which weights are quantized while they are loaded. "stored": as in the checkpoint."""
    group_size: int = 0
    """Inputs that share a scale of int8 and int4 weights. 0: the number that suits the model (`quantization_group`)."""
    head: HeadBits = "auto"
    """Number format of the head. "auto": int8 with int8, int6 and int4 weights, otherwise as in the checkpoint."""
    embedding: EmbeddingBits = "stored"
    """Number format of the token embedding in memory. "stored": as in the checkpoint."""
    folder: str | None = None
    """Folder in which quantized weights are kept for the next start."""
    kv_cache: KVDtype = "float32"

    @property
    def weight_format(self) -> str:
        """All settings that determine the numbers of quantized weights, such as `int4, groups of 64, int8 head`."""
        group = f", groups of {self.group_size}" if self.group_size else ""
        embedding = "" if self.embedding == "stored" else f", {self.embedding} embedding"
        return self.weights + group + ("" if self.head == "auto" else f", {self.head} head") + embedding

    def __post_init__(self) -> None:
        if self.group_size % 32 or self.group_size < 0:
            raise ConfigError(
                f"quantization.group_size={self.group_size}: must be a multiple of 32, or 0 for the default"
            )


class HardwareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device, CPUs and kernels."""

    device: Device = "cpu"
    gpu: int = 0
    """Device of rank 0. Rank r runs on device `gpu` + r."""
    threads: int = 1
    """Threads of each rank."""
    cpus: tuple[int, ...] = ()
    """One CPU for each thread of the compiled kernels. Empty: threads are not pinned."""
    process_cpus: tuple[int, ...] = ()
    """CPUs that the whole process may use. Empty: no restriction."""
    kernels: str = "torch"
    """A compiled variant (kernels/cpu/library.py), "triton" on a GPU, or "torch"."""
    batch_invariant: bool = False
    """Make the outputs of a request independent of the other requests in the batch."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of float32 matrix products: of torch, or with "bfloat16" of compiled kernels."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of rows of the decode steps that are captured as CUDA graphs."""
    mixed_graph_sizes: tuple[int, ...] = ()
    """Numbers of tokens of the captured steps in which a row computes several: chunks of prompts, drafts."""
    torch_compile: bool = False
    """Compile operations of torch with torch.compile: all that torch executes, or those without a Triton kernel."""
    executor: str | None = None
    """Executor of another package, whose functions replace those of torch (engine/lowering/executors.py)."""
    torch_compile_folder: str | None = None
    """Folder for compiled programs, by the hash of this configuration. None: torch's own folder."""

    def __post_init__(self) -> None:
        _check_positive("hardware", self, "threads")
        if self.cpus and len(self.cpus) != self.threads:
            cpus = list(self.cpus)
            raise ConfigError(f"hardware.cpus={cpus}: must name one CPU for each of {self.threads} threads, or none")


class ParallelismConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes of the engine."""

    tensor: int = 1
    """Number of tensor-parallel processes; this process is rank 0."""
    rank_cpus: tuple[Place, ...] = ()
    """CPUs of the ranks 1, 2, …"""

    def __post_init__(self) -> None:
        _check_positive("parallelism", self, "tensor")
        if self.rank_cpus and len(self.rank_cpus) != self.tensor - 1:
            raise ConfigError(f"rank_cpus: {len(self.rank_cpus)} entries for {self.tensor - 1} ranks besides rank 0")


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and order of steps."""

    max_running: int = MAX_RUNNING
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    overlap: bool = True
    """Plan the next step while the current one runs."""
    max_media_tokens: int = MEDIA_TOKENS
    """Embeddings of media that one step computes. A single item may have more."""

    @property
    def slots(self) -> int:
        """Maximum number of running requests; each of them gets one token in every step."""
        return num_slots(self.max_running, self.max_step_tokens)

    def __post_init__(self) -> None:
        _check_positive("engine.scheduling", self, "max_running", "max_step_tokens", "max_media_tokens")


FOLDER_METHODS: tuple[SpeculationMethod, ...] = ("draft", "eagle", "eagle3")
"""Methods whose draft model or head is in a folder of its own."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding."""

    method: SpeculationMethod = "off"
    """"ngram": drafts are the tokens that followed an earlier occurrence of the last tokens, or the forced text of a
    grammar. "suffix": the same with the tokens that followed most occurrences, in recent replies too. "jump-ahead":
    only forced text. "draft": tokens of a draft model. "eagle", "eagle3": tokens of a head that was trained for the
    model. "mtp": tokens of the prediction heads of the checkpoint."""
    model: str = ""
    """Folder of the draft model or head."""
    adaptive: bool = False
    """Pause drafts per request and per number of running requests while measurements say that they do not pay."""
    tokens: int = 4
    """Maximum number of tokens of a draft by lookup or a model, and of rows of logits for drafts alone. Forced text
    also uses the rows that other requests leave."""
    ngram_min: int = 2
    """Minimum number of last tokens that must occur earlier."""

    @property
    def enabled(self) -> bool:
        return self.method != "off"

    @property
    def has_model(self) -> bool:
        """Return whether a model computes the drafts."""
        return self.method in (*FOLDER_METHODS, "mtp")

    @property
    def rows(self) -> int:
        """Rows of logits of a step in addition to one for each running request."""
        return self.tokens if self.enabled else 0

    def __post_init__(self) -> None:
        _check_positive("speculation", self, "tokens", "ngram_min")
        if bool(self.model) != (self.method in FOLDER_METHODS):
            raise ConfigError(
                f"speculation.method={self.method}: the methods {', '.join(FOLDER_METHODS)} need speculation.model, "
                "the folder of a draft model or head, and no other method has one"
            )
        if self.adaptive and not self.enabled:
            raise ConfigError("speculation.adaptive: speculation.method=off has no drafts to pause; set it to false")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of the KV cache, and the cache of media."""

    block_tokens: int = 16
    prefix: bool = True
    """Keep the blocks of ended requests for prompts that start with the same tokens."""
    media: int = MEDIA_CACHE
    """Bytes of embeddings of media that are kept for further requests with the same media."""

    def __post_init__(self) -> None:
        _check_positive("engine.cache", self, "block_tokens")


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Planned memory of one rank, in bytes."""

    kv_cache: int
    """KV pool; the number of blocks follows from it."""
    kv_cache_measured: bool = False
    """Size the pool by the GPU memory that is free after loading, with `kv_cache` as the upper limit."""
    weights: int = 0
    """Weights, logged next to the measured value. 0: not planned."""
    workspace: int = 0
    """Process and its steps, logged next to the measured value. 0: not planned."""
    graphs: int = 0
    """Limit of the captured graphs."""
    ranks: tuple[dict[str, int], ...] = ()
    """Memory of each rank by part, with the part names of RankMemory.held."""

    def __post_init__(self) -> None:
        if self.kv_cache < 0:
            raise ConfigError(
                f"hardware.kv_cache_memory={self.kv_cache}: must be at least 0 (0 is for models without a KV cache)"
            )


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Self-test with golden prompts (engine/api/golden.py). Durations are in seconds."""

    prompts: int = 0  # number of golden prompts
    at_start: bool = True  # run them before the engine serves
    every: float = 0.0  # interval between golden prompts while the engine is idle; 0: never
    budget: float = 10.0  # time limit of the test at the start
    tolerance: float | None = None  # allowed deviation if the arithmetic differs; None: from the number formats
    locked: Recorded | None = None  # reference outputs of the lock file
    refuses: bool = True  # a deviation from the lock file makes the start fail; False: it is logged
    release: str = ""  # version of slipway, which identifies the kernels


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervision of the running engine."""

    heartbeat: str = ""
    """Path of the heartbeat file. Empty: no heartbeat."""
    probe_s: float = 0.0
    """Interval at which an idle engine runs a one-token step as a health check. 0: never."""
    self_test: SelfTest = SelfTest()


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operations and memory traffic of a step, on all ranks, from the model's program. A reach is the maximum number of
    keys of a token; 0: no limit."""

    token: int
    """Floating-point operations of a token in the matrices, without the head."""
    sample: int
    """Floating-point operations of a sampled token in the head."""
    attention: tuple[tuple[int, int], ...] = ()
    """(reach, operations for each key) of a token, as sums over layers."""
    causal: bool = True
    """Whether a token reads only the keys before it, not the keys of the entire prompt."""
    dense: int = 0
    """Bytes of the matrices that every step reads."""
    experts: int = 0
    """Bytes of all routed experts."""
    routes: tuple[tuple[float, int], ...] = ()
    """(share of the experts that a token selects, number of layers)."""
    state: tuple[tuple[int, int], ...] = ()
    """(reach, bytes for each key) that a row reads, as sums over layers."""


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of the engine."""

    step_costs: StepCosts | None = None
    """Costs with which operations and memory traffic of steps are counted; None disables the counters."""
    profiler_folder: str = ""
    """Folder for the files of the profiler. Empty: there is no profiler."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one engine process. A value of the manifest has the path of its key; the keys of the section
    `engine` are at the top."""

    model: ModelConfig
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters that requests may select."""
    adapter_loading: AdapterLoadingConfig = AdapterLoadingConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    hardware: HardwareConfig = HardwareConfig()
    memory: MemoryConfig
    scheduling: SchedulingConfig = SchedulingConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    record: str | None = None
    """File of the flight recorder."""
    record_size: int = 256 * 2**20
    """Size limit of the recording, in bytes."""
    return_routed_experts: bool = False
    """Keep the selected experts of each step, so that requests may return them."""
    lifecycle: LifecycleConfig = LifecycleConfig()
    socket: str = ""
    """Path of the Unix socket to listen on."""


def with_values(
    config: Config, values: Mapping[str, Any], replace: Callable[..., Any] = msgspec.structs.replace
) -> Config:
    """Return the configuration with these values of its fields, such as `model.path`, set in order. `replace` copies
    a section with other fields. Raises AttributeError for an unknown field."""
    for path, value in values.items():
        config = _with_value(config, path.split("."), value, replace)
    return config


def _with_value(config: Config, path: Sequence[str], value: Any, replace: Callable[..., Any]) -> Config:
    name, *inner = path
    old = getattr(config, name)
    changed: Config = replace(config, **{name: _with_value(old, inner, value, replace) if inner else value})
    return changed


def num_slots(max_running: int, max_step_tokens: int) -> int:
    """Return the maximum number of requests in a step, in which each running request gets at least one token."""
    return min(max_running, max_step_tokens)


def graph_ladder(most: int) -> tuple[int, ...]:
    """Return the sizes of captured decode steps, up to and including `most` rows. The steps between sizes are small
    where padding to the next size is relatively expensive."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32), most}
    return tuple(sorted(size for size in sizes if size <= most))


def mixed_graph_ladder(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens of captured steps with chunks of prompts, up to `most` and 512. The launches of
    larger steps take less time than their kernels."""
    sizes = {8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, min(most, 512)}
    return tuple(sorted(size for size in sizes if 2 <= size <= most))


def read_config(path: Path) -> EngineConfig:
    """Read the configuration from a JSON file. Raises ConfigError with the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def write_config(config: EngineConfig, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
