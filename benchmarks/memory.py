"""Compare the planned memory of an engine with the measured peak of its process.

    python -m benchmarks.memory CHECKPOINT [--set KEY=VALUE ...]

Plans the checkpoint for this machine, starts the engine as the launcher does, sends requests that fill the largest step
and the KV cache, and reads VmHWM (proc(5)): the most resident memory that the process has had, shared libraries
included.
"""

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.config.settings import Given, Option, load
from appliance.hardware.machine import Machine
from appliance.planning.memory import Memory, spell_bytes
from appliance.planning.plan import plan
from engine.api.client import EngineClient
from engine.api.config import EngineConfig, with_values, write_config
from engine.api.messages import Sampling, Submit
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import usable

ROOT = Path(__file__).resolve().parents[1]
READY_S = 300.0
REPLY = 8  # tokens of each reply


@dataclass(frozen=True)
class Peak:
    """Planned and measured bytes of one engine process.

    loading: the most while weights were loaded, as the engine measured it. ready: VmHWM when the engine is ready.
    loaded: VmHWM after the requests. status: fields of /proc/PID/status then.
    """

    memory: Memory
    loading: int
    ready: int
    loaded: int
    status: dict[str, int]

    @property
    def planned(self) -> int:
        return self.memory.total

    @property
    def ratio(self) -> float:
        return self.planned / self.loaded


def measure(checkpoint: Path, *settings: str, memory_bytes: int = 8 << 30) -> Peak:
    """Start an engine of the checkpoint with these `KEY=VALUE` settings, fill it and return its peak."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = folder / "m.yaml"
        manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {checkpoint}}}}}\n")
        options = tuple(Option("--set", *one.split("=", 1)) for one in ("quantization.keep=false", *settings))
        machine = Machine(
            len(os.sched_getaffinity(0)), "affinity", memory_bytes, "MemAvailable", no_gpu="not used", kernels=usable()
        )
        made = plan(load(Given(manifest, options, {})), read_checkpoint(checkpoint), machine)
        values = {"socket": str(folder / "engine"), "lifecycle.heartbeat": str(folder / "pulse")}
        config = with_values(made.engines[0], values)
        write_config(config, folder / "engine.json")
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", str(folder / "engine.json")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            loading, ready = asyncio.run(_fill(config, process.pid))
            status = _status(process.pid)
        finally:
            process.terminate()
            process.wait()
        return Peak(made.memory, loading, ready, status["VmHWM"], status)


async def _fill(config: EngineConfig, pid: int) -> tuple[int, int]:
    """Serve the largest step and a full cache; return the peak of loading and VmHWM when the engine became ready."""
    client = EngineClient(config.socket)
    running = asyncio.create_task(client.run())
    try:
        await asyncio.wait_for(client.wait_ready(), READY_S)
        assert client.ready is not None, "the engine is ready"
        taken = client.ready.memory[0].taken
        loading = taken["starting"].peak + taken["reading"].peak + taken["loading"].peak
        ready = _status(pid)["VmHWM"]
        await asyncio.gather(*(_served(client, submit) for submit in requests(config)))
        return loading, ready
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def _served(client: EngineClient, submit: Submit) -> None:
    async for _ in client.generate(submit):
        pass


def requests(config: EngineConfig) -> list[Submit]:
    """One request of the whole context for each that runs at once, with the options that copy the most logits."""
    vocab = read_checkpoint(config.model.path).model.embed.vocab
    draw = random.Random(0)
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5, seed=1)
    return [
        Submit(
            str(number),
            tuple(draw.randrange(vocab) for _ in range(config.model.max_context - REPLY)),
            sampling,
            REPLY,
            ignore_eos=True,
        )
        for number in range(config.scheduling.max_running)
    ]


def _status(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def lines(peak: Peak) -> list[str]:
    """A table of planned parts and the measured peaks."""
    memory = peak.memory
    rows = [("weights", memory.weights), ("read in the file", memory.mapped), ("workspace", memory.workspace)]
    rows += [("KV cache", memory.cache), ("planned", peak.planned), ("planned for loading", memory.loading)]
    rows += [("measured in loading", peak.loading)]
    rows += [("measured when ready", peak.ready), ("measured under load", peak.loaded)]
    rows += [(name, peak.status[name]) for name in ("RssAnon", "RssFile", "RssShmem")]
    return [
        *(f"{name:<22} {spell_bytes(count):>10}" for name, count in rows),
        f"planned / measured     {peak.ratio:.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint, or a GGUF file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the manifest")
    options = parser.parse_args(arguments)
    print("\n".join(lines(measure(options.checkpoint.resolve(), *options.set))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
