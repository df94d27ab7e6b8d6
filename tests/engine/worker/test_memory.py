"""Measured memory, against blocks of a known size."""

import asyncio
import contextlib
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers

from engine.api.client import EngineClient
from engine.api.config import write_config
from engine.api.errors import OutOfMemory
from engine.api.messages import PhaseMemory
from engine.arguments import engine_config
from engine.kv.layout import layout
from engine.lowering.footprint import Holder, footprint, loading_bytes
from engine.models.checkpoint import read_checkpoint
from engine.worker.build import build_worker, pool_blocks
from engine.worker.memory import Meter
from kernels.cpu.library import best, tiling
from tests.engine.configs import with_arguments

SIZE = 100_000_000
PATIENCE_S = 240.0  # against hangs only
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def block(device):
    """Allocate 100 MB and write each page.

    On a CPU use mmap: malloc may already have that much free memory, which would hide the allocation."""
    if device.type == "cuda":
        return torch.ones(SIZE // 4, device=device)
    made = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, SIZE, mmap.PAGESIZE):
        made[at] = 1
    return made


def test_kept_memory_is_reported_within_5_percent(device):
    block(device)  # exclude one-time setup by the first allocation
    with Meter(device) as meter:
        kept = block(device)
    assert meter.taken.kept == pytest.approx(SIZE, rel=0.05) and len(kept)
    assert meter.taken.peak == pytest.approx(SIZE, rel=0.05)
    assert device.type in repr(meter.taken)


def test_released_memory_counts_only_in_the_peak(device):
    block(device)
    with Meter(device) as meter:
        block(device)
    assert abs(meter.taken.kept) < SIZE / 20
    assert meter.taken.peak == pytest.approx(SIZE, rel=0.05)


def test_an_earlier_peak_is_not_counted_and_a_release_is_negative(device):
    large = [block(device), block(device)]
    with Meter(device) as meter:
        large.pop()
    assert meter.taken.kept == pytest.approx(-SIZE, rel=0.05)
    assert meter.taken.peak < SIZE / 20


def test_pages_of_a_mapped_file_are_in_the_peak_and_not_in_what_is_kept(tmp_path):
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with Meter(torch.device("cpu")) as meter:
        mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=SIZE, dtype=torch.uint8)
        assert not mapped.any()
    assert abs(meter.taken.kept) < SIZE / 20
    assert meter.taken.peak == pytest.approx(SIZE, rel=0.05)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return the configuration of a 77 MB float32 model, stored in bfloat16 so that loading copies each weight."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=1024,
            intermediate_size=5000,
            num_hidden_layers=1,
            num_attention_heads=8,
            max_position_embeddings=64,
        )
    )
    path = tmp_path_factory.mktemp("memory") / "model"
    made.to(torch.bfloat16).save_pretrained(path)
    return engine_config(model=str(path), kv_bytes=50_000_000, max_context=40, weight_bytes=7, workspace_bytes=1 << 20)


def test_start_reports_the_memory_of_each_phase(config):
    taken: dict[str, PhaseMemory] = {}
    worker = build_worker(config, lambda phase, fraction: None, taken.__setitem__)
    assert list(taken) == ["starting", "reading", "loading", "allocating", "warming"]
    assert taken["allocating"].kept < 10_000_000 < worker.kv_bytes  # no page of the cache is written yet
    assert taken["starting"].kept > 50_000_000  # a process with torch
    worker.close()


async def told(socket):
    """Return the memory usage that the engine reports to the gateway."""
    client = EngineClient(socket)
    task = asyncio.create_task(client.run())
    await asyncio.wait_for(client.wait_ready(), 120)
    assert client.ready is not None
    memory = client.ready.memory[0].taken
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return memory


def test_engine_process_reports_and_logs_its_memory(config, tmp_path):
    path = tmp_path / "config.json"
    write_config(with_arguments(config, socket=str(tmp_path / "e")), path)
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "engine", str(path)]
    lines: list[str] = []
    # Where the process hangs it is aborted, and says where each of its threads is.
    environ = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root, env=environ) as process:
        aborting = threading.Timer(PATIENCE_S, process.send_signal, (signal.SIGABRT,))
        aborting.start()
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if "memory" in line:
                    break
            memory = asyncio.run(told(str(tmp_path / "e"))) if process.poll() is None else {}
        finally:
            process.terminate()
            lines += process.communicate()[1].splitlines(keepends=True)
            aborting.cancel()
    assert process.returncode == 0, "".join(lines)
    line = next((line for line in lines if "memory" in line), "")
    found = re.fullmatch(
        r"slipway engine: memory on cpu: weights ([\d.]+) MiB of 0\.0 planned, peak while loading ([\d.]+) MiB; "
        r"KV cache ([\d.]+) MiB of 47\.7 planned \(its pages count once they are written\); "
        r"process and first steps ([\d,.]+) MiB of 1\.0 planned\n",
        line,
    )
    assert found, line
    weights, most, cache, process_mib = (float(text.replace(",", "")) for text in found.groups())
    assert memory["loading"].device == "cpu" and memory["loading"].peak / 2**20 == pytest.approx(most, abs=0.1)
    # 75 MiB of weights plus up to 12 MiB of first-use library allocations, minus later frees
    assert 70 <= weights < 87 and weights <= most < 200 and cache < 10 and process_mib > 50


# Run in a separate process: after other tests, the allocator has free memory that hides allocations.
LOADING = """
import sys
from pathlib import Path
from engine.api.config import read_config
from engine.worker.build import build_worker
from tests.engine.configs import with_arguments
taken = {}
worker = build_worker(read_config(Path(sys.argv[1])), lambda phase, fraction: None, taken.__setitem__)
print(taken["loading"].peak, worker.weight_bytes)
worker.close()
"""


@pytest.mark.nightly("tests/appliance/planned_engines/test_peak.py::test_the_planned_total_is_the_peak_of_the_engine")
@pytest.mark.parametrize("bits", ["stored", "int8", "int4"])
def test_loading_takes_no_more_at_once_than_planned(config, bits, tmp_path):
    """Pages of the mapped checkpoint are in the measured peak and not in the plan: they go when room is needed."""
    checkpoint = read_checkpoint(config.model.path)
    kernels = best()
    if kernels == "torch":
        pytest.skip("no compiled kernels here")
    holder = Holder(dtype="float32", tiling=tiling(kernels), bits=bits)
    planned = loading_bytes(footprint(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder))
    write_config(with_arguments(config, kernels=kernels, weights=bits), tmp_path / "engine.json")
    command = [sys.executable, "-c", LOADING, str(tmp_path / "engine.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, weight_bytes = map(int, told.split())
    used = peak - sum(info.bytes for info in checkpoint.tensors.values())
    assert weight_bytes / 2 < used < planned


def test_a_pool_of_a_fixed_budget_has_blocks_and_one_that_is_too_small_says_what_it_needs(config):
    form = layout(read_checkpoint(config.model.path).model, block_tokens=16, element_bytes=4)
    assert pool_blocks(config, form) > 0
    needed = 4 * form.block_bytes  # three of 40 tokens, and the null block
    assert pool_blocks(with_arguments(config, kv_bytes=needed), form) == 4
    with pytest.raises(OutOfMemory, match=rf"40 tokens need {needed:,} bytes: raise hardware.kv_cache_memory to that"):
        pool_blocks(with_arguments(config, kv_bytes=needed - 1), form)
