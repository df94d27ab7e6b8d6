"""Traces of the real demo: what a collector receives from requests, also while an engine is killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.appliance.observability.collector import attributes, collecting

ROOT = Path(__file__).resolve().parents[2]
ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CHAT = {"messages": [{"role": "user", "content": "canary question"}], "max_tokens": 8, "temperature": 0, "seed": 3}


def test_collector_receives_the_spans_of_requests_and_of_a_killed_engine(launch, eventually):
    with collecting() as collector:
        traces = ("observability.traces.endpoint=" + collector.url, "observability.traces.service_name=demo")
        appliance = launch(ROOT / "manifests" / "demo.yaml", *(part for each in traces for part in ("--set", each)))
        appliance.wait_ready()
        reply = appliance.client.post(
            "/v1/chat/completions", json=CHAT, headers={"traceparent": f"00-{ID}-00f067aa0ba902b7-01"}
        ).json()
        long = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with appliance.client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            for _ in range(20):
                next(lines)
            os.kill(appliance.pids()["engine-0"], signal.SIGKILL)
            rest = list(lines)
        assert rest[-2:] != [] and "data: [DONE]" in rest
        appliance.client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1})
        eventually("spans", lambda: len([each for each in collector.spans if each.kind == 2]) >= 3)
        assert appliance.stop() == 0
    assert collector.faults == []
    chat = [each for each in collector.spans if each.trace_id.hex() == ID]
    by_name = {each.name: each for each in chat}
    assert set(by_name) == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    found = attributes(by_name["POST /v1/chat/completions"].attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == [reply["choices"][0]["finish_reason"]]
    assert found["gen_ai.response.model"] == reply["model"]
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.seed"]) == (8, 3)
    assert "canary" not in json.dumps(found)
    ordered = [by_name[name] for name in ("queue", "prefill", "decode")]
    for before, after in zip(ordered, ordered[1:], strict=False):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    outer = by_name["POST /v1/chat/completions"]
    assert outer.start_time_unix_nano <= ordered[0].start_time_unix_nano
    assert ordered[-1].end_time_unix_nano <= outer.end_time_unix_nano
    (completion,) = collector.named("POST /v1/completions")
    (decode,) = [each for each in collector.named("decode") if each.trace_id == completion.trace_id]
    events = [each.name for each in decode.events]
    assert events[0] == "slipway.engine.lost" and events[-1] == "slipway.engine.assigned"
    assert attributes(decode.attributes)["gen_ai.usage.output_tokens"] == 400
    (refused,) = [each for each in collector.named("POST /v1/chat/completions") if each.trace_id.hex() != ID]
    assert attributes(refused.attributes)["http.response.status_code"] == 400 and refused.status.code == 0
    resource = attributes(collector.requests[0][2].resource_spans[0].resource.attributes)
    assert resource["service.name"] == "demo"


@pytest.mark.nightly(
    "tests/appliance/observability/test_tracing.py::test_messages_follow_the_conventions_for_generative_ai"
)
def test_content_is_recorded_if_the_manifest_asks_for_it(launch, eventually):
    with collecting() as collector:
        traces = (f"observability.traces.endpoint={collector.url}", "observability.traces.content=true")
        appliance = launch(ROOT / "manifests" / "demo.yaml", *(part for each in traces for part in ("--set", each)))
        appliance.wait_ready()
        reply = appliance.client.post("/v1/chat/completions", json=CHAT).json()
        text = appliance.client.post("/v1/completions", json={"prompt": "canary", "max_tokens": 4}).json()
        eventually("spans", lambda: len([each for each in collector.spans if each.kind == 2]) == 2)
        assert appliance.stop() == 0
    chat, completion = (
        attributes(collector.named(f"POST /v1/{name}")[0].attributes) for name in ("chat/completions", "completions")
    )
    asked = {"role": "user", "parts": [{"type": "text", "content": "canary question"}]}
    assert json.loads(chat["gen_ai.input.messages"]) == [asked]
    (answer,) = json.loads(chat["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": reply["choices"][0]["message"]["content"]}]
    assert answer["finish_reason"] == reply["choices"][0]["finish_reason"]
    assert json.loads(completion["gen_ai.input.messages"])[0]["parts"][0]["content"] == "canary"
    assert json.loads(completion["gen_ai.output.messages"])[0]["parts"][0]["content"] == text["choices"][0]["text"]
