"""The table of devices, machines made from it, and plans for them."""

from pathlib import Path

import pytest

from appliance.config.problems import Refused
from appliance.hardware.described import HOST_BYTES, UnknownHardware, hardware
from appliance.hardware.devices import CONTEXT_BYTES, CPUS, GPUS, cpu_by_kernels, gpu_by_cuda_name, gpu_by_name
from appliance.planning.plan import Plan, plan
from appliance.planning.roofline import active_parameters
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, Rope, named
from kernels.cpu.library import VARIANTS
from tests.appliance.planning import test_plan

GIB, MIB = 2**30, 2**20


def test_gpu_memory_is_the_reported_size_less_a_cuda_context() -> None:
    machine = hardware("h200x2")
    assert [gpu.memory for gpu in machine.gpus] == [143771 * MIB] * 2
    assert machine.gpus[0].free == 143771 * MIB - CONTEXT_BYTES
    assert machine.gpus[0].capability == (9, 0) and machine.triton and machine.described == "h200x2"
    assert (machine.cores, machine.memory_free) == (32, 2 * HOST_BYTES)
    assert (hardware("H100x8:96:1TiB").cores, hardware("h100x8:96:1TiB").memory_free) == (96, 1024 * GIB)
    assert len(hardware("l4").gpus) == 1


def test_described_cpu_has_its_cores_memory_and_kernels() -> None:
    machine = hardware("amx:16:64GiB")
    assert (machine.cores, machine.memory_free, machine.gpus) == (16, 64 * GIB, ())
    assert (
        machine.kernels == ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "base")
        and len(machine.topology.allowed) == 16
    )
    assert hardware("graviton:4:512MiB").kernels == ("neon", "base")
    assert hardware("cpu:1:1.5GiB").memory_free == 3 * GIB // 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h20", "did you mean h200? available GPUs: h100, "),
        ("h200z8", "not in the table"),
        ("h10x4", "did you mean h100x4?"),
        ("cpu", "a CPU requires cores and memory, such as cpu:16:64GiB"),
        ("cpux2:4:8GiB", "a CPU requires"),
        ("cpu:16:64", "write NAME, NAMExCOUNT"),
        ("cpu:0:64GiB", "at least 1 core"),
        ("h100x0", "write 1 to 16"),
        ("h100x99", "write 1 to 16"),
        ("gaudi3x8", "an Intel accelerator is not supported"),
        ("", "write NAME"),
    ],
)
def test_unknown_device_is_refused_with_the_known_ones(text: str, words: str) -> None:
    with pytest.raises(UnknownHardware) as caught:
        hardware(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("cuda", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X OAM", "mi325x"),
    ],
)
def test_gpu_is_found_by_its_cuda_name(cuda: str, name: str) -> None:
    found = gpu_by_cuda_name(cuda)
    assert found is not None and found.name == name


def test_gpu_outside_the_table_has_no_ceilings(tmp_path: Path) -> None:
    from dataclasses import replace

    from appliance.planning.report import as_text

    assert gpu_by_cuda_name("NVIDIA GeForce RTX 4090 Laptop GPU") is None and gpu_by_name("none") is None
    strange = replace(test_plan.GPU_KERNELS, gpus=(replace(test_plan.H100, name="Strange"),))
    found = test_plan.planned(tmp_path, machine=strange)
    assert found.estimate.roofline is None and "Strange is not in the device table" in as_text(found)


def test_every_device_of_the_table_can_be_planned_for() -> None:
    for gpu in GPUS:
        found = gpu_by_cuda_name(gpu.title)
        assert found is gpu
        assert gpu.bandwidth < gpu.bf16 and gpu.memory - CONTEXT_BYTES > 0 and hardware(gpu.name).gpus[0].name
    for cpu in CPUS:
        assert cpu.variant in {one.name for one in VARIANTS} and hardware(f"{cpu.name}:2:4GiB").kernels
        assert cpu_by_kernels((cpu.variant,)).variant == cpu.variant


