"""All that an engine process is told: one resolved value, written as JSON by the appliance. Nothing is `auto` here."""

from pathlib import Path
from typing import Literal

import msgspec

from engine.api.errors import ConfigError
from engine.api.golden import Recorded

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
WeightBits = Literal["stored", "int8", "int4", "fp8"]
MatmulPrecision = Literal["highest", "high", "medium"]
MAX_RUNNING = 256


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs: see `cpus` and `process_cpus` of EngineConfig."""

    cpus: tuple[int, ...] = ()
    process_cpus: tuple[int, ...] = ()


class SelfTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Golden prompts (engine/api/golden.py): so many are computed before the engine serves (`at_start`), in at most
    `budget_s`, and without work one every `every_s` (0: never). `tolerance`: the band where arithmetic differs (None:
    by the number formats). `locked` are those of the lock; what differs from them ends a start for good where it
    `refuses`, else it is told. `release`: of slipway, which tells kernels apart."""

    prompts: int = 0
    at_start: bool = True
    every_s: float = 0.0
    budget_s: float = 10.0
    tolerance: float | None = None
    locked: Recorded | None = None
    refuses: bool = True
    release: str = ""


class TaskConfig(msgspec.Struct, frozen=True):
    """What the checkpoint is served for, and how it pools, where that is not as the checkpoint says. `normalize`: None
    as it says. `dimensions`: lengths to which vectors may be cut; empty: those that it names. `score_tokens`: the
    answers of a reranker whose score is the probability of the first. `text_only`: the text decoder of a model that
    reads more than text."""

    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    pool: Literal["auto", "cls", "last", "mean", "max"] = "auto"
    normalize: bool | None = None
    dimensions: tuple[int, ...] = ()
    score_tokens: tuple[str, str] = ("yes", "no")
    text_only: bool = False


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_bytes` is the memory of the KV pool; the number of blocks follows from it. `max_context` counts prompt and
    reply. `weight_bytes` and `workspace_bytes` are what was planned for weights and for process and steps (0: nothing
    was), which the log shows beside what they took; `planned` has the same of each rank by part, by the names of
    RankMemory.held. `record` is the file of the flight recorder, or None, and `record_bytes` the most that it keeps.
    `socket` is the Unix socket to listen on. `kernels` names a compiled variant (kernels/cpu/library.py), triton on a
    GPU, or torch. `weights` other than stored are rounded as they are loaded and kept for the next start in the folder
    `weight_cache`, if there is one. `kv_measured`: a GPU's pool takes the memory that is really left, at most
    `kv_bytes`. `invariant`: a request's numbers do not depend on the requests beside it. `matmul_precision`: of torch's
    float32 products. Decode steps of `graph_sizes` rows are captured in at most `graph_bytes`. `load`: random weights
    need no more of the checkpoint than its config.json. `cpus`: one for each thread of compiled kernels;
    `process_cpus`: those that the process as a whole may use. Empty: nothing is bound. `tensor`: processes that share
    the model, each with `threads` threads, of which this is rank 0; bytes are those of one of them. `rank_cpus`: places
    of the ranks 1 …; on GPUs rank r computes on device `gpu` + r. `pulse`: the file of its signs of life, if somebody
    watches them; an idle engine gives itself a token to compute every `probe_s` seconds (0: never).
    `self_test`: the golden prompts that it compares itself with."""

    model: str
    socket: str = ""
    device: Device = "cpu"
    dtype: Dtype = "float32"
    kv_dtype: KVDtype = "float32"
    kv_bytes: int
    kv_measured: bool = False
    weight_bytes: int = 0
    planned: tuple[dict[str, int], ...] = ()
    workspace_bytes: int = 0
    max_context: int
    block_tokens: int = 16
    max_running: int = MAX_RUNNING
    max_step_tokens: int = 512
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    threads: int = 1
    cpus: tuple[int, ...] = ()
    process_cpus: tuple[int, ...] = ()
    tensor: int = 1
    rank_cpus: tuple[Place, ...] = ()
    gpu: int = 0
    kernels: str = "torch"
    invariant: bool = False
    matmul_precision: MatmulPrecision = "highest"
    graph_sizes: tuple[int, ...] = ()
    graph_bytes: int = 0
    load: Literal["checkpoint", "random"] = "checkpoint"
    weights: WeightBits = "stored"
    weight_cache: str | None = None
    trust_remote_code: bool = False
    task: TaskConfig = TaskConfig()
    record: str | None = None
    record_bytes: int = 256 * 2**20
    pulse: str = ""
    probe_s: float = 0.0
    self_test: SelfTest = SelfTest()

    def __post_init__(self) -> None:
        if self.kv_bytes < 0:
            raise ConfigError(f"kv_bytes={self.kv_bytes}: must be at least 0, which is for models that keep nothing")
        for name in ("max_context", "block_tokens", "max_running", "max_step_tokens", "threads", "tensor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.cpus and len(self.cpus) != self.threads:
            raise ConfigError(f"cpus={list(self.cpus)}: must be one for each of {self.threads} threads, or none")
        if self.rank_cpus and len(self.rank_cpus) != self.tensor - 1:
            raise ConfigError(f"rank_cpus: {len(self.rank_cpus)} places for {self.tensor - 1} ranks beside the first")


def graph_ladder(most: int) -> tuple[int, ...]:
    """Sizes of captured decode steps up to `most` rows, itself the last: fine where a row more costs much, coarse where
    it does not."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32), most}
    return tuple(sorted(size for size in sizes if size <= most))


def read_config(path: Path) -> EngineConfig:
    """The configuration in a JSON file. Raises ConfigError naming the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def write_config(config: EngineConfig, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
