"""Adapters of a running service: names, every route, metrics and timelines; adapters that are loaded into it, by the
routes of vLLM, SageMaker and KServe; swaps, crashes of engine and gateway.

Slots hold one adapter, so that most requests evict the adapter of another one."""

import json
import os
import shutil
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.documented import documented
from tests.e2e.adapter_requests import completion, greedy, listed, load, stream_over_crash, tokens
from tests.e2e.conftest import ROOT, Appliance
from tests.engine.adapters import merge, random_pairs, write_adapter

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], folder: Path) -> tuple[Appliance, dict[str, list[int]]]:
    """The demo with two adapters of the manifest and another one, and the greedy tokens of each merged model."""
    shutil.copytree(ROOT / "manifests" / "demo", folder / "demo")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "demo", dtype=torch.float32)
    pairs = {name: random_pairs(base, TARGETS, seed=seed, size=0.14) for seed, name in enumerate(("one", "two", "new"))}
    for name in pairs:
        write_adapter(folder / "store" / name, pairs[name])
    write_adapter(folder / "outside", pairs["one"])
    manifest = folder / "m.yaml"
    manifest.write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: demo}, names: [base]}\nhardware: {device: cpu}\n"
        "adapters: [{name: one, path: store/one}, {name: org/two, path: store/two}]\n"
        "lifecycle: {self_test: {prompts: 0}}\n"
        "adapter_loading: {max_active: 1, folders: [store], on_request: true}\n"
    )
    appliance = launch(manifest)
    right = {}
    for name, own in pairs.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "demo", dtype=torch.float32)
        merge(model, own)
        right[name] = model
    appliance.wait_ready()
    prompt = completion(appliance, "base", max_tokens=1)["choices"][0]["prompt_token_ids"]
    return appliance, {name: greedy(model, prompt) for name, model in right.items()}


def test_models_list_the_base_then_the_adapters_with_their_parent(service):
    appliance, _ = service
    listed = appliance.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        ("base", "base", None),
        ("one", "one", "base"),
        ("org/two", "org/two", "base"),
    ]
    assert appliance.client.get("/v1/models/org/two").json()["parent"] == "base"


def test_replies_are_those_of_the_adapter_with_its_name(service):
    appliance, right = service
    reply = completion(appliance, "one")
    assert (reply["model"], reply["choices"][0]["token_ids"]) == ("one", right["one"])
    assert len({str(tokens(appliance, model)) for model in ("base", "one", "org/two")}) == 3


def test_every_route_takes_the_adapter_as_its_model(service):
    appliance, _ = service
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


def test_unknown_names_are_refused_on_every_route(service):
    appliance, _ = service
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


def test_adapters_do_not_read_the_prefix_cache_of_one_another(service):
    appliance, _ = service
    prompt = "A long text about ships, harbours and slipways, which fills several blocks of the cache. " * 3

    def cached(model: str) -> int:
        usage = completion(appliance, model, prompt=prompt, max_tokens=2)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(model) for model in ("base", "one", "org/two")] == [0, 0, 0]
    assert all(cached(model) > 100 for model in ("base", "one", "org/two"))


def test_metrics_timelines_and_the_log_name_the_adapter(service):
    appliance, _ = service
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