def checkpoint() -> Checkpoint:
    """A model of the size of Qwen3-0.6B, without norms of its heads: 28 layers, 8 KV heads of 128, 40,960 tokens."""
    norm = RMSNorm(size=1024, eps=1e-6)
    attention = Attention(hidden=1024, heads=16, kv_heads=8, head_dim=128, rope=Rope(dim=128, theta=1e6))
    block = (
        ResidualBlock(body=attention, before=named(norm, "one")),
        ResidualBlock(body=MLP(hidden=1024, intermediate_size=3072), before=named(norm, "two")),
    )
    embed = Embedding(vocab=151936, hidden=1024)
    model = Model(embed=embed, blocks=(block,) * 28, norm=norm, head=Head(tied=True), max_context=40960)
    return Checkpoint(
        path=Path("/models/Qwen3-0.6B"),
        architecture="Qwen3ForCausalLM",
        config={},
        generation={},
        model=model,
        dtype="bfloat16",
        eos_token_ids=(1,),
        tensors={},
    )


def large(text: str, tmp_path: Path) -> Plan:
    """The model on a machine of the table."""
    settings = test_plan.settings(tmp_path, "engine.scheduling.max_running=64")
    return plan(settings, checkpoint(), hardware(text))


def test_the_ceiling_of_decoding_is_bytes_over_bandwidth(tmp_path: Path) -> None:
    """Worked out by hand: 28 layers of 16 heads and 8 KV heads of 128, hidden 1024, inner 3072, a tied head in bf16."""
    found = large("h200x1", tmp_path).estimate.roofline
    assert found is not None and [one.rows for one in found.decode] == [1, 8, 32, 64]
    attention = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024
    matrices = 2 * (28 * (attention + 3 * 1024 * 3072) + 151936 * 1024) + 4 * 57 * 1024
    state = 28 * 2 * 8 * 128 * 2 * 1024
    for one in found.decode:
        assert one.tokens_s == pytest.approx(one.rows / ((matrices + one.rows * state) / 4.8e12))
        assert one.limited_by == "bandwidth"
    assert found.prefill.limited_by == "arithmetic"
    multiplied = 2 * 28 * (attention + 3 * 1024 * 3072) + 28 * 4 * 4096 * 16 * 128
    assert found.prefill.tokens_s == pytest.approx(989e12 / multiplied)
    assert active_parameters(checkpoint().model) == 28 * (attention + 3 * 1024 * 3072) + 151936 * 1024


def test_an_amd_gpu_gets_triton_kernels_and_no_fp8_pages(tmp_path: Path) -> None:
    found = large("mi300xx8", tmp_path)
    engine = found.engines[0]
    assert (engine.hardware.device, engine.hardware.kernels) == ("cuda", "triton")
    assert (engine.model.dtype, engine.quantization.kv_cache) == ("bfloat16", "bfloat16")
    assert found.estimate.roofline is not None and found.estimate.roofline.source.startswith("AMD Instinct MI300X")
    with pytest.raises(Refused, match="AMD Instinct MI300X has no fp8"):
        plan(test_plan.settings(tmp_path, "quantization.kv_cache=fp8"), checkpoint(), hardware("mi300x"))


def test_slowest_step_is_the_last_chunk_of_a_full_context(tmp_path: Path) -> None:
    """The restart monitor waits for it. Worked out by hand: each token reads the keys of the whole context."""
    found = large("h200x1", tmp_path)
    context, tokens = found.engines[0].model.max_context, found.engines[0].scheduling.max_step_tokens
    attention = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024
    multiplied = 2 * (28 * (attention + 3 * 1024 * 3072) + 151936 * 1024) + 28 * 4 * context * 16 * 128
    assert found.estimate.slowest_step_s == pytest.approx(tokens * multiplied / 989e12)


def test_more_devices_are_never_slower(tmp_path: Path) -> None:
    speeds = []
    for text in ("cpu:2:32GiB", "cpu:8:32GiB", "amx:8:32GiB", "l4", "a100-80", "h100", "h200"):
        found = large(text, tmp_path).estimate.roofline
        assert found is not None
        speeds.append(found.decode[0].tokens_s)
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1]
