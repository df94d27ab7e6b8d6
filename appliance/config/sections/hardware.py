"""Devices, processes and memory: `parallelism` and `hardware`."""

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.key import EVERYTHING, NUMBERS, SERVICE, Effect, declare
from appliance.config.sections.values import Auto, BytesOrAuto, Count, CpuList, Section


class Parallelism(Section):
    data: Annotated[int, Field(ge=1, le=64)] = declare(
        1,
        effect=Effect("service", outputs="rounding", memory=True),
        aliases={
            "vLLM": "data_parallel_size",
            "SGLang": "dp_size",
            "KServe": ("minReplicas", "maxReplicas"),
            "synonyms": ("replicas", "workers"),
        },
        flags=("-dp",),
        example=2,
    )
    """Number of engines, each with the complete model; requests go to the least loaded one."""
    # each rank sums its own inputs first and caches its own quantized share
    tensor: Annotated[int, Field(ge=1, le=64)] | Auto = declare(
        1,
        effect=EVERYTHING,
        target="engine.parallelism.tensor",
        aliases={
            "vLLM": "tensor_parallel_size",
            "TGI": "num_shard",
            "DJL Serving": "tensor_parallel_degree",
            "NVIDIA NIM": "NIM_TENSOR_PARALLEL_SIZE",
        },
        flags=("-tp",),
        examples=(2, 8),
    )
    """Ranks that share each engine's model, one per GPU or NUMA node; auto: the fewest GPUs that hold it."""


class Capacity(Section):
    requests: Count = declare(1, effect=Effect("engine", outputs="rounding", memory=True), example=16)
    """Concurrent requests that the KV caches of all engines together must hold; otherwise the start is refused."""
    tokens: Annotated[int, Field(ge=2)] | Auto = declare(
        "auto", effect=Effect("engine", outputs="rounding", memory=True), example=8192
    )
    """Tokens of prompt and reply of each of them; auto is model.max_context."""


class Hardware(Section):
    device: Literal["auto", "cpu", "cuda"] = declare("auto", effect=EVERYTHING, target="engine.hardware.device")
    """Device of the engine; auto uses a GPU if there is one."""
    threads: Count | Auto = declare(
        "auto",
        effect=Effect("engine", outputs="rounding"),
        target="engine.hardware.threads",
        aliases={"llama.cpp": "n_threads", "Ollama": "num_thread"},
        example=4,
    )
    """CPU threads of one engine; auto divides the cores that the cgroup permits among the engines."""
    # the gateway and the restart monitor run on the other CPUs
    cpus: Literal["auto", "none"] | CpuList = declare("auto", effect=SERVICE, example="0-3,8")
    """CPUs of the engines' threads, such as 0-3,8; auto pins threads on exclusive cores, none never pins."""
    reserved_cores: Annotated[int, Field(ge=0)] | Auto = declare("auto", effect=SERVICE, example=1)
    """Cores reserved for the gateway and the system; auto is 1 above 8 cores, otherwise 0."""
    kernels: Literal["auto", "torch", "triton", "base", "neon", "avx2", "avxvnni", "avx512", "avx512bf16", "amx"] = (
        declare(
            "auto",
            effect=Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True),
            target="engine.hardware.kernels",
        )
    )
    """Kernels of the engine: auto is triton on a GPU, the fastest compiled kernels on a CPU, otherwise torch."""
    batch_invariant: bool = declare(False, effect=Effect("engine", outputs="rounding", caches=("prefix",), graphs=True))
    """Make the results of a request independent of concurrent requests; slower on a GPU, free on a CPU."""
    matmul_precision: Literal["highest", "high", "medium", "bfloat16"] = declare(
        "highest", effect=NUMBERS, target="engine.hardware.matmul_precision"
    )
    """Precision of float32 products: highest is exact; with torch, high is TF32 and medium is bfloat16, if supported;
    bfloat16 needs compiled kernels for AMX or AVX-512 BF16."""
    torch_compile: bool = declare(
        False, effect=Effect("engine", outputs="rounding", graphs=True), target="engine.hardware.torch_compile"
    )
    """Compile operations of torch with torch.compile: all that torch kernels execute, or those without a Triton kernel;
    the first start takes longer. It needs a compiler, of C++ on a CPU; images have none."""
    executor: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = declare(
        None,
        effect=Effect("engine", outputs="yes", caches=("prefix",), graphs=True, memory=True),
        target="engine.hardware.executor",
        example="toy",
    )
    """Executor of an installed package: its functions execute operations in place of torch's, with torch kernels."""
    graphs: bool | Auto = declare("auto", effect=Effect("engine", outputs="rounding", graphs=True, memory=True))
    """Capture decode steps as CUDA graphs at start; auto does so for generating models with Triton kernels, which are
    required."""
    kv_cache_memory: BytesOrAuto = declare(
        "auto",
        effect=Effect("engine", outputs="rounding", memory=True),
        aliases={"synonyms": "kv_cache_space"},
        example="4GiB",
    )
    """Memory for the KV cache of one engine, such as 4GiB; auto is the rest of memory_share after the weights."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = declare(
        0.85,
        effect=Effect("engine", outputs="rounding", memory=True),
        aliases={
            "vLLM": "gpu_memory_utilization",
            "SGLang": "mem_fraction_static",
            "TGI": "cuda_memory_fraction",
            "NVIDIA NIM": "NIM_KVCACHE_PERCENT",
            "synonyms": "utilization",
        },
        example=0.9,
    )
    """Share of the free memory at start that an engine may use for weights, cache and workspace."""
    capacity: Capacity = Capacity()
    """Required capacity of the KV cache; model.max_context: auto becomes the longest context that provides it."""
