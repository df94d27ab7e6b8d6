"""Encoder-decoder models: plans match the engines' memory, supported features, and the gateway's configuration."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from appliance.config.gateway import EncoderLimits
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.described import hardware
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.report import as_json, as_text
from appliance.planning.validate import validate
from engine.lowering.footprint import PARTS
from engine.worker.build import build_worker
from engine.worker.ranks import Ranks
from tests.appliance.planned_engines.test_reality import HOST, built
from tests.appliance.planning.test_why import accounts, computed
from tests.engine.configs import with_arguments
from tests.engine.sourced import KINDS, Sourced, save

SMALL = ("engine.scheduling={max_running: 5, max_step_tokens: 70}", "hardware.threads=1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sourced]:
    """Return one model of each kind, with encoder inputs of up to 64 tokens; a long BART has 1024."""
    known: dict[str, Sourced] = {}

    def get(name: str) -> Sourced:
        if name not in known:
            folder = tmp_path_factory.mktemp("sourced") / name
            known[name] = save(folder, "bart", max_position_embeddings=1024) if name == "long" else save(folder, name)
        return known[name]

    return get


def planned(tmp_path: Path, one: Sourced, *sets: str, host: Machine = HOST) -> Plan:
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {one.path}}}}}\n")
    return validate(Given(path, tuple(Option("--set", *each.split("=", 1)) for each in sets), {}), host)


def refused(tmp_path: Path, one: Sourced, *sets: str, host: Machine = HOST) -> str:
    with pytest.raises(Refused) as found:
        planned(tmp_path, one, *sets, host=host)
    return "\n".join(map(str, found.value.problems))


def resolved(plan: Plan) -> dict[str, tuple[object, str]]:
    return {one.key: (one.resolved, one.reason) for one in plan.effective}


@pytest.mark.parametrize("sets", [(), ("engine.cache.block_tokens=3", "model.max_context=37")])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_engine_uses_the_planned_memory(
    tmp_path: Path, made: Callable, kind: str, sets: tuple[str, ...]
) -> None:
    plan = planned(tmp_path, made(kind), *SMALL, *sets)
    held, mapped = built(plan.engines[0])
    assert plan.engines[0].memory.ranks == (held,)
    assert plan.memory.mapped == mapped
    assert sum(held[part] for part in PARTS if part in held) == plan.memory.weights
    assert held["kv"] <= plan.memory.cache < held["kv"] + plan.memory.block_bytes


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
def test_each_of_two_ranks_uses_its_planned_memory(tmp_path: Path, made: Callable, kind: str) -> None:
    config = planned(tmp_path, made(kind), *SMALL, "parallelism.tensor=2").engines[0]
    config = with_arguments(config, cpus=(), process_cpus=(), rank_cpus=())
    worker = build_worker(config, lambda phase, fraction: None, ranks=Ranks(config))
    worker.close()
    assert tuple(one.held for one in worker.memory) == config.memory.ranks and len(config.memory.ranks) == 2


def test_a_step_covers_the_longest_encoder_input_and_running_requests(tmp_path: Path, made: Callable) -> None:
    assert planned(tmp_path, made("bart")).engines[0].scheduling.max_step_tokens == 512
    plan = planned(tmp_path, made("long"))
    assert (plan.engines[0].scheduling.max_step_tokens, plan.engines[0].scheduling.max_running) == (1024 + 256, 256)
    assert "the longest encoder input" in resolved(plan)["engine.scheduling.max_step_tokens"][1]
    fewer = planned(tmp_path, made("long"), "engine.scheduling.max_running=3", "model.max_context=700")
    assert (fewer.engines[0].scheduling.max_step_tokens, fewer.engines[0].model.max_context) == (703, 700)
    short = planned(tmp_path, made("long"), "engine.scheduling.max_running=3", "model.max_context=300")
    assert short.engines[0].scheduling.max_step_tokens == 512


def test_a_step_smaller_than_the_longest_encoder_input_is_an_error(tmp_path: Path, made: Callable) -> None:
    told = refused(tmp_path, made("long"), "engine.scheduling.max_step_tokens=1279")
    assert (
        "engine.scheduling.max_step_tokens: 1279: an encoder input is read in one step; the longest has 1024 tokens"
        in told
    )
    assert "Use at least 1280, or auto" in told
    running = "engine.scheduling={max_running: 7, max_step_tokens: %d}"
    assert "Use at least 1031" in refused(tmp_path, made("long"), running % 1030)
    assert planned(tmp_path, made("long"), running % 1031).gateway.encoder.max_input == 1024
    assert planned(tmp_path, made("long"), running % 207, "model.max_context=200").gateway.encoder.max_input == 197


def test_steps_with_encoder_input_are_not_counted(tmp_path: Path, made: Callable) -> None:
    told = refused(tmp_path, made("bart"), "observability.mfu_metrics=true")
    assert "not available for encoder-decoder models; set it to false" in told


def test_the_gateway_config_has_the_encoder_limits(tmp_path: Path, made: Callable) -> None:
    plan = planned(tmp_path, made("bart"))
    assert plan.gateway.encoder == EncoderLimits(max_input=64, reply=64, decoder_start_ids=(2, 0))
    assert (plan.gateway.max_context, plan.gateway.tasks, plan.gateway.pooled) == (128, ("generate",), None)


def test_tokens_that_the_checkpoint_bans_are_banned(tmp_path: Path) -> None:
    one = save(tmp_path / "marian", "marian", bad_words_ids=[[1], [5, 6], [999], "x"])
    config = one.path / "generation_config.json"
    values = msgspec.json.decode(config.read_bytes()) | {"bad_words_ids": [[1], [5, 6], [999], "x", []]}
    config.write_bytes(msgspec.json.encode(values))
    assert planned(tmp_path, one).gateway.encoder.banned == ((1,), (5, 6))


@pytest.mark.parametrize(
    ("generation", "sets", "temperature"),
    [
        ({}, (), 0.0),
        ({"do_sample": False, "temperature": 0.7}, (), 0.0),
        ({"do_sample": True, "temperature": 0.7}, (), 0.7),
        ({"do_sample": True}, (), 1.0),
        ({"do_sample": True, "temperature": 0.7}, ("model.generation_config=ignore",), 0.0),
        ({}, ("engine.sampling.temperature=0.4",), 0.4),
    ],
)
def test_sampling_is_greedy_unless_configured(
    tmp_path: Path, generation: dict[str, Any], sets: tuple[str, ...], temperature: float
) -> None:
    one = save(tmp_path / "bart", "bart")
    config = one.path / "generation_config.json"
    config.write_bytes(msgspec.json.encode(msgspec.json.decode(config.read_bytes()) | generation))
    assert planned(tmp_path, one, *sets).gateway.sampling.temperature == temperature


def test_compiled_kernels_are_used_on_a_cpu_where_there_are_some(tmp_path: Path, made: Callable) -> None:
    compiled = Machine(2, "affinity", 8 * 2**30, "MemAvailable", no_gpu="no driver", kernels=("avx2",))
    for host, kernels in ((replace(compiled, kernels=()), "torch"), (compiled, "avx2")):
        plan = planned(tmp_path, made("bart"), host=host)
        assert resolved(plan)["hardware.kernels"][0] == plan.engines[0].hardware.kernels == kernels
    for weights in ("int8", "int4"):
        engine = planned(tmp_path, made("bart"), f"quantization.weights={weights}", host=compiled).engines[0]
        assert engine.quantization.weights == weights


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            "engine.cache.prefix=true",
            "depend on the complete encoder input, so requests cannot share them; leave it",
        ),
        ("model.task=embed", "this checkpoint is an encoder-decoder model; supported is generate"),
        ("model.task=score", "supported is generate"),
        ("model.task=classify", "supported is generate"),
        ("model.pooling.pool=mean", "model.pooling: only for embedding"),
    ],
)
def test_keys_that_exclude_an_encoder_are_errors(tmp_path: Path, made: Callable, write: str, words: str) -> None:
    host = Machine(2, "affinity", 8 * 2**30, "MemAvailable", no_gpu="no driver", kernels=("avx2",))
    told = refused(tmp_path, made("bart"), write, host=host)
    assert f"{write.partition('=')[0]}: " in told or "model.pooling" in told
    assert words in told


def test_the_prefix_cache_is_off_with_a_reason(tmp_path: Path, made: Callable) -> None:
    plan = planned(tmp_path, made("bart"))
    assert plan.engines[0].cache.prefix is False
    assert resolved(plan)["engine.cache.prefix"] == (False, "cross-attention states depend on the whole encoder input")
    assert planned(tmp_path, made("bart"), "engine.cache.prefix=false").engines[0].cache.prefix is False


def test_files_of_sentence_transformers_have_to_be_overruled(tmp_path: Path) -> None:
    one = save(tmp_path / "bart")
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (one.path / "modules.json").write_bytes(msgspec.json.encode(listed))
    (one.path / "1_Pooling").mkdir()
    (one.path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert "model.task: embed (modules.json says so): this checkpoint is an encoder-decoder" in refused(tmp_path, one)
    assert planned(tmp_path, one, "model.task=generate").gateway.tasks == ("generate",)


def test_on_a_gpu_triton_computes_or_torch(tmp_path: Path, made: Callable) -> None:
    host = hardware("h200x1")
    engine = planned(tmp_path, made("long"), host=host).engines[0]
    assert (engine.hardware.device, engine.hardware.kernels, engine.scheduling.max_step_tokens) == (
        "cuda",
        "triton",
        8192,
    )
    assert planned(tmp_path, made("bart"), "hardware.kernels=torch", host=host).engines[0].hardware.kernels == "torch"


def test_a_decode_step_reads_nothing_that_only_sources_are_multiplied_by(tmp_path: Path, made: Callable) -> None:
    """Counted by transformers' own names."""
    one = made("bart")
    plan = planned(tmp_path, one, "quantization.kv_cache=float32", "hardware.kernels=torch")
    (first, *_), prefill = accounts(plan)["decode:1"].steps, accounts(plan)["prefill"].steps
    of_sources, of_replies = 0, 0
    for name, parameter in one.model.named_parameters():
        if "embed_positions" in name or "shared" in name:
            continue
        only = name.startswith("model.encoder.") or ("encoder_attn.k" in name or "encoder_attn.v" in name)
        of_sources += parameter.numel() * 4 * only
        of_replies += parameter.numel() * 4 * (not only)
    head = one.model.model.shared.weight.numel() + one.model.final_logits_bias.numel()
    assert first.value == of_replies + head * 4
    read = next(step for step in prefill if step.name == "read")
    assert str(f"{of_sources:,}") in read.formula


