"""A service whose engine is two processes: the same answers, whole again and going on after one was killed."""

import json
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo.yaml"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
LONG = {"model": "demo", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": 0}


def rank_of(appliance):
    """The process id of rank 1."""
    found = [pid for pid, line in appliance.processes().items() if "engine.rank" in line]
    return found[0] if len(found) == 1 else None


@pytest.mark.nightly(
    "tests/e2e/test_ranks.py::test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on"
)
def test_two_ranks_answer_as_one_does_and_leave_no_process(demo, launch):
    appliance = launch(DEMO, "-tp", "2", "--quantization.kv_cache", "float32")  # as the demo
    appliance.wait_ready()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", LONG | {"max_tokens": 40})):
        one, two = (each.client.post(path, json=body).json() for each in (demo, appliance))
        assert one["choices"][0].get("text") == two["choices"][0].get("text")
        assert one["choices"][0].get("message") == two["choices"][0].get("message")
        for usage in (one["usage"], two["usage"]):
            usage.pop("prompt_tokens_details")  # what others have left in the cache
        assert one["usage"] == two["usage"]
    assert rank_of(appliance) is not None
    ranks = appliance.client.get("/ready").json()["engines"][0]["memory"]
    assert len(ranks) == 2 and all(rank["measured"]["loading"]["kept"] > 0 for rank in ranks)
    for rank in ranks:
        assert all(part["planned"] == part["real"] for part in rank["parts"].values()) and rank["parts"]["kv"]["real"]
    assert "please report it" not in appliance.output()
    assert appliance.stop() == 0
    assert not appliance.processes()


def test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on(launch, eventually):
    appliance = launch(DEMO, "-tp", "2")
    appliance.wait_ready()
    whole = appliance.client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    before, engine = rank_of(appliance), appliance.pids()["engine-0"]
    pieces, errors, far = [], [], threading.Event()

    def read():
        with (
            httpx.Client(base_url=appliance.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    record = json.loads(line[6:])
                    errors.extend([record["error"]["message"]] if "error" in record else [])
                    pieces.extend(choice["text"] for choice in record.get("choices", ()))
                if len(pieces) == 5:
                    far.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert far.wait(100)
    os.kill(before, signal.SIGKILL)
    reader.join(120)
    assert not reader.is_alive()
    eventually("another engine", lambda: appliance.pids().get("engine-0") not in (None, engine))
    eventually("another rank", lambda: rank_of(appliance) not in (None, before))
    assert not errors and "".join(pieces) == whole
    assert f"rank 1 (process {before}) was killed by SIGKILL" in appliance.output(), appliance.output()
    appliance.wait_ready()
    again = appliance.client.post("/v1/completions", json=LONG | {"max_tokens": 20}).json()["choices"][0]["text"]
    assert again and whole.startswith(again)
    assert appliance.stop() == 0
    assert not appliance.processes()
