"""Engines that compute otherwise than they did: bits of a weight are flipped in the memory of real ones."""

import contextlib
import io
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.cli.main import main
from appliance.config import exits

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "manifests" / "demo"
SMALL = ("--set", "hardware.kv_cache_memory=16MiB")
LARGEST_REGION = 64 * 2**20


def norm_bytes(folder: Path) -> bytes:
    """The last norm of a checkpoint, as engines keep it: in float32. By the format's specification."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])["model.norm.weight"]
    assert entry["dtype"] == "BF16"
    begin, end = (8 + length + at for at in entry["data_offsets"])
    return b"".join(b"\0\0" + raw[at : at + 2] for at in range(begin, end, 2))


def flip_bit(pid: int, weight: bytes, bit: int = 22) -> int:
    """Flip a bit in the first number of every copy of a weight in a process's memory; return the number of copies."""
    found = 0
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for begin, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", maps, re.MULTILINE):
            start, size = int(begin, 16), int(end, 16) - int(begin, 16)
            if size > LARGEST_REGION:
                continue
            try:
                memory.seek(start)
                content = memory.read(size)
            except OSError:
                continue
            at = content.find(weight)
            while at >= 0:
                (number,) = struct.unpack_from("<I", weight)
                memory.seek(start + at)
                memory.write(struct.pack("<I", number ^ (1 << bit)))
                found += 1
                at = content.find(weight, at + 1)
    return found


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of the demo with its lock."""
    folder = tmp_path_factory.mktemp("locked")
    shutil.copytree(DEMO, folder / "demo")
    manifest = folder / "m.yaml"
    manifest.write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: demo}, names: [demo]}\n"
        "lifecycle: {self_test: {every: 1ms, prompts: 3}}\n"
        "quantization: {kv_cache: float32}\n"  # the band of other kernels is 0.1 %, and 10 % with pages in 16 bits
    )
    code, said = slipway("lock", str(manifest))
    assert code == 0 and "3 golden prompts" in said, said
    return manifest


def slipway(*arguments: str) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*arguments])
    return code, said.getvalue()


def test_a_bit_that_flips_has_the_engine_replaced_under_requests_and_a_second_one_ends_the_appliance(
    launch: Callable, locked: Path, eventually: Callable
) -> None:
    """Requests keep arriving: those in flight when the engine detects the drift continue on the new engine."""
    appliance = launch(locked, *SMALL, threads="")
    appliance.wait_ready()
    told = appliance.client.get("/ready").json()["engines"][0]["self_test"]
    assert (told["prompts"], told["against"], told["band"], told["skipped"]) == (3, "lock", "bit for bit", 0)
    body = {"prompt": "Tell me", "max_tokens": 4, "ignore_eos": True, "temperature": 1.0, "seed": 3}

    def reply() -> str:
        answer = appliance.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    expected, usage = reply(), appliance.metric("slipway_generation_tokens_total")
    eventually("idle runs", lambda: appliance.metric("slipway_self_test_runs_total") >= 5)
    assert appliance.metric("slipway_self_test_last_result") == 1
    assert appliance.metric("slipway_generation_tokens_total") == usage, "golden prompts are nobody's usage"

    first = appliance.pids()["engine-0"]
    assert flip_bit(first, norm_bytes(DEMO), bit=0) > 0  # the least of all: no reply changes by it
    while appliance.pids().get("engine-0", first) == first:
        assert reply() == expected
    assert reply() == expected
    appliance.wait_ready()
    assert appliance.metric("slipway_self_test_failures_total") == 1
    output = appliance.output()
    assert re.search(r"slipway engine: drift: golden prompt \w+ .* expected, .* found, .* first result", output)
    bundle = Path(re.search(r"crash bundle (\S+); run: slipway explain drift", output)[1])
    death = json.loads((bundle / "death.json").read_text())
    assert death["cause"] == "drift" and "golden prompt" in (bundle / "log.txt").read_text()

    assert flip_bit(appliance.pids()["engine-0"], norm_bytes(DEMO)) > 0
    assert appliance.process.wait(timeout=120) == exits.SELF_TEST.number
    last = [line for line in appliance.output().splitlines() if '"exit":"selftest"' in line][-1]
    reason = json.loads(last)
    assert reason["cause"] == "drift" and "golden prompt" in reason["message"]


def test_weights_other_than_the_lock_s_end_a_start_naming_the_prompt(
    refused: Callable[..., tuple[int, str]], locked: Path
) -> None:
    """Change the reference outputs in the lock file, which looks like a device with different results."""
    lock = locked.with_suffix(".lock")
    text = lock.read_text()
    bits = re.search(r'"digests":\[\["([0-9a-f]{16})"', text)[1]
    try:
        lock.write_text(text.replace(bits, "0123456789abcdef", 1))
        code, said = refused(locked, *SMALL)
        assert code == exits.SELF_TEST.number
        assert "engine-0 failed permanently: self_test: golden prompt short" in said
        assert f"0123456789abcdef expected, {bits} found" in said and "bit for bit" in said
        code, said = slipway("selftest", str(locked))
        assert code == exits.SELF_TEST.number and "DIFFERS" in said
        assert said.count("the same bits") == 2
    finally:
        lock.write_text(text)


@pytest.mark.nightly("tests/e2e/test_drift.py::test_weights_other_than_the_lock_s_end_a_start_naming_the_prompt")
def test_other_kernels_agree_within_a_band(locked: Path) -> None:
    code, said = slipway("selftest", str(locked), "--hardware.kernels", "torch")
    assert code == 0 and said.count("agrees") == 3 and "within 0.1 %" in said
