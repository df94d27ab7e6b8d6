"""The plan: every `auto` is resolved, memory is divided, and setups that do not fit are refused. Expected byte counts
are computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.config import exits
from appliance.config.keys import leaves
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, Settings, load
from appliance.hardware.machine import Gpu, Machine
from appliance.hardware.topology import Topology
from appliance.planning.derivation import summed
from appliance.planning.host import appliance_bytes
from appliance.planning.memory import CPU_CACHE_BYTES, Memory
from appliance.planning.plan import Plan, fingerprint, plan
from appliance.planning.workspace import PROCESS_BYTES, SAMPLED_CANDIDATES, StepSize, workspace
from engine.api.config import EngineConfig
from engine.formats.format import Format
from engine.formats.ggml import Blocks, IntegerBlocks, Permuted
from engine.formats.gptq import Gptq
from engine.formats.native import Groups
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, Attention, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, Rope
from engine.models.quantized import Quantization
from engine.models.sources import linear_paths

BASE = "apiVersion: slipway/v2\nmodel: {source: {path: /models/tiny}}\n"
GIB, MIB = 2**30, 2**20
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, CONTEXT = 3, 32, 4, 2, 8, 48, 131, 1000
ATTENTION = HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS)
PARAMETERS = VOCAB * HIDDEN + HIDDEN + LAYERS * (ATTENTION + 3 * HIDDEN * INNER + 2 * HIDDEN)
NORMS = HIDDEN + LAYERS * 2 * HIDDEN
PADDED_VOCAB = 160  # whole tiles of compiled kernels, 32 outputs each
PADDING = (PADDED_VOCAB - VOCAB) * HIDDEN
BLOCK = LAYERS * 2 * 16 * KV_HEADS * DIM * 2  # bytes of 16 tokens in bfloat16
CPU = Machine(cores=6, cores_from="affinity", memory_free=20 * GIB, memory_from="MemAvailable", no_gpu="no driver")
H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0))
GPU_HOST = Machine(cores=16, cores_from="affinity", memory_free=128 * GIB, memory_from="MemAvailable", gpus=(H100,))


def model(window: int | None = None, dim: int = DIM) -> Model:
    norm = RMSNorm(size=HIDDEN, eps=1e-6)
    attention = Attention(
        hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=dim, rope=Rope(dim=dim, theta=1e4), window=window
    )
    block = (
        ResidualBlock(body=attention, before=RMSNorm(size=HIDDEN, eps=1e-6, name="input_layernorm")),
        ResidualBlock(
            body=MLP(hidden=HIDDEN, intermediate_size=INNER),
            before=RMSNorm(size=HIDDEN, eps=1e-6, name="post_layernorm"),
        ),
    )
    embed = Embedding(vocab=VOCAB, hidden=HIDDEN)
    return Model(embed=embed, blocks=(block,) * LAYERS, norm=norm, head=Head(tied=True), max_context=CONTEXT)


def checkpoint(generation: dict[str, object] | None = None, window: int | None = None, dim: int = DIM) -> Checkpoint:
    return Checkpoint(
        path=Path("/models/tiny"),
        architecture="TinyForCausalLM",
        config={"eos_token_id": 7},
        generation=generation or {},
        model=model(window, dim),
        dtype="bfloat16",
        eos_token_ids=(7, 9),
        tensors={},
    )


def settings(tmp_path: Path, *sets: str, text: str = BASE) -> Settings:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return load(Given(path, tuple(Option(f"--set {one.partition('=')[0]}", *one.split("=", 1)) for one in sets)))


def planned(tmp_path: Path, *sets: str, machine: Machine = CPU, facts: Checkpoint | None = None) -> Plan:
    return plan(settings(tmp_path, *sets), facts or checkpoint(), machine)


def refused(tmp_path: Path, *sets: str, machine: Machine = CPU) -> Refused:
    with pytest.raises(Refused) as caught:
        planned(tmp_path, *sets, machine=machine)
    return caught.value


def free(count: int) -> Machine:
    return Machine(
        cores=CPU.cores, cores_from="affinity", memory_free=count, memory_from="cgroup limit", no_gpu="no driver"
    )


def reason(found: Plan, key: str) -> tuple[object, str]:
    return next((one.resolved, one.reason) for one in found.effective if one.key == key)


def test_auto_on_a_cpu_is_float32_with_16_bit_pages_small_steps_and_all_cores(tmp_path: Path) -> None:
    engine = planned(tmp_path).engines[0]
    assert (engine.hardware.device, engine.model.dtype, engine.quantization.kv_cache) == ("cpu", "float32", "bfloat16")
    assert (engine.scheduling.max_step_tokens, engine.hardware.threads, engine.model.max_context) == (512, 6, CONTEXT)


def test_auto_on_a_gpu_is_the_checkpoints_type_and_wide_steps(tmp_path: Path) -> None:
    engine = planned(tmp_path, machine=GPU_HOST).engines[0]
    assert (engine.hardware.device, engine.model.dtype, engine.quantization.kv_cache) == (
        "cuda",
        "bfloat16",
        "bfloat16",
    )
    assert engine.scheduling.max_step_tokens == 8192


def test_explicit_values_are_not_changed(tmp_path: Path) -> None:
    sets = ("model.dtype=float16", "quantization.kv_cache=bfloat16", "hardware={device: cpu, threads: 3}")
    more = ("engine={scheduling: {max_step_tokens: 77, max_running: 5, policy: priority, overlap: false}}",)
    found = planned(tmp_path, *sets, *more, "engine.cache={block_tokens: 7, prefix: false}", machine=GPU_HOST)
    engine = found.engines[0]
    assert (engine.model.dtype, engine.quantization.kv_cache, engine.hardware.device, engine.hardware.threads) == (
        "float16",
        "bfloat16",
        "cpu",
        3,
    )
    assert (
        engine.scheduling.max_step_tokens,
        engine.scheduling.max_running,
        engine.scheduling.policy,
        engine.scheduling.overlap,
    ) == (77, 5, "priority", False)
    assert (engine.cache.block_tokens, engine.cache.prefix) == (7, False)


def test_memory_is_the_sum_of_its_parts_and_within_the_share(tmp_path: Path) -> None:
    found = planned(tmp_path)
    memory, engine = found.memory, found.engines[0]
    assert (engine.memory.weights, engine.memory.workspace) == (memory.weights, memory.workspace)
    assert memory.weights == PARAMETERS * 4
    assert memory.block_bytes == BLOCK
    assert memory.workspace > PROCESS_BYTES["cpu"]
    assert memory.total == memory.weights + memory.workspace + memory.cache <= memory.budget == int(20 * GIB * 0.85)


def test_auto_takes_no_more_cache_than_all_running_requests_can_use(tmp_path: Path) -> None:
    found = planned(tmp_path, "engine.scheduling.max_running=3")
    per_request = -(-CONTEXT // 16)
    assert found.memory.cache == (3 * per_request + 1) * BLOCK
    assert (found.memory.blocks, found.memory.whole_contexts) == (3 * per_request + 1, 3)
    assert found.engines[0].memory.kv_cache == found.memory.cache


def test_auto_takes_a_bounded_part_of_a_cpu_hosts_memory(tmp_path: Path) -> None:
    long = replace(checkpoint(), model=replace(model(), max_context=100 * CONTEXT))
    found = planned(tmp_path, machine=free(200 * GIB), facts=long)
    assert found.memory.cache == CPU_CACHE_BYTES < 256 * 100 * CONTEXT // 16 * BLOCK
    assert "the maximum of auto on a CPU" in reason(found, "hardware.kv_cache_memory")[1]


def test_auto_context_shrinks_to_the_cache_with_a_reason(tmp_path: Path) -> None:
    rest = planned(tmp_path, "model.max_context=64").memory
    needed = rest.weights + rest.workspace + 5 * BLOCK + BLOCK // 2  # the null block and four others
    found = planned(tmp_path, machine=free(needed + appliance_bytes(VOCAB)))
    assert (found.engines[0].model.max_context, found.memory.blocks, found.memory.tokens) == (64, 5, 64)
    assert "capacity of the cache" in reason(found, "model.max_context")[1]


def test_a_window_needs_blocks_for_its_reach_only(tmp_path: Path) -> None:
    whole = planned(tmp_path, "engine.scheduling.max_running=1").memory.blocks
    windowed = planned(tmp_path, "engine.scheduling.max_running=1", facts=checkpoint(window=32)).memory.blocks
    assert (whole, windowed) == (64, 36)  # the window reaches 31 tokens back from a step of 512


def test_several_engines_share_cores_and_memory(tmp_path: Path) -> None:
    one, two = planned(tmp_path), planned(tmp_path, "parallelism.data=2")
    assert len(two.engines) == 2 and two.engines[0].hardware.threads == 3
    assert two.memory.budget == one.memory.budget // 2
    assert planned(tmp_path, "parallelism.data=7").engines[0].hardware.threads == 1


def test_several_engines_record_into_files_of_their_own(tmp_path: Path) -> None:
    records = [engine.record for engine in planned(tmp_path, "parallelism.data=2", "engine.record=run.log").engines]
    assert records == [str(tmp_path / "run-0.log"), str(tmp_path / "run-1.log")]


def test_a_context_beyond_the_models_is_refused_with_the_limit(tmp_path: Path) -> None:
    error = refused(tmp_path, "model.max_context=1001")
    assert str(error) == (
        "--set model.max_context: 1001: the checkpoint supports 1000 tokens; use at most 1000, or auto"
    )
    assert error.cause == exits.MANIFEST
    assert planned(tmp_path, "model.max_context=1000").engines[0].model.max_context == 1000


def test_a_missing_gpu_is_an_error_with_the_reason(tmp_path: Path) -> None:
    message = str(refused(tmp_path, "hardware.device=cuda"))
    assert "no usable GPU here (no driver); use auto or cpu" in message


@pytest.mark.parametrize("count", [0, 10 * MIB, 400 * MIB])
def test_no_memory_for_one_block_is_refused_with_sizes_and_keys(tmp_path: Path, count: int) -> None:
    error = refused(tmp_path, machine=free(count))
    assert error.cause == exits.MEMORY
    for words in ("hardware.memory_share", "no memory for one block", "free by cgroup limit", "are needed"):
        assert words in str(error)


def test_the_last_byte_decides_whether_one_block_fits(tmp_path: Path) -> None:
    rest = planned(tmp_path, "hardware.memory_share=1", "model.max_context=2").memory
    enough = rest.weights + rest.workspace + 2 * BLOCK + appliance_bytes(VOCAB)
    assert planned(tmp_path, "hardware.memory_share=1", machine=free(enough)).memory.blocks == 2
    refused(tmp_path, "hardware.memory_share=1", machine=free(enough - 1))


def test_a_wanted_context_that_does_not_fit_is_refused_with_the_size_it_needs(tmp_path: Path) -> None:
    error = refused(tmp_path, "model.max_context=1000", f"hardware.kv_cache_memory={63 * BLOCK}")
    assert error.cause == exits.MEMORY and "a request of 1000 tokens needs" in str(error)
    assert "raise hardware.kv_cache_memory" in str(error)
    fits = planned(tmp_path, "model.max_context=1000", f"hardware.kv_cache_memory={64 * BLOCK}")
    assert (fits.memory.blocks, fits.memory.whole_contexts) == (64, 1)


def test_a_too_large_cache_is_an_error_with_the_maximum(tmp_path: Path) -> None:
    error = refused(tmp_path, "hardware.kv_cache_memory=19GiB")
    assert error.cause == exits.MEMORY
    assert "19.0 GiB make 19.2 GiB in all" in str(error) and "use at most 16.8 GiB" in str(error)


def test_sampling_defaults_are_manifest_over_generation_config_over_the_api(tmp_path: Path) -> None:
    facts = checkpoint({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 5, "do_sample": True})
    found = planned(tmp_path, "engine.sampling.top_p=0.5", facts=facts)
    sampling = found.gateway.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 20, 0.0)
    assert sampling.max_tokens == 5
    assert reason(found, "engine.sampling.temperature") == (0.6, "generation_config.json")
    assert reason(found, "engine.sampling.top_p")[1] == ""


def test_an_ignored_generation_config_sets_neither_sampling_nor_end_tokens(tmp_path: Path) -> None:
    facts = checkpoint({"temperature": 0.6, "eos_token_id": [9]})
    found = planned(tmp_path, "model.generation_config=ignore", facts=facts).gateway
    assert (found.sampling.temperature, found.eos_token_ids) == (1.0, (7,))
    assert planned(tmp_path, facts=facts).gateway.eos_token_ids == (7, 9)


def test_names_come_from_the_manifest_or_the_folder(tmp_path: Path) -> None:
    assert planned(tmp_path).gateway.names == ("tiny",)
    assert planned(tmp_path, "model.names=[a, b]").gateway.names == ("a", "b")


def test_the_gateway_config_follows_the_manifest(tmp_path: Path) -> None:
    sets = (
        *(
            "endpoints={host: '::1', port: 9, compat: vllm, cors_origins: ['*'], keep_alive: 2s, docs: false,"
            " page: false}",
        ),
        *("limits={max_waiting: 1, max_body: 2KiB, max_output_tokens: 3, max_choices: 4, max_prompts: 5}",),
        "limits.max_waiting_tokens=6",
        *("limits={max_logprobs: -1, max_stop: 7}", "lifecycle.drain=500ms"),
        "observability={log_level: debug, log_format: json, log_requests: true, log_outputs: final}",
        "observability.vllm_metrics=false",
    )
    found = planned(tmp_path, *sets).gateway
    endpoints, limits, logs = found.endpoints, found.limits, found.observability
    assert (endpoints.host, endpoints.port, endpoints.compat, endpoints.cors_origins) == ("::1", 9, "vllm", ("*",))
    assert (endpoints.keep_alive, endpoints.docs, endpoints.page, found.drain_s) == (2.0, False, False, 0.5)
    assert (limits.max_waiting, limits.max_body, limits.max_output_tokens) == (1, 2048, 3)
    assert (limits.max_choices, limits.max_prompts) == (4, 5)
    assert (limits.max_waiting_tokens, planned(tmp_path).gateway.limits.max_waiting_tokens) == (6, None)
    assert (limits.max_logprobs, limits.max_stop, found.max_context, found.vocab_size) == (-1, 7, CONTEXT, VOCAB)
    assert (logs.log_level, logs.log_format, logs.log_requests) == ("debug", "json", True)
    assert (logs.log_outputs, logs.vllm_metrics) == ("final", False)


def test_a_secret_reaches_the_gateway_as_a_reference(tmp_path: Path) -> None:
    by_file = planned(tmp_path, "secrets={k: {file: keys.txt}}", "endpoints.api_keys=k").gateway.api_keys
    by_name = planned(tmp_path, "secrets={k: {env: KEYS}}", "endpoints.api_keys=k").gateway.api_keys
    assert by_file and (by_file.file, by_file.env) == (str(tmp_path / "keys.txt"), None)
    assert by_name and (by_name.file, by_name.env) == (None, "KEYS")


def test_the_fingerprint_depends_on_values_not_on_spelling(tmp_path: Path) -> None:
    plain = fingerprint(settings(tmp_path, text=BASE))
    assert fingerprint(settings(tmp_path, text=BASE + "limits:\n  max_stop: 16 # the default\n")) == plain
    assert fingerprint(settings(tmp_path, "limits.max_stop=17")) != plain


def test_the_hash_of_outputs_follows_settled_values_and_no_others(tmp_path: Path) -> None:
    """The system_fingerprint of replies ignores a port and follows an `auto` that resolves to another value."""
    plain = planned(tmp_path).gateway.outputs_sha256
    for same in ("endpoints.port=9", "limits.max_stop=3", "hardware.threads=6", "model.max_context=1000"):
        assert planned(tmp_path, same).gateway.outputs_sha256 == plain, same
    for other in ("engine.sampling.temperature=0.5", "hardware.threads=5", "model.dtype=float16"):
        assert planned(tmp_path, other).gateway.outputs_sha256 != plain, other
    assert planned(tmp_path, machine=replace(CPU, cores=5)).gateway.outputs_sha256 != plain


def test_every_key_is_shown_with_value_and_origin(tmp_path: Path) -> None:
    found = {one.key: one for one in planned(tmp_path, "limits.max_stop=2").effective}
    assert found["limits.max_stop"].origin == "--set limits.max_stop"
    assert found["model.source.path"].origin == f"{tmp_path / 'm.yaml'}:2:24"
    assert found["limits.max_body"].origin == "default"
    other = [key.name for key in leaves() if key.path[:2] == ("model", "source") and key.path[2] != "path"]
    assert set(found) == {key.name for key in leaves() if "*" not in key.path} - set(other)
    assert all(one.reason for one in found.values() if one.value == "auto" and one.key != "model.generation_config")


def test_the_plan_is_complete(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert isinstance(found.memory, Memory) and isinstance(found.engines[0], EngineConfig)
    assert (found.engines[0].socket, found.gateway.engines) == ("", ())
    assert found.sha256 == found.gateway.manifest_sha256


COMPILED = replace(CPU, kernels=("avx512", "avx2", "base"))


def test_auto_takes_the_fastest_kernels_that_the_cpu_runs(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=COMPILED)
    assert found.engines[0].hardware.kernels == "avx512"
    assert reason(found, "hardware.kernels") == ("avx512", "the fastest compiled kernels for this CPU")
    assert planned(tmp_path, "hardware.kernels=base", machine=COMPILED).engines[0].hardware.kernels == "base"
    assert planned(tmp_path, "hardware.kernels=torch", machine=COMPILED).engines[0].hardware.kernels == "torch"


def test_without_compiled_kernels_torch_serves_and_the_plan_says_what_that_costs(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert found.engines[0].hardware.kernels == "torch"
    assert "no compiled kernels are installed; install with a C++ compiler" in reason(found, "hardware.kernels")[1]
    on_gpu = planned(tmp_path, machine=replace(GPU_HOST, kernels=("avx2",)))
    assert on_gpu.engines[0].hardware.kernels == "torch"
    assert planned(tmp_path, "model.dtype=bfloat16", machine=COMPILED).engines[0].hardware.kernels == "torch"


QKV = (2 * HEADS + 2 * KV_HEADS) * DIM  # outputs of an attention, and its result
GPU_KERNELS = replace(GPU_HOST, triton=True)
OLD_GPU = replace(GPU_KERNELS, gpus=(replace(H100, name="NVIDIA A100", capability=(8, 0)),))


def test_a_gpu_computes_with_triton_and_captures_decode_steps(tmp_path: Path) -> None:
    found = planned(tmp_path, "engine.scheduling.max_running=6", machine=GPU_KERNELS)
    engine = found.engines[0]
    assert (engine.hardware.kernels, engine.quantization.kv_cache, engine.memory.kv_cache_measured) == (
        "triton",
        "bfloat16",
        True,
    )
    assert reason(found, "hardware.kernels") == ("triton", "the fused kernels for a GPU")
    # six rows of the widest layer, plus the residual stream and its norm; their logits, candidates and hidden states,
    # and the logits once more in the graph; then steps with chunks, which have no logits
    assert engine.hardware.graph_sizes == (1, 2, 4, 6)
    candidates, mixed = 8 * SAMPLED_CANDIDATES, engine.hardware.mixed_graph_sizes
    decode = 6 * (2 * (2 * QKV + 4 * HIDDEN) + 2 * 4 * VOCAB + candidates + 2 * HIDDEN) + 4 * 8 * MIB
    chunks = max(mixed) * (2 * (2 * QKV + 4 * HIDDEN) + 2 * 2 * HIDDEN) + len(mixed) * 8 * MIB
    assert engine.memory.graphs == decode + chunks
    without = planned(tmp_path, "engine.scheduling.max_running=6", "hardware.graphs=false", machine=GPU_KERNELS)
    assert without.engines[0].hardware.graph_sizes == () and without.engines[0].memory.graphs == 0
    assert found.memory.workspace - without.memory.workspace == engine.memory.graphs


def test_without_triton_a_gpu_computes_with_torch_and_the_plan_says_so(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=GPU_HOST)
    assert found.engines[0].hardware.graph_sizes == () and not found.engines[0].hardware.batch_invariant
    assert "Triton is not installed" in reason(found, "hardware.kernels")[1]


@pytest.mark.parametrize("dim", [12, 264])
def test_heads_that_no_kernel_of_a_gpu_serves_are_torchs(tmp_path: Path, dim: int) -> None:
    facts = checkpoint(dim=dim)
    found = planned(tmp_path, machine=GPU_KERNELS, facts=facts)
    assert found.engines[0].hardware.kernels == "torch"
    words = f"the model has the head size {dim}: Triton kernels support multiples of 8 up to 256"
    assert reason(found, "hardware.kernels") == ("torch", words)
    with pytest.raises(Refused, match=words):
        planned(tmp_path, "hardware.kernels=triton", machine=GPU_KERNELS, facts=facts)


EXPERTS = Experts(
    hidden=HIDDEN,
    intermediate_size=16,
    num_experts=8,
    top_k=2,
    scores="softmax",
    shared=MLP(hidden=HIDDEN, intermediate_size=24),
)


def sparse() -> Checkpoint:
    """Return the tiny model with experts in its last layer."""
    facts = checkpoint()
    last = ResidualBlock(body=EXPERTS, before=RMSNorm(size=HIDDEN, eps=1e-6, name="post_layernorm"))
    blocks = (*facts.model.blocks[:-1], (facts.model.blocks[-1][0], last))
    return replace(facts, model=replace(facts.model, blocks=blocks))


def test_a_model_with_experts_has_fused_kernels_and_graphs_on_a_gpu_and_compiled_ones_on_a_cpu(tmp_path: Path) -> None:
    found = planned(tmp_path, "engine.scheduling.max_running=6", machine=GPU_KERNELS, facts=sparse())
    assert (found.engines[0].hardware.kernels, found.engines[0].hardware.graph_sizes) == ("triton", (1, 2, 4, 6))
    assert planned(tmp_path, machine=COMPILED, facts=sparse()).engines[0].hardware.kernels == "avx512"


def test_experts_count_as_weights_and_routers_are_not_rounded(tmp_path: Path) -> None:
    def weights(*sets: str) -> int:
        return planned(tmp_path, *sets, machine=COMPILED, facts=sparse()).memory.weights

    # The router's 8 outputs are padded to a tile of 32, the 48 of the shared expert's gate and up to 64.
    mlps, router = 3 * HIDDEN * (8 * 16 + 24 - INNER) + 16 * HIDDEN, 32 * HIDDEN
    assert weights() == 4 * (PARAMETERS + PADDING + mlps + router)
    plain = planned(tmp_path, "quantization.weights=int8", machine=COMPILED).memory.weights
    # Each matrix has fewer than 64 inputs, so each of its outputs takes one group of 64 with a scale of 2 bytes.
    outputs = 8 * (2 * 16 + HIDDEN) + (64 + HIDDEN) - (2 * INNER + HIDDEN)
    assert weights("quantization.weights=int8") - plain == 66 * outputs + 4 * router


def test_a_row_for_each_expert_that_a_token_takes_counts_as_workspace(tmp_path: Path) -> None:
    def taken(chosen: int, kernels: str = "torch") -> int:
        """Return the workspace without the memory of torch's threads."""
        body = replace(EXPERTS, top_k=chosen)
        model = replace(sparse().model, blocks=((ResidualBlock(body=body),),))
        return summed(workspace(model, device="cuda", kernels=kernels, size=StepSize(100, 1), element_bytes=4))

    # gate, up, their product and the output; with Triton also the routes and the router's logits
    assert taken(5) - taken(4) == 100 * 4 * (3 * 16 + HIDDEN)
    assert taken(5, "triton") - taken(5) == 100 * 4 * (8 + 7 * 5)