def test_an_adapter_is_loaded_swapped_and_continues_after_a_crash(service, folder: Path):
    appliance, right = service
    assert load(appliance, "b", "two") == (200, "Success: LoRA adapter 'b' added successfully.")
    assert listed(appliance) == {"base": None, "one": "base", "org/two": "base", "b": "base"}
    assert tokens(appliance, "b") == right["two"]
    assert tokens(appliance, "one") == right["one"]
    assert appliance.metric("slipway_adapter_evictions_total") >= 2
    assert appliance.metric("slipway_adapters_loaded") == 3
    body = {"model": "b", "prompt": "Tell me", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    expected = completion(appliance, **body)["choices"][0]["text"]
    engine = appliance.pids()["engine-0"]
    assert stream_over_crash(appliance, body, lambda: os.kill(engine, signal.SIGKILL)) == expected
    assert tokens(appliance, "b") == right["two"]
    assert load(appliance, "b", "new")[0] == 400
    assert load(appliance, "b", "new", load_inplace=True)[0] == 200
    assert tokens(appliance, "b") == right["new"]


def test_a_gateway_that_is_restarted_knows_the_loaded_adapters(service):
    appliance, right = service
    assert load(appliance, "kept", str(Path("new")))[0] == 200
    before = listed(appliance)
    gateway = appliance.pids()["gateway"]
    os.kill(gateway, signal.SIGKILL)
    appliance.wait_ready()
    assert listed(appliance) == before
    assert tokens(appliance, "kept") == right["new"]
    assert appliance.client.request("DELETE", "/adapters/kept").text == "Adapter kept unregistered"


def test_an_unloaded_adapter_is_not_found_and_its_stream_is_completed(service):
    appliance, _ = service
    assert load(appliance, "c", "two")[0] == 200
    body = {"model": "c", "prompt": "Tell me", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    expected = completion(appliance, **body)["choices"][0]["text"]

    def unload() -> None:
        reply = appliance.client.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
        assert appliance.client.post("/v1/completions", json={"model": "c", "prompt": "a"}).status_code == 404

    assert stream_over_crash(appliance, body, unload) == expected
    assert "c" not in listed(appliance)
    reply = appliance.client.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "NotFoundError")


def test_wrong_loads_are_refused(service, folder: Path):
    appliance, _ = service
    (folder / "store" / "link").symlink_to(folder / "outside")
    for path in ("../outside", str(folder / "outside"), "link", "/etc"):
        status, text = load(appliance, "x", path)
        assert status == 400
        assert "InvalidUserInput" in text and "outside of the folders" in text
    status, text = load(appliance, "x", "none")
    assert status == 404 and "No adapter found for 'x'" in text
    status, text = load(appliance, "x", "")
    assert status == 400 and "Both 'lora_name' and 'lora_path' must be provided." in text
    wide = random_pairs(transformers.AutoModelForCausalLM.from_pretrained(folder / "demo"), ("q_proj",), 17)
    write_adapter(folder / "store" / "wide", wide, rank=17)
    status, text = load(appliance, "x", "wide")
    assert status == 400 and "has rank 17, and slots hold up to 16: raise adapter_loading.max_rank" in text
    assert "x" not in listed(appliance)


def test_a_request_loads_the_adapter_that_it_names(service):
    appliance, right = service
    assert "new" not in listed(appliance)
    assert tokens(appliance, "new") == right["new"]
    assert listed(appliance)["new"] == "base"
    reply = appliance.client.post("/v1/completions", json={"model": "link", "prompt": "a"})
    assert reply.status_code == 404


def test_sagemaker_registers_selects_and_removes_adapters(service):
    appliance, right = service
    client = appliance.client
    reply = client.post("/adapters", json={"name": "sm", "src": "two", "preload": True})
    assert (reply.status_code, reply.text) == (200, "Adapter sm registered")
    assert {"name": "sm"} in client.get("/adapters").json()["adapters"]
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "sm"}
    assert tokens(appliance, "base", headers=header) == right["two"]
    body = {"prompt": "The ship", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    invoked = client.post("/invocations", json=body, headers=header).json()
    assert (invoked["model"], invoked["choices"][0]["token_ids"]) == ("sm", right["two"])
    assert client.post("/adapters?name=other&src=new").status_code == 200
    assert client.post("/adapters", json={"name": "sm"}).status_code == 400
    assert client.post("/adapters", json={"name": "pinned", "src": "two", "pin": True}).status_code == 400
    for name in ("sm", "other"):
        assert client.request("DELETE", f"/adapters/{name}").status_code == 200
    assert client.request("DELETE", "/adapters/sm").status_code == 404
    assert client.post("/v1/completions", json=body, headers=header).status_code == 404


def test_a_multi_model_endpoint_loads_lists_invokes_and_unloads_adapters(service, folder: Path):
    """The adapter comes from an archive."""
    appliance, right = service
    client = appliance.client
    with tarfile.open(folder / "store" / "packed.tar.gz", "w:gz") as archive:
        archive.add(folder / "store" / "two", "two")
    body = {"model_name": "packed", "url": "packed.tar.gz"}
    shown = {"modelName": "packed", "modelUrl": "packed.tar.gz"}
    reply = client.post("/models", json=body)
    assert (reply.status_code, reply.json()) == (200, shown)
    assert client.post("/models", json=body).status_code == 409
    assert client.post("/models", json={**body, "model_name": "base"}).status_code == 409
    assert client.post("/models", json={"model_name": "x"}).status_code == 400
    assert client.post("/models", json={"model_name": "x", "url": "absent.tar.gz"}).status_code == 404
    names, token = [], ""
    for _ in range(2):
        page = client.get("/models", params={"limit": 1, "next_page_token": token}).json()
        names += [one["modelName"] for one in page["models"]]
        token = page["nextPageToken"]
    assert names == sorted(listed(appliance))[:2]
    assert client.get("/models/packed").json() == shown and client.get("/models/absent").status_code == 404
    asked = {"prompt": "The ship", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    target = {"X-Amzn-SageMaker-Target-Model": "packed.tar.gz"}
    reply = client.post("/models/packed/invoke", json=asked, headers=target)
    assert reply.json()["model"] == "packed" and reply.json()["choices"][0]["token_ids"] == right["two"]
    assert client.post("/models/base/invoke", json=asked).json()["model"] == "base"
    assert client.post("/models/absent/invoke", json=asked).status_code == 404
    assert client.get("/ping").status_code == 200
    assert client.delete("/models/packed").status_code == 200
    assert client.delete("/models/packed").status_code == client.get("/models/packed").status_code == 404
    assert client.delete("/models/base").status_code == 501


def test_damaged_and_foreign_archives_of_adapters_are_refused(service, folder: Path):
    appliance, _ = service
    (folder / "store" / "damaged.tar.gz").write_bytes(b"\x1f\x8b damaged")
    with tarfile.open(folder / "store" / "foreign.tgz", "w:gz") as archive:
        archive.add(folder / "m.yaml", "m.yaml")
    with tarfile.open(folder / "outside.tar.gz", "w:gz") as archive:
        archive.add(folder / "outside", "outside")
    for url in ("damaged.tar.gz", "foreign.tgz", "../outside.tar.gz"):
        reply = appliance.client.post("/models", json={"model_name": "x", "url": url})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "InvalidUserInput"), reply.text
    assert "x" not in listed(appliance)


def test_the_repository_extension_loads_and_unloads_by_name(service):
    appliance, right = service
    client = appliance.client
    for _ in range(2):
        reply = client.post("/v2/repository/models/new/load")
        assert (reply.status_code, reply.json()) == (200, {"name": "new", "load": True})
    assert tokens(appliance, "new") == right["new"]
    index = client.post("/v2/repository/index").json()
    assert {"name": "new", "version": "1", "state": "READY", "reason": ""} in index
    assert client.post("/v2/repository/models/base/load").status_code == 200
    reply = client.post("/v2/repository/models/absent/load")
    assert reply.status_code == 404 and isinstance(reply.json()["error"], str)
    reply = client.post("/v2/repository/models/new/unload")
    assert (reply.status_code, reply.json()) == (200, {"name": "new", "unload": True})
    assert client.post("/v2/repository/models/new/unload").status_code == 404
    assert client.post("/v2/repository/models/base/unload").status_code == 501


def test_the_commands_of_the_page_run(service):
    appliance, _ = service
    reply = json.loads(documented("docs/adapters.md", "chat/completions", appliance.url, {'"sql"': '"one"'}))
    assert reply["model"] == "one"
    said = documented("docs/adapters.md", "load_lora_adapter", appliance.url, {'_path": "sql"': '_path": "new"'})
    assert "sql" in said and completion(appliance, "sql")["model"] == "sql"


@pytest.mark.nightly("tests/e2e/test_adapters.py::test_an_adapter_is_loaded_swapped_and_continues_after_a_crash")
def test_a_stream_of_an_adapter_continues_when_its_engine_is_killed(service):
    appliance, _ = service
    body = {"model": "one", "prompt": "Tell me", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    expected = completion(appliance, **body)["choices"][0]["text"]
    assert expected != completion(appliance, **{**body, "model": "base"})["choices"][0]["text"]
    engine, restarts = appliance.pids()["engine-0"], appliance.metric("slipway_engine_restarts_total")
    assert stream_over_crash(appliance, body, lambda: os.kill(engine, signal.SIGKILL)) == expected
    assert appliance.metric("slipway_engine_restarts_total") == restarts + 1
