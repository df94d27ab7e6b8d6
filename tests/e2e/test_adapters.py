"""Adapters of a running service: names, every route, metrics, timelines, and streams that outlive a killed engine."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.documented import documented
from tests.e2e.conftest import Appliance
from tests.engine.adapters import merge, random_pairs, write_adapter

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapted(launch: Callable[..., Appliance], tmp_path_factory: pytest.TempPathFactory) -> tuple[Appliance, Any]:
    """The demo with two adapters, and the first one merged into the model of transformers."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(ROOT / "manifests" / "demo", folder / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "demo", dtype=torch.float32)
    one, two = (random_pairs(model, TARGETS, seed=seed, size=0.14) for seed in (1, 2))
    write_adapter(folder / "one", one)
    write_adapter(folder / "two", two)
    manifest = folder / "m.yaml"
    manifest.write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: demo}, names: [base]}\nhardware: {device: cpu}\n"
        "adapters: [{name: one, path: one}, {name: org/two, path: two}]\n"
    )
    appliance = launch(manifest)
    merge(model, one)
    appliance.wait_ready()
    return appliance, model


def completion(appliance: Appliance, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "The ship", "max_tokens": 12, "temperature": 0, **more}
    reply = appliance.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_models_list_the_base_then_the_adapters_with_their_parent(adapted):
    appliance, _ = adapted
    listed = appliance.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        ("base", "base", None),
        ("one", "one", "base"),
        ("org/two", "org/two", "base"),
    ]
    assert appliance.client.get("/v1/models/org/two").json()["parent"] == "base"


def test_a_completion_of_an_adapter_is_that_of_the_merged_model(adapted):
    appliance, merged = adapted
    reply = completion(appliance, "one", return_token_ids=True, ignore_eos=True)
    choice = reply["choices"][0]
    ids = torch.tensor([choice["prompt_token_ids"]])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat((ids, merged(ids).logits[:, -1:].argmax(-1)), 1)
    assert choice["token_ids"] == ids[0, -12:].tolist()
    assert reply["model"] == "one"
    texts = {completion(appliance, model)["choices"][0]["text"] for model in ("base", "one", "org/two")}
    assert len(texts) == 3


def test_every_route_takes_the_adapter_as_its_model(adapted):
    appliance, _ = adapted
    messages = [{"role": "user", "content": "Where is the ship?"}]
    same = {"max_tokens": 8, "temperature": 0}
    chat = {
        model: appliance.client.post("/v1/chat/completions", json={"model": model, "messages": messages, **same}).json()
        for model in ("base", "one")
    }
    texts = {model: reply["choices"][0]["message"]["content"] for model, reply in chat.items()}
    assert texts["base"] != texts["one"]
    assert chat["one"]["model"] == "one"
    anthropic = appliance.client.post("/v1/messages", json={"model": "one", "messages": messages, **same}).json()
    assert (anthropic["model"], anthropic["content"][0]["text"]) == ("one", texts["one"])
    wanted = {"model": "one", "input": messages, "max_output_tokens": 8, "temperature": 0}
    response = appliance.client.post("/v1/responses", json=wanted).json()
    assert response["model"] == "one"
    assert response["output"][0]["content"][0]["text"] == texts["one"]
    again = appliance.client.get(f"/v1/responses/{response['id']}").json()
    assert again["model"] == "one"


def test_unknown_names_are_refused_on_every_route(adapted):
    appliance, _ = adapted
    messages = [{"role": "user", "content": "a"}]
    for route, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
    ):
        reply = appliance.client.post(route, json={"model": "three", **body})
        assert reply.status_code == 404
        assert "The model `three` does not exist. Valid aliases: base, one, org/two." in reply.text
    assert appliance.client.get("/v1/models/three").status_code == 404


def test_adapters_do_not_read_the_prefix_cache_of_one_another(adapted):
    appliance, _ = adapted
    prompt = "A long text about ships, harbours and slipways, which fills several blocks of the cache. " * 3

    def cached(model: str) -> int:
        usage = completion(appliance, model, prompt=prompt, max_tokens=2)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(model) for model in ("base", "one", "org/two")] == [0, 0, 0]
    assert all(cached(model) > 100 for model in ("base", "one", "org/two"))


def test_metrics_timelines_and_the_log_name_the_adapter(adapted):
    appliance, _ = adapted
    before = appliance.metric("slipway_adapter_requests_total", adapter="org/two")
    reply = completion(appliance, "org/two", ignore_eos=True)
    assert appliance.metric("slipway_adapter_requests_total", adapter="org/two") == before + 1
    assert appliance.metric("slipway_adapter_generation_tokens_total", adapter="org/two") >= 12
    request = reply["id"].removeprefix("cmpl-")
    assert "model=org/two" in next(
        line for line in appliance.output().splitlines() if f"completed request_id={request}" in line
    )
    timeline = appliance.client.get(f"/v1/requests/{request}/why").text
    assert "for adapter org/two" in timeline


@pytest.mark.nightly("tests/e2e/test_adapter_loading.py::test_an_adapter_is_loaded_swapped_and_continues_after_a_crash")
def test_a_stream_of_an_adapter_continues_when_its_engine_is_killed(adapted):
    appliance, _ = adapted
    body = {"model": "one", "prompt": "Tell me", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    expected = completion(appliance, **body)["choices"][0]["text"]
    assert expected != completion(appliance, **{**body, "model": "base"})["choices"][0]["text"]
    killed, text = appliance.pids()["engine-0"], ""
    with appliance.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if killed and len(text) > 20:
                    os.kill(killed, signal.SIGKILL)
                    killed = 0
    assert text == expected
    assert appliance.metric("slipway_engine_restarts_total") == 1


def test_the_command_of_the_page_runs(adapted):
    appliance, _ = adapted
    reply = json.loads(documented("docs/adapters.md", "chat/completions", appliance.url, {'"sql"': '"one"'}))
    assert reply["model"] == "one"
