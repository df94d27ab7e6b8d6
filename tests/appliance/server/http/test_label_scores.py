"""POST /generative_scoring, and `logprob_token_ids` on generating routes: submitted requests and refusals."""

import math
from typing import Any

import pytest

from appliance.config.gateway import SamplingDefaults
from appliance.server.chat.label_scores import probabilities

PATH = "/generative_scoring"
ASKED = {"query": "hello ", "items": ["world", "END"], "label_token_ids": [7, 9]}


def test_each_item_is_a_prompt_of_one_token_drawn_from_the_models_own_distribution(make_gateway: Any) -> None:
    """The service's sampling defaults are not applied: they would change the distribution."""
    gateway = make_gateway(sampling=SamplingDefaults(repetition_penalty=1.7, presence_penalty=1.0, temperature=1.5))
    gateway.says("a", "b")
    status, reply = gateway.post(PATH, ASKED)
    assert status == 200
    shares = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]
    assert [one["label_scores"] for one in reply["data"]] == [pytest.approx(shares)] * 2
    assert [submit.prompt for submit in gateway.submits] == [tuple(gateway.ids(f"hello {it}")) for it in ASKED["items"]]
    for submit in gateway.submits:
        sampling = submit.sampling
        assert (submit.max_tokens, sampling.logprob_ids, sampling.logprobs) == (1, (7, 9), 0)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.temperature) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": "world"}, "items"),
        ({"items": [3.5]}, "items"),
        ({"items": ["x"] * 5000}, "items"),
        ({"items": [[10**6]]}, "items"),
        ({"query": 3}, "query"),
        ({"query": "", "items": [""]}, "items"),
        ({"query": "hello " * 100000}, "input_text"),
    ],
)
def test_unscorable_inputs_are_refused_by_name(gateway: Any, change: dict[str, Any], param: str) -> None:
    status, reply = gateway.post(PATH, {**ASKED, **change})
    assert status == 400, reply
    assert reply["error"]["param"].removeprefix("body.") == param, reply
    assert "logprob_token_ids" not in reply["error"]["message"]
    assert not gateway.submits


def test_too_many_items_are_refused_before_any_is_read(gateway: Any) -> None:
    """The error names the key that raises the limit; a text too long for any context shows that no item was read."""
    items = ["hello " * 700] * (gateway.config.limits.max_prompts + 1)
    status, reply = gateway.post(PATH, {**ASKED, "items": items})
    assert (status, reply["error"]["param"]) == (400, "items")
    message = (
        f"items has {len(items)} entries; the server's limits.max_prompts allows {gateway.config.limits.max_prompts}."
    )
    assert reply["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "logprobs": True}),
    ],
)
def test_tokens_of_ones_own_choice_need_logprobs_and_a_vocabulary(gateway: Any, path: str, body: Any) -> None:
    without = {name: value for name, value in body.items() if name != "logprobs"}
    for fields in ({**body, "logprob_token_ids": list(range(129))}, {**body, "logprob_token_ids": [10**6]}):
        status, reply = gateway.post(path, fields)
        assert (status, reply["error"]["param"]) == (400, "logprob_token_ids")
    status, reply = gateway.post(path, {**without, "logprob_token_ids": [3]})
    assert status == 400 and "requires logprobs" in reply["error"]["message"]
    gateway.says("x").post(path, {**body, "logprob_token_ids": [3, 1]})
    assert gateway.submits[-1].sampling.logprob_ids == (3, 1)


def test_a_prompt_that_is_only_scored_has_no_reply_to_score(gateway: Any) -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1, "logprob_token_ids": [3]}
    status, reply = gateway.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "logprob_token_ids")


def test_labels_that_are_all_impossible_are_equal() -> None:
    assert probabilities([float("-inf")] * 4, among_labels=True) == [0.25] * 4
    assert probabilities([float("-inf"), 0.0], among_labels=False) == [0.0, 1.0]
    assert probabilities([-1000.0, -1000.0], among_labels=True) == [0.5, 0.5]