def test_encoder_operations_include_cross_attention_states(tmp_path: Path, made: Callable) -> None:
    one = made("bart")
    (first, *_) = accounts(planned(tmp_path, one))["prefill"].steps
    multiplied = sum(
        weight.numel()
        for name, weight in one.model.named_parameters()
        if weight.ndim == 2
        and "embed" not in name
        and "shared" not in name
        and (name.startswith("model.encoder.") or "encoder_attn.k" in name or "encoder_attn.v" in name)
    )
    attended = 2 * 2 * 64 * 32 * 2  # layers, products, keys, all heads, of a multiplication and an addition
    assert first.value == 2 * multiplied + attended


def test_workspace_includes_the_encoder(tmp_path: Path, made: Callable) -> None:
    plan = planned(tmp_path, made("long"), "hardware.kernels=torch")
    steps = {step.name: step.value for step in accounts(plan)["workspace"].steps}
    assert steps["states of encoder inputs (tokens × hidden)"] == 1280 * 32 * 4
    assert steps["scores of an encoder input (copies × heads × tokens × tokens)"] == 4 * 1024 * 1024 * 4
    for account in accounts(plan).values():
        for step in account.steps:
            assert computed(step.formula) == pytest.approx(step.value, rel=1e-9), (account.key, step)


def test_an_encoder_that_is_wider_than_its_decoder_makes_a_wide_step(tmp_path: Path) -> None:
    plan = planned(tmp_path, save(tmp_path / "bart", encoder_ffn_dim=4000), "hardware.kernels=torch")
    steps = {step.name: step.value for step in accounts(plan)["workspace"].steps}
    assert steps["activations (tokens × widest layer)"] == 512 * (3 * 4000 + 4 * 32) * 4


