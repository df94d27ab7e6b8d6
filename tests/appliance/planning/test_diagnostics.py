"""Out-of-memory refusals suggest keys that fix them: each suggestion is tried, and so are the nearest other values."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.config import exits
from appliance.config.fix import Write
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.hardware.machine import Gpu, Machine
from appliance.planning.host import appliance_bytes
from appliance.planning.kernels import resolve
from appliance.planning.plan import plan
from appliance.planning.requirements import need_of, requested_capacity
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, ResidualBlock
from tests.appliance.planning.test_plan import COMPILED, GPU_KERNELS, HIDDEN, VOCAB, checkpoint

MIB = 2**20
INNER = 3_000_000  # weights that outweigh the process


def wide(inner: int = INNER) -> Checkpoint:
    """Return a checkpoint of ten layers with a small temporary memory need per layer."""
    made = checkpoint()
    block = (made.model.blocks[0][0], ResidualBlock(body=MLP(hidden=HIDDEN, intermediate_size=inner // 10)))
    return replace(made, model=replace(made.model, blocks=(block,) * 10))


SMALL_STEPS = ("engine.scheduling.max_step_tokens=8", "engine.scheduling.max_running=2")


def refusal(tmp_path: Path, machine: Machine, *sets: str, inner: int = INNER) -> Refused | None:
    (tmp_path / "m.yaml").write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {memory_share: 0.8}\n"
    )
    options = tuple(Option("--set", *one.split("=", 1)) for one in (*SMALL_STEPS, *sets))
    try:
        plan(load(Given(tmp_path / "m.yaml", options)), wide(inner), machine)
    except Refused as refused:
        return refused
    return None


def suggestions(refused: Refused) -> list[tuple[str, str]]:
    """Return the suggested keys and values of a refusal."""
    found = []
    for suggestion in re.split(r" or with ", str(refused).partition("it fits with ")[2]):
        key, _, values = suggestion.partition(": ")
        found += [(key, value.split(" (")[0]) for value in values.split(" or ")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("free_mib", [550, 850, 1150, 1450, 1560, 1720, 1800, 1920, 2350])
@pytest.mark.sampled(4)
def test_every_way_out_fits_and_the_others_do_not(tmp_path: Path, free_mib: int) -> None:
    machine = replace(COMPILED, memory_free=free_mib * MIB + appliance_bytes(VOCAB))
    refused = refusal(tmp_path, machine)
    every = [("quantization.weights", bits) for bits in ("int8", "int4")]
    if refused is None:
        assert free_mib > 1800
        return
    assert refused.cause == exits.MEMORY
    found = [suggestion for suggestion in suggestions(refused) if suggestion[0]]
    for key, value in found:
        assert refusal(tmp_path, machine, f"{key}={value}") is None, (free_mib, key, value)
    for key, value in every:
        assert ((key, value) in found) == (refusal(tmp_path, machine, f"{key}={value}") is None), (free_mib, value)
    shares = [float(value) for key, value in found if key == "hardware.memory_share"]
    every_share = [count / 100 for count in range(81, 101)]
    enough = [share for share in every_share if refusal(tmp_path, machine, f"hardware.memory_share={share}") is None]
    assert shares == enough[:1]
    (problem,) = refused.problems
    assert problem.fix == (Write(f"{shares[0]:g}") if shares else None)


def test_more_gpus_and_fewer_bits_are_ways_out(tmp_path: Path) -> None:
    """1.8 GiB of weights, plus the memory of the process and of the ranks' collectives."""
    machine = replace(GPU_KERNELS, gpus=(Gpu("small", 2300 * MIB, 2300 * MIB, (9, 0)),) * 4)
    refused = refusal(tmp_path, machine, inner=10_000_000)
    assert refused is not None
    found = suggestions(refused)
    # neither another share nor the CPU
    assert {key for key, _ in found} == {"parallelism.tensor", "quantization.weights"}
    assert ("quantization.weights", "fp8") in found
    assert refusal(tmp_path, machine, "quantization.weights=fp8", inner=10_000_000) is None
    for size in ("2", "4"):
        fits = refusal(tmp_path, machine, f"parallelism.tensor={size}", inner=10_000_000) is None
        assert fits == (("parallelism.tensor", size) in found), size


def test_too_few_open_ranks_are_reported_with_the_maximum(tmp_path: Path) -> None:
    machine = replace(GPU_KERNELS, gpus=(Gpu("small", 80 * MIB, 700 * MIB, (9, 0)),) * 2)
    refused = refusal(tmp_path, machine, "parallelism.tensor=auto")
    assert refused is not None and refused.cause == exits.MEMORY
    assert "on each of 2 GPUs" in str(refused)


def test_the_solver_and_the_plan_count_the_same_bytes(tmp_path: Path) -> None:
    """The memory rule and the plan compute the same shortage, to the byte."""
    (tmp_path / "m.yaml").write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {memory_share: 1}\n"
    )
    settings = load(Given(tmp_path / "m.yaml", tuple(Option("--set", *one.split("=", 1)) for one in SMALL_STEPS)))
    resolved = resolve(settings, wide(), COMPILED)
    need = need_of(settings.manifest, COMPILED, resolved.budget, requested_capacity(settings.manifest, engines=1))
    found = plan(settings, wide(), COMPILED).memory
    used = found.weights + found.workspace + 2 * found.block_bytes  # a request of two tokens, and the null block
    tables = sum(step.value for step in resolved.budget.tables(1000)) - sum(
        step.value for step in resolved.budget.tables(2)
    )
    assert need.lacks == 0 and need.needed == max(used - tables, found.loading)
