"""Traces as a collector receives them: real HTTP, messages parsed with OpenTelemetry's definitions."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from appliance.observability.trace_settings import Sampler, TraceSettings
from tests.appliance.observability.collector import Collector, attributes, collecting

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as each:
        yield each
        assert each.faults == []


@pytest.fixture
def traces(collector) -> TraceSettings:
    return TraceSettings(collector.url, resource={"service.name": "test"}, delay_s=0.05, timeout_s=5.0)


def seconds(span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_request_has_a_server_span_with_queue_prefill_and_decode(start_gateway, engine, collector, traces, eventually):
    """The fake engine queues 1 ms, prefills 2 ms and takes 3 ms a token"""
    gateway = start_gateway(engine, traces=traces)
    reply = gateway.generate(max_tokens=5)
    eventually("the spans", lambda: len(collector.spans) == 4)
    (request,) = collector.named("POST /test/generate")
    phases = {name: collector.named(name)[0] for name in ("queue", "prefill", "decode")}
    assert request.kind == 2 and not request.parent_span_id and len(request.trace_id) == 16
    assert {each.trace_id for each in collector.spans} == {request.trace_id}
    assert {each.parent_span_id for each in phases.values()} == {request.span_id}
    assert len({each.span_id for each in collector.spans}) == 4
    assert seconds(phases["prefill"]) == pytest.approx(0.002, abs=1e-6)
    assert seconds(phases["decode"]) == pytest.approx(0.012, abs=1e-6)
    assert phases["queue"].end_time_unix_nano == phases["prefill"].start_time_unix_nano
    assert phases["prefill"].end_time_unix_nano == phases["decode"].start_time_unix_nano
    found = attributes(request.attributes)
    assert found["http.request.method"] == "POST" and found["http.route"] == "/test/generate"
    assert found["http.response.status_code"] == 200 and request.status.code == 0
    assert found["slipway.request.id"] == reply.headers["X-Request-Id"]
    assert attributes(phases["decode"].attributes)["gen_ai.usage.output_tokens"] == 5
    assert attributes(phases["prefill"].attributes)["gen_ai.usage.input_tokens"] == 3


@pytest.mark.parametrize(("flags", "spans"), [("01", 4), ("00", 0), ("03", 4)])
def test_sampling_follows_the_caller(start_gateway, engine, collector, traces, flags, spans, eventually):
    gateway = start_gateway(engine, traces=traces)
    headers = {"traceparent": f"00-{ID}-{PARENT}-{flags}", "tracestate": "a=1"}
    gateway.client.post("/test/generate", json={"max_tokens": 2}, headers=headers)
    gateway.client.post("/test/generate", json={"max_tokens": 2})
    eventually("the spans", lambda: len(collector.spans) == 4 + spans)
    mine = [each for each in collector.spans if each.trace_id.hex() == ID]
    assert len(mine) == spans
    for each in mine:
        if each.kind == 2:
            assert each.parent_span_id.hex() == PARENT and each.trace_state == "a=1"
            assert each.flags == 0x301


def test_probes_and_metrics_are_not_traced(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=traces)
    for path in ("/ready", "/live", "/metrics", "/health"):
        gateway.client.get(path)
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    assert {each.name for each in collector.spans} == {"POST /test/generate", "queue", "prefill", "decode"}


def test_crash_of_the_engine_is_an_event_of_the_span(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=traces)
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 4, "stream": True}) as reply:
        eventually("the request", lambda: gateway.metric("slipway_requests_waiting") == 1)
        engine.give(2)
        eventually("tokens", lambda: gateway.metric("slipway_generation_tokens_total") == 2)
        engine.die()
        eventually("a crash", lambda: gateway.metric("slipway_request_interruptions_total") == 1)
        engine.holding = False
        engine.start()
        reply.read()
    eventually("the spans", lambda: len(collector.spans) == 4)
    (decode,) = collector.named("decode")
    events = [(each.name, attributes(each.attributes).get("slipway.tokens")) for each in decode.events]
    assert events == [("slipway.engine.lost", 2), ("slipway.engine.assigned", 2)]
    assert all(decode.start_time_unix_nano < each.time_unix_nano for each in decode.events)
    assert attributes(decode.attributes)["gen_ai.usage.output_tokens"] == 4


def test_failures_are_marked_with_their_type(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=traces)
    assert gateway.generate(raises="RuntimeError").status_code == 500
    assert gateway.generate(max_tokens=0).status_code == 400
    eventually("the spans", lambda: len(collector.spans) == 2)
    by_status = {attributes(each.attributes)["http.response.status_code"]: each for each in collector.spans}
    assert by_status[500].status.code == 2 and by_status[400].status.code == 0
    assert attributes(by_status[500].attributes)["error.type"] == "ApiError"
    assert attributes(by_status[400].attributes)["error.type"] == "InvalidBody"
    assert "canary" not in str(by_status[500])


def test_ratio_samples_the_same_requests_as_the_sdk():
    sampler = Sampler(0.25)
    assert sampler.samples("0" * 16 + "3fffffffffffffff", None) and not sampler.samples("0" * 16 + "4" + "0" * 15, None)
    assert sampler.samples("f" * 32, True) and not sampler.samples("0" * 32, False)
    assert not Sampler(0.25, follows_parent=False).samples("f" * 32, True)
    assert not Sampler(0.0).samples("0" * 32, None) and Sampler(1.0).samples("f" * 32, None)


def test_slow_collector_delays_no_request_and_full_queue_drops(start_gateway, engine, collector, traces, eventually):
    collector.pause_s = 3.0
    gateway = start_gateway(engine, traces=replace(traces, max_queue=8, max_batch=4, timeout_s=0.5))
    took = [gateway.generate(max_tokens=1).elapsed.total_seconds() for _ in range(12)]
    assert max(took) < 2.0
    eventually("drops", lambda: gateway.metric("slipway_trace_spans_dropped_total", reason="queue_full") > 0)


def test_absent_collector_fails_no_request(start_gateway, engine, traces, eventually):
    gateway = start_gateway(engine, traces=replace(traces, url="http://127.0.0.1:9/v1/traces"))
    assert gateway.generate(max_tokens=1).status_code == 200


def test_batch_is_sent_again_after_503_and_refused_after_400(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=traces)
    collector.statuses = [503]
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    assert collector.num_calls == 2 and len({each.span_id for each in collector.spans}) == 4
    collector.statuses = [400]
    gateway.generate(max_tokens=1)
    eventually("drops", lambda: gateway.metric("slipway_trace_spans_dropped_total", reason="rejected") == 4)
    assert gateway.metric("slipway_trace_spans_exported_total") == 4