def test_pages_of_8_bits_halve_the_blocks(tmp_path: Path) -> None:
    plain = planned(tmp_path, machine=GPU_KERNELS)
    small = planned(tmp_path, "quantization.kv_cache=fp8", machine=GPU_KERNELS)
    assert small.engines[0].quantization.kv_cache == "fp8" and 2 * small.memory.block_bytes == plain.memory.block_bytes


def test_pages_of_whole_numbers_have_a_scale_for_each_key_and_value(tmp_path: Path) -> None:
    plain = planned(tmp_path, "quantization.kv_cache=float32", machine=COMPILED)
    small = planned(tmp_path, "quantization.kv_cache=int8", machine=COMPILED)
    assert small.engines[0].quantization.kv_cache == "int8"
    assert plain.memory.block_bytes == 2 * BLOCK
    assert small.memory.block_bytes == LAYERS * 2 * 16 * KV_HEADS * (DIM + 4)
    for machine in (COMPILED, GPU_KERNELS, CPU):
        least = planned(tmp_path, "quantization.kv_cache=int4", machine=machine)
        # half a byte for each dim; a float16 scale and minimum for each 32 dims
        assert least.memory.block_bytes == LAYERS * 2 * 16 * KV_HEADS * (DIM // 2 + 4 * -(-DIM // 32))


@pytest.mark.parametrize("machine", [CPU, COMPILED], ids=["torch", "compiled"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_pages_on_a_cpu_have_the_checkpoints_16_bits(tmp_path: Path, machine: Machine, stored: str) -> None:
    facts = replace(checkpoint(), dtype=stored)
    found = planned(tmp_path, machine=machine, facts=facts)
    cost = {"bfloat16": "+0.001 %", "float16": "+0.004 %"}[stored]
    assert reason(found, "quantization.kv_cache") == (
        stored,
        f"the checkpoint's type, half the bytes of float32, measured perplexity {cost}; a token takes {BLOCK // 16} B",
    )
    assert (found.engines[0].quantization.kv_cache, found.memory.block_bytes) == (stored, BLOCK)
    for requested in ("float32", "bfloat16", "float16"):
        explicit = planned(tmp_path, f"quantization.kv_cache={requested}", machine=machine, facts=facts)
        assert (
            explicit.engines[0].quantization.kv_cache == requested
            and reason(explicit, "quantization.kv_cache")[1] == ""
        )


def test_pages_on_a_cpu_are_float32_for_a_float32_checkpoint(tmp_path: Path) -> None:
    found = planned(tmp_path, facts=replace(checkpoint(), dtype="float32"))
    assert reason(found, "quantization.kv_cache") == ("float32", "the type of the activations")
    assert found.memory.block_bytes == 2 * BLOCK


def test_pages_have_the_type_of_16_bit_activations(tmp_path: Path) -> None:
    found = planned(tmp_path, "model.dtype=float16", "hardware.kernels=torch")
    assert reason(found, "quantization.kv_cache") == (
        "float16",
        f"the type of the activations; a token takes {BLOCK // 16} B",
    )


def test_pages_of_a_quantized_gguf_file_are_float16_with_torch_kernels(tmp_path: Path) -> None:
    found = planned(tmp_path, facts=quantized("gguf", IntegerBlocks()))
    value, why = reason(found, "quantization.kv_cache")
    assert value == "float16" and why.startswith("the type of the weights' scales, half the bytes of float32")
    plain = planned(tmp_path, facts=quantized("gguf", Permuted(heads=2)))
    assert plain.engines[0].quantization.kv_cache == "bfloat16"


def test_pages_are_float16_with_quantized_weights(tmp_path: Path) -> None:
    found = planned(tmp_path, "quantization.weights=int8", machine=COMPILED)
    assert found.engines[0].quantization.kv_cache == "float16" and "int8" in reason(found, "quantization.kv_cache")[1]
    requested = planned(tmp_path, "quantization.weights=int8", "quantization.kv_cache=float32", machine=COMPILED)
    assert requested.engines[0].quantization.kv_cache == "float32"


def test_a_pool_whose_size_is_given_is_not_measured(tmp_path: Path) -> None:
    assert (
        not planned(tmp_path, "hardware.kv_cache_memory=1GiB", machine=GPU_KERNELS).engines[0].memory.kv_cache_measured
    )
    assert not planned(tmp_path).engines[0].memory.kv_cache_measured


@pytest.mark.parametrize(
    ("sets", "machine", "invariant"),
    [
        ([], GPU_KERNELS, False),
        (["hardware.batch_invariant=true"], GPU_KERNELS, True),
        ([], COMPILED, True),  # compiled kernels know nothing else
        (["hardware.kernels=torch"], COMPILED, False),
    ],
)
def test_who_computes_alike_in_any_batch(tmp_path: Path, sets: list[str], machine: Machine, invariant: bool) -> None:
    assert planned(tmp_path, *sets, machine=machine).engines[0].hardware.batch_invariant is invariant


def test_a_gpu_without_bfloat16_computes_in_float16(tmp_path: Path) -> None:
    turing = replace(GPU_KERNELS, gpus=(replace(H100, name="Tesla T4", capability=(7, 5)),))
    found = planned(tmp_path, machine=turing)
    assert found.engines[0].model.dtype == "float16" and "Tesla T4 has no bfloat16" in reason(found, "model.dtype")[1]
    assert "Tesla T4 has no bfloat16" in str(refused(tmp_path, "model.dtype=bfloat16", machine=turing))
    assert planned(tmp_path, "model.dtype=float32", machine=turing).engines[0].model.dtype == "float32"


def test_an_old_gpu_is_served_by_torch(tmp_path: Path) -> None:
    turing = replace(GPU_KERNELS, gpus=(replace(H100, name="Tesla T4", capability=(7, 5)),))
    found = planned(tmp_path, machine=turing)
    assert found.engines[0].hardware.kernels == "torch" and not found.engines[0].hardware.graph_sizes
    assert "Tesla T4 has compute capability 7.5: Triton kernels require 8.0" in reason(found, "hardware.kernels")[1]
    assert "Triton kernels require 8.0" in str(refused(tmp_path, "hardware.kernels=triton", machine=turing))
    ampere = replace(turing, gpus=(replace(H100, name="NVIDIA A10G", capability=(8, 6)),))
    assert planned(tmp_path, machine=ampere).engines[0].hardware.kernels == "triton"


@pytest.mark.parametrize(
    ("sets", "machine", "words"),
    [
        (
            ["hardware.kernels=triton"],
            COMPILED,
            "GPU; there is no usable GPU here (no driver); use auto, torch, avx512",
        ),
        (
            ["hardware.kernels=triton"],
            GPU_HOST,
            "install the release that this torch requires; use auto or torch",
        ),
        (
            ["quantization.kv_cache=fp8"],
            CPU,
            "support an fp8 KV cache; Triton kernels require a GPU; there is no usable GPU",
        ),
        (["quantization.kv_cache=fp8"], COMPILED, "use auto, float32, bfloat16, float16, int8 or int4"),
        (
            ["quantization.kv_cache=fp8"],
            OLD_GPU,
            "NVIDIA A100 has no fp8 (compute capability 8.9",
        ),
        (
            ["quantization.kv_cache=float16"],
            GPU_KERNELS,
            "the KV cache has the type of the activations, or fp8, int8 or int4; use auto, bfloat16, int8, int4 or "
            "fp8, or hardware.device: cpu, or model.dtype: float16, or hardware.kernels: torch",
        ),
        (["hardware.batch_invariant=true"], CPU, "true: the sums of torch depend on the size of the batch; "),
        (
            ["quantization.weights=int8", "hardware.kernels=torch"],
            GPU_KERNELS,
            "only compiled CPU kernels and Triton kernels support weights that are quantized to int8 or int4",
        ),
    ],
)
def test_what_the_kernels_of_a_gpu_cannot_do_is_refused(
    tmp_path: Path, sets: list[str], machine: Machine, words: str
) -> None:
    assert words in str(refused(tmp_path, *sets, machine=machine))


@pytest.mark.parametrize(
    ("sets", "machine", "words"),
    [
        (
            ["hardware.kernels=amx"],
            COMPILED,
            "amx: this machine supports only avx512, avx2, base of the",
        ),
        (
            ["hardware.kernels=avx2", "model.dtype=float16"],
            COMPILED,
            "model.dtype: float16 (--set model.dtype)",
        ),
        (["hardware.kernels=avx2"], GPU_HOST, "avx2: no compiled kernels are installed"),
        (
            ["quantization.weights=int8"],
            CPU,
            "only compiled CPU kernels and Triton kernels support weights that are",
        ),
        (
            ["quantization.weights=int4", "hardware.kernels=torch"],
            COMPILED,
            "torch cannot be combined with quantization.weights",
        ),
    ],
)
def test_options_that_compiled_kernels_lack_are_refused(
    tmp_path: Path, sets: list[str], machine: Machine, words: str
) -> None:
    assert words in str(refused(tmp_path, *sets, machine=machine))


def test_rounded_weights_take_their_bits_and_the_head_takes_eight(tmp_path: Path) -> None:
    stored = planned(tmp_path, machine=COMPILED).memory.weights
    head, norms = 66 * PADDED_VOCAB, 4 * NORMS
    matrices = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM)]
    matrices += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    eight = sum(rows * -(-inputs // 64) * 66 for rows, inputs in matrices)
    four = sum(rows * -(-inputs // 32) * 18 for rows, inputs in matrices)
    for bits, each in (("int8", eight), ("int4", four)):
        found = planned(tmp_path, f"quantization.weights={bits}", machine=COMPILED)
        assert found.memory.weights == head + norms + LAYERS * each < stored
        assert found.engines[0].quantization.weights == bits


def test_rounded_weights_are_kept_in_the_cache_folder_unless_that_is_switched_off(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(BASE + "quantization: {weights: int8}\n")

    def folder(environ: dict[str, str], *options: Option) -> str | None:
        return plan(load(Given(path, options, environ)), checkpoint(), COMPILED).engines[0].quantization.folder

    assert folder({"XDG_CACHE_HOME": "/var/cache/x", "HOME": "/home/y"}) == "/var/cache/x/slipway/weights"
    assert folder({"HOME": "/home/y"}) == "/home/y/.cache/slipway/weights"
    assert folder({}) is None
    assert folder({"HOME": "/home/y"}, Option("--set quantization.keep", "quantization.keep", "false")) is None
    stored = Option("--set quantization.weights", "quantization.weights", "auto")
    assert folder({"HOME": "/home/y"}, stored) is None


def test_what_compiled_kernels_leave_to_torch_is_named(tmp_path: Path) -> None:
    odd = replace(checkpoint().model.blocks[0][1], body=MLP(hidden=HIDDEN, intermediate_size=INNER, act="relu2"))
    plain = checkpoint().model.blocks[0]
    facts = replace(checkpoint(), model=replace(model(), blocks=(plain, (plain[0], odd), (plain[0], odd))))
    host = replace(CPU, kernels=("avx2", "base"))
    assert reason(planned(tmp_path, machine=host), "hardware.kernels") == (
        "avx2",
        "the fastest compiled kernels for this CPU",
    )
    told = reason(planned(tmp_path, machine=host, facts=facts), "hardware.kernels")[1]
    assert "torch computes activation relu2 of 2 MLPs on one thread" in told
    told = reason(planned(tmp_path, "hardware.kernels=base", machine=host, facts=facts), "hardware.kernels")
    assert told[0] == "base" and told[1].startswith("torch computes activation relu2 of 2 MLPs")
    assert "torch computes" not in reason(planned(tmp_path, facts=facts), "hardware.kernels")[1]  # torch serves it all


def test_the_plan_says_where_threads_run(tmp_path: Path) -> None:
    four = Topology((0, 1, 2, 3), (((0,), (1,)), ((2,), (3,))))
    host = replace(CPU, cores=4, kernels=("base",), topology=four)
    found = planned(tmp_path, "parallelism.data=2", machine=host)
    assert [engine.hardware.cpus for engine in found.engines] == [(0, 1), (2, 3)]
    assert [engine.hardware.process_cpus for engine in found.engines] == [(0, 1), (2, 3)] and found.other_cpus == ()
    assert reason(found, "hardware.cpus") == ("0-1 and 2-3", "one thread per core, each engine on one NUMA node")
    by_torch = planned(tmp_path, "hardware.threads=2", machine=replace(host, kernels=()))
    assert by_torch.engines[0].hardware.cpus == () and by_torch.engines[0].hardware.process_cpus == (0, 1)
    assert by_torch.other_cpus == (2, 3)


FOUR_BITS = Gptq.of(Groups(4, 32, zeros=True))


def quantized(method: str = "gptq", form: Format = FOUR_BITS, few: bool = False) -> Checkpoint:
    """`few`: quantize only the MLPs' matrices; in one layer they are fused with an unquantized matrix."""
    paths = [path for path in linear_paths(model()) if not few or ("mlp" in path and "0.mlp.up" not in path)]
    return replace(checkpoint(), quantization=Quantization(method, dict.fromkeys(paths, form)))


def test_quantized_weights_stay_as_they_are_with_compiled_kernels(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=COMPILED, facts=quantized())
    assert reason(found, "quantization.weights") == ("stored", "the checkpoint's 4 bits (gptq, groups of 32)")
    cache, why = reason(found, "quantization.kv_cache")
    assert cache == "float16" and "weights in 4 bits (gptq, groups of 32)" in why
    matrices = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM)]
    matrices += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    four = sum(rows * -(-inputs // 32) * (16 + 2 + 1) for rows, inputs in matrices)
    assert found.memory.weights == 4 * (PADDED_VOCAB * HIDDEN + NORMS) + LAYERS * four
    assert found.engines[0].quantization.weights == "stored" and found.engines[0].quantization.folder is None


def test_elsewhere_quantized_weights_are_restored_and_the_plan_says_what_that_costs(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=CPU, facts=quantized())
    assert found.memory.weights == 4 * PARAMETERS
    assert reason(found, "quantization.weights") == (
        "stored",
        "the checkpoint's 4 bits (gptq, groups of 32), restored to float32 for torch: 107.2 KiB instead of "
        "35.1 KiB with compiled kernels of a CPU",
    )
    gpu = planned(tmp_path, machine=GPU_KERNELS, facts=quantized())
    assert reason(gpu, "quantization.weights")[1] == (
        "the checkpoint's 4 bits (gptq, groups of 32): 32.3 KiB instead of 54.1 KiB in bfloat16"
    )
    assert gpu.memory.weights == 33_088


def test_matrices_of_which_a_part_is_quantized_are_restored_and_counted(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=COMPILED, facts=quantized(few=True))
    assert reason(found, "quantization.weights")[1] == (
        "the checkpoint's 4 bits (gptq, groups of 32), 1 of 8 matrices restored to float32"
    )
    down, gate = HIDDEN * -(-INNER // 32) * 19, INNER * -(-HIDDEN // 32) * 19
    assert found.memory.weights == 4 * (PARAMETERS + PADDING - 7 * HIDDEN * INNER) + 3 * down + 4 * gate


def test_quantized_weights_are_not_rounded_again(tmp_path: Path) -> None:
    for bits in ("int8", "int4"):
        with pytest.raises(Refused) as caught:
            planned(tmp_path, f"quantization.weights={bits}", machine=COMPILED, facts=quantized())
        assert f"{bits}: the checkpoint is already quantized (4 bits (gptq, groups of 32)); quantize" in str(
            caught.value
        )


def test_what_a_gguf_file_has_in_other_types_may_be_rounded(tmp_path: Path) -> None:
    facts = quantized("gguf", Blocks())
    auto = planned(tmp_path, machine=COMPILED, facts=facts)
    assert reason(auto, "quantization.weights")[1] == (
        "the checkpoint's gguf (other types), 21 of 21 matrices restored to float32"
    )
    assert auto.memory.weights == 4 * (PARAMETERS + PADDING) and auto.engines[0].quantization.kv_cache == "float16"
    sets = ("quantization.weights=int8", "quantization.group_size=32")
    rounded = planned(tmp_path, *sets, machine=COMPILED, facts=facts)
    assert rounded.engines[0].quantization.weights == "int8" and rounded.memory.weights < auto.memory.weights / 3
    with pytest.raises(Refused):
        planned(tmp_path, "quantization.weights=int8", machine=COMPILED, facts=quantized("gguf", IntegerBlocks()))
