"""Speculative decoding in the plan: the method of auto with its reason, memory of drafts, and the expected gain."""

from pathlib import Path

import pytest

from appliance.planning.report import as_text
from appliance.planning.speculation import ACCEPTANCE
from tests.appliance.planning.test_plan import COMPILED, CPU, planned


@pytest.mark.parametrize("method", ["off", "jump-ahead", "ngram", "suffix"])
def test_a_written_method_is_not_adaptive(tmp_path: Path, method: str) -> None:
    plan = planned(tmp_path, f"speculation.method={method}", machine=CPU)
    assert plan.engines[0].speculation.method == plan.gateway.speculation == method
    assert not plan.engines[0].speculation.adaptive


def test_auto_selects_an_adaptive_method_and_says_why(tmp_path: Path) -> None:
    plan = planned(tmp_path, "speculation.method=auto", machine=CPU)
    assert plan.engines[0].speculation.method == plan.gateway.speculation == "suffix"
    assert plan.engines[0].speculation.adaptive
    said = as_text(plan)
    assert "auto → suffix" in said and "lookup needs no draft model" in said and "pause while they do not pay" in said


def test_drafts_take_memory_for_their_logits(tmp_path: Path) -> None:
    plain, auto = (planned(tmp_path, f"speculation.method={method}", machine=CPU) for method in ("off", "auto"))
    assert auto.memory.workspace > plain.memory.workspace


def test_the_expected_gain_is_the_mean_length_over_the_relative_time_of_a_step(tmp_path: Path) -> None:
    plan = planned(tmp_path, "speculation.method=auto", "speculation.tokens=3", machine=COMPILED)
    roofline = plan.estimate.roofline
    assert roofline is not None and [one.rows for one in roofline.drafts] == [one.rows for one in roofline.decode]
    for one in roofline.drafts:
        assert one.step >= 1 and [rate for rate, _ in one.gains] == list(ACCEPTANCE)
        for rate, gain in one.gains:
            assert gain == pytest.approx((1 + rate + rate**2 + rate**3) / one.step)
    assert roofline.drafts[0].gains[-1][1] >= roofline.drafts[-1].gains[-1][1], "many rows do not gain more"
    assert "drafts, 1 row: a step takes" in as_text(plan)


def test_a_plan_without_drafts_has_no_gain(tmp_path: Path) -> None:
    plan = planned(tmp_path, machine=COMPILED)
    assert plan.estimate.roofline is not None and not plan.estimate.roofline.drafts
    assert "drafts, 1 row" not in as_text(plan)