@pytest.mark.parametrize("ffn", [{}, {"encoder_ffn_dim": 4000}, {"decoder_ffn_dim": 4000}])
def test_buffers_of_compiled_kernels_are_exactly_those_planned(tmp_path: Path, ffn: dict[str, int]) -> None:
    """A step has buffers for the wider of encoder and decoder, and keys and values of one encoder layer."""
    config = planned(tmp_path, save(tmp_path / "bart", **ffn), *SMALL)
    worker = build_worker(config.engines[0], lambda phase, fraction: None)
    found = worker._runner._text_model.buffer_bytes
    worker.close()
    planned_bytes = sum(step.value for step in accounts(config)["workspace"].steps if step.name.startswith("buffer"))
    assert planned_bytes <= found < planned_bytes + 16 * 4 * 30  # each buffer is rounded up to 16 numbers


def test_the_plan_can_be_read(tmp_path: Path, made: Callable) -> None:
    plan = planned(tmp_path, made("bart"))
    assert "BartForConditionalGeneration" in as_text(plan) and '"decoder_start_ids"' in as_json(plan)


def test_weights_in_halves_are_served_in_float32(tmp_path: Path) -> None:
    one = save(tmp_path / "bart")
    one.model.to(torch.bfloat16).save_pretrained(one.path)
    plan = planned(tmp_path, one, *SMALL)
    held, _ = built(plan.engines[0])
    assert plan.engines[0].model.dtype == "float32" and plan.engines[0].memory.ranks == (held,)


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
def test_a_gpus_table_is_as_large_as_planned(tmp_path: Path, made: Callable, kind: str) -> None:
    from engine.worker.precompile import parts_on
    from kernels.fp8 import Fp8Products

    plan = planned(tmp_path, made(kind), SMALL[0], host=hardware("h200x1"))
    engine = with_arguments(plan.engines[0], load="random")
    rows = next(step for account in plan.memory.accounts for step in account.steps if step.name.startswith("rows of a"))
    parts, _ = parts_on(torch.device("meta"), engine, Fp8Products())
    assert parts.table_bytes == plan.memory.tables - rows.value
