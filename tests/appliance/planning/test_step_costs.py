"""Costs of steps in the engine's configuration."""

from pathlib import Path

import pytest

from engine.lowering.lower import lower
from engine.lowering.measures import attention_costs, attention_operations, routes
from engine.models.checkpoint import read_checkpoint
from engine.models.families import declaration
from tests.appliance.planning.test_plan import CPU, planned
from tests.engine.test_measurements import COSTS, DEMO

GPT_OSS = {
    **{"architectures": ["GptOssForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 32},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_costs_follow_from_the_program_and_are_absent_by_default(tmp_path: Path) -> None:
    facts = read_checkpoint(DEMO)
    plain = planned(tmp_path, "hardware.kernels=torch", machine=CPU, facts=facts)
    assert plain.engines[0].observability.step_costs is None and plain.gateway.hardware is None
    plan = planned(tmp_path, "hardware.kernels=torch", "observability.mfu_metrics=true", machine=CPU, facts=facts)
    costs, limits = plan.engines[0].observability.step_costs, plan.estimate.limits
    assert costs is not None and limits is not None and plan.gateway.hardware is not None
    assert (costs.token, costs.sample, costs.attention) == (COSTS.token, COSTS.sample, COSTS.attention)
    assert costs.experts == 0 and costs.causal and len(costs.state) == 1
    assert plan.gateway.hardware.flops == limits.operations
    read = next(one for one in plan.estimate.accounts if one.key == "decode:1").steps
    assert read[0].value == costs.dense and read[1].value == 1024 * costs.state[0][1]


@pytest.mark.parametrize("length", [1, 8, 9, 50])
def test_attention_costs_are_the_terms_of_attention_operations(length: int) -> None:
    program = lower(declaration("GptOssForCausalLM")(GPT_OSS))
    costs = attention_costs(program.ops)
    assert [reach for reach, _ in costs] == [0, 8]
    assert sum(min(length, reach or length) * each for reach, each in costs) == attention_operations(
        program.ops, length
    )
    assert routes(program) == ((0.25, 4),)
