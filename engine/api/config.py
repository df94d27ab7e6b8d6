"""Configuration of an engine process: fully resolved values (no `auto`), written as JSON by the appliance."""

from pathlib import Path
from typing import Literal

import msgspec

from engine.api.errors import ConfigError
from engine.api.golden import Recorded

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
WeightBits = Literal["stored", "int8", "int4", "fp8"]
HeadBits = Literal["auto", "stored", "int8", "int4"]
MatmulPrecision = Literal["highest", "high", "medium", "bfloat16"]
MAX_RUNNING = 256  # default of max_running, and the maximum that the manifest's `auto` selects


class Place(msgspec.Struct, frozen=True):
    """CPUs of one rank."""

    cpus: tuple[int, ...] = ()  # one for each thread of the compiled kernels
    process_cpus: tuple[int, ...] = ()  # CPUs that the whole process may use


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Self-test with golden prompts (engine/api/golden.py)."""

    prompts: int = 0  # number of golden prompts
    at_start: bool = True  # run them before the engine serves
    every_s: float = 0.0  # interval between golden prompts while the engine is idle; 0: never
    budget_s: float = 10.0  # time limit of the test at the start
    tolerance: float | None = None  # allowed deviation if the arithmetic differs; None: from the number formats
    locked: Recorded | None = None  # reference outputs of the lock file
    refuses: bool = True  # a deviation from the lock file makes the start fail; False: it is logged
    release: str = ""  # version of slipway, which identifies the kernels


class TaskConfig(msgspec.Struct, frozen=True):
    """Task of the checkpoint and its pooling, where they differ from the checkpoint's own configuration."""

    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    normalize: bool | None = None  # scale vectors to unit length; None: as in the checkpoint
    dimensions: tuple[int, ...] = ()  # allowed vector lengths after truncation; empty: as in the checkpoint
    score_tokens: tuple[str, str] = ("yes", "no")  # answers of a reranker; its score is the probability of the first
    text_only: bool = False  # serve only the text decoder of a multimodal model


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one engine process. Byte counts are those of one rank."""

    model: str
    """Path of the checkpoint: a folder or a file."""
    socket: str = ""
    """Path of the Unix socket to listen on."""
    device: Device = "cpu"
    dtype: Dtype = "float32"
    kv_dtype: KVDtype = "float32"
    kv_bytes: int
    """Memory of the KV pool; the number of blocks follows from it."""
    kv_measured: bool = False
    """Size the pool by the GPU memory that is free after loading, with `kv_bytes` as the upper limit."""
    weight_bytes: int = 0
    """Planned memory of the weights, logged next to the measured value. 0: not planned."""
    planned: tuple[dict[str, int], ...] = ()
    """Planned memory of each rank by part; the part names are those of RankMemory.held."""
    workspace_bytes: int = 0
    """Planned memory of the process and its steps, logged next to the measured value. 0: not planned."""
    max_context: int
    """Maximum number of tokens of prompt and reply together."""
    block_tokens: int = 16
    max_running: int = MAX_RUNNING
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    """Plan the next step while the current one runs."""
    threads: int = 1
    """Threads of each rank."""
    cpus: tuple[int, ...] = ()
    """One CPU for each thread of the compiled kernels. Empty: threads are not pinned."""
    process_cpus: tuple[int, ...] = ()
    """CPUs that the whole process may use. Empty: no restriction."""
    tensor: int = 1
    """Number of tensor-parallel processes; this process is rank 0."""
    rank_cpus: tuple[Place, ...] = ()
    """CPUs of the ranks 1, 2, …"""
    gpu: int = 0
    """Device of rank 0. Rank r runs on device `gpu` + r."""
    kernels: str = "torch"
    """A compiled variant (kernels/cpu/library.py), "triton" on a GPU, or "torch"."""
    invariant: bool = False
    """Make the outputs of a request independent of the other requests in the batch."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of float32 matrix products: of torch, or with "bfloat16" of compiled kernels."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of rows of the decode steps that are captured as CUDA graphs."""
    graph_bytes: int = 0
    """Memory limit of the captured graphs."""
    load: Literal["checkpoint", "random"] = "checkpoint"
    """With "random", weights are random numbers, and only config.json is read."""
    weights: WeightBits = "stored"
    """Number format to which weights are quantized while they are loaded. "stored": as in the checkpoint."""
    weight_group: int = 0
    """Inputs that share a scale of int8 and int4 weights. 0: the number that suits the model (`quantization_group`)."""
    head: HeadBits = "auto"
    """Number format of the head. "auto": int8 with int8 and int4 weights, otherwise as in the checkpoint."""
    weight_cache: str | None = None
    """Folder in which quantized weights are kept for the next start."""
    trust_remote_code: bool = False
    task: TaskConfig = TaskConfig()
    record: str | None = None
    """File of the flight recorder."""
    record_bytes: int = 256 * 2**20
    """Size limit of the recording."""
    pulse: str = ""
    """Path of the heartbeat file. Empty: no heartbeat."""
    probe_s: float = 0.0
    """Interval at which an idle engine runs a one-token step as a health check. 0: never."""
    self_test: SelfTest = SelfTest()

    @property
    def slots(self) -> int:
        """Maximum number of running requests; each of them gets one token in every step."""
        return num_slots(self.max_running, self.max_step_tokens)

    @property
    def weight_format(self) -> str:
        """All settings that determine the numbers of quantized weights, such as `int4, groups of 64, int8 head`."""
        group = f", groups of {self.weight_group}" if self.weight_group else ""
        return self.weights + group + ("" if self.head == "auto" else f", {self.head} head")

    def __post_init__(self) -> None:
        if self.weight_group % 32 or self.weight_group < 0:
            raise ConfigError(f"weight_group={self.weight_group}: must be a multiple of 32, or 0 for the default")
        if self.kv_bytes < 0:
            raise ConfigError(f"kv_bytes={self.kv_bytes}: must be at least 0 (0 is for models without a KV cache)")
        for name in ("max_context", "block_tokens", "max_running", "max_step_tokens", "threads", "tensor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.cpus and len(self.cpus) != self.threads:
            raise ConfigError(f"cpus={list(self.cpus)}: must name one CPU for each of {self.threads} threads, or none")
        if self.rank_cpus and len(self.rank_cpus) != self.tensor - 1:
            raise ConfigError(f"rank_cpus: {len(self.rank_cpus)} entries for {self.tensor - 1} ranks besides rank 0")


def num_slots(max_running: int, max_step_tokens: int) -> int:
    """Return the maximum number of requests in a step, in which each running request gets at least one token."""
    return min(max_running, max_step_tokens)


def graph_ladder(most: int) -> tuple[int, ...]:
    """Return the sizes of captured decode steps, up to and including `most` rows. The steps between sizes are small
    where padding to the next size is relatively expensive."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32), most}
    return tuple(sorted(size for size in sizes if size <= most))


def read_config(path: Path) -> EngineConfig:
    """Read the configuration from a JSON file. Raises ConfigError with the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def write_config(config: EngineConfig, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
