"""Traces as a collector receives them: real HTTP, messages parsed with OpenTelemetry's definitions."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from appliance.observability.metrics import Metrics, now
from appliance.observability.otlp_logs import EXPORTING, OtlpHandler
from appliance.observability.spans import RequestSpan, SequenceTimes, Span, input_messages
from appliance.observability.trace import Trace
from appliance.observability.trace_settings import Sampler, TraceSettings
from appliance.observability.tracing import Tracing
from tests.appliance.observability.collector import Collector, attributes, collecting, parse

pytestmark = pytest.mark.slow

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


def test_latency_buckets_have_the_trace_of_their_last_request(start_gateway, engine, collector, traces, eventually):
    """OpenMetrics has exemplars, the text format has none, and requests that are not sampled leave none"""
    gateway = start_gateway(engine, traces=traces)
    headers = {"traceparent": f"00-{ID}-{PARENT}-00"}
    gateway.client.post("/test/generate", json={"max_tokens": 5}, headers=headers)

    def exemplars() -> dict[str, list[Exemplar]]:
        reply = gateway.client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
        assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        found: dict[str, list[Exemplar]] = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                if sample.exemplar is not None:
                    assert sample.exemplar.value <= float(sample.labels["le"])
                    found.setdefault(family.name, []).append(sample.exemplar)
        return found

    assert exemplars() == {}
    gateway.generate(max_tokens=5)
    eventually("the spans", lambda: len(collector.spans) == 4)
    (request,) = collector.named("POST /test/generate")
    found = exemplars()
    names = ("time_to_first_token", "inter_token_latency", "request_duration", "request_prefill_time")
    assert {f"{prefix}{name}_seconds" for name in names[:2] for prefix in ("slipway_", "vllm:")} <= found.keys()
    assert {f"slipway_{name}_seconds" for name in names} <= found.keys()
    labels = {"trace_id": request.trace_id.hex(), "span_id": request.span_id.hex()}
    assert all(each.labels == labels for family in found.values() for each in family)
    assert found["slipway_request_prefill_time_seconds"][0].value == pytest.approx(0.002)
    plain = gateway.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4") and " # {" not in plain.text


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
    collector.pause_s = 60.0
    gateway = start_gateway(engine, traces=replace(traces, max_queue=8, max_batch=4, timeout_s=0.5))
    took = [gateway.generate(max_tokens=1).elapsed.total_seconds() for _ in range(12)]
    assert max(took) < 30.0  # half of the collector's pause, whatever else the machine does
    eventually("drops", lambda: gateway.metric("slipway_trace_spans_dropped_total", reason="queue_full") > 0)


def test_absent_collector_fails_no_request(start_gateway, engine, traces, eventually):
    gateway = start_gateway(engine, traces=replace(traces, url="http://127.0.0.1:9/v1/traces"))
    assert gateway.generate(max_tokens=1).status_code == 200


def test_batch_is_sent_again_after_503_and_refused_after_400(start_gateway, engine, collector, traces, eventually):
    # A batch is sent when it has the 4 spans of a request. On a busy machine a timer could divide them.
    gateway = start_gateway(engine, traces=replace(traces, max_batch=4, delay_s=3600.0))
    collector.statuses = [503]
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    assert collector.num_calls == 2 and len({each.span_id for each in collector.spans}) == 4
    eventually("the reply", lambda: gateway.metric("slipway_trace_spans_exported_total") == 4)
    collector.statuses = [400]
    gateway.generate(max_tokens=1)
    eventually("drops", lambda: gateway.metric("slipway_trace_spans_dropped_total", reason="rejected") == 4)
    assert gateway.metric("slipway_trace_spans_exported_total") == 4


def test_partial_success_counts_rejected_spans(start_gateway, engine, collector, traces, eventually):
    collector.body = b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too large"}}'
    gateway = start_gateway(engine, traces=replace(traces, max_batch=4, delay_s=3600.0))
    gateway.generate(max_tokens=1)
    eventually("a batch", lambda: gateway.metric("slipway_trace_spans_exported_total") == 1)
    assert gateway.metric("slipway_trace_spans_dropped_total", reason="rejected") == 3


def test_each_sequence_has_its_spans_up_to_a_limit(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=traces)
    gateway.generate(max_tokens=1, n=70)
    eventually("the spans", lambda: len(collector.spans) == 1 + 3 * 64)
    (request,) = collector.named("POST /test/generate")
    assert attributes(request.attributes)["slipway.sequences.omitted"] == 6
    names = {attributes(each.attributes)["slipway.sequence.id"] for each in collector.named("queue")}
    assert len(names) == 64


def test_client_that_leaves_ends_the_spans(start_gateway, engine, collector, traces, eventually):
    engine.holding = True
    gateway = start_gateway(engine, traces=traces)
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}):
        eventually("the request", lambda: gateway.metric("slipway_requests_waiting") == 1)
    eventually("the spans", lambda: len(collector.spans) == 2)
    (queue,) = collector.named("queue")
    assert 0 < seconds(queue) < 60
    assert not collector.named("prefill")


@pytest.mark.parametrize(("pause_s", "sent", "lost"), [(0.0, 4, 0), (5.0, 0, 4)])
def test_last_spans_are_sent_when_the_gateway_ends(collector, traces, new_config, pause_s, sent, lost):
    collector.pause_s = pause_s
    metrics = Metrics(new_config())

    async def serve() -> float:
        tracing = Tracing(replace(traces, delay_s=3600.0), metrics)
        tracing.start()
        _, span = tracing.begin(None, now())
        span.add_sequence(SequenceTimes(1.0, 2.0, 3.0, 4.0), {"queue": {}, "prefill": {}, "decode": {}}, (), "")
        span.end("POST /", now())
        started_s = now()
        await tracing.stop(0.5)
        return now() - started_s

    assert asyncio.run(serve()) < 3.0
    assert len(collector.spans) == sent == metrics.total("trace_spans_exported")
    assert metrics.total("trace_spans_dropped") == lost


def test_compressed_batches_and_headers_reach_the_collector(start_gateway, engine, collector, traces, eventually):
    headers = {"Authorization": "Bearer one"}
    gateway = start_gateway(engine, traces=replace(traces, compresses=True, headers=headers))
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    assert collector.requests[0][1]["Authorization"] == "Bearer one"
    assert collector.requests[0][1]["Content-Encoding"] == "gzip"
    gateway.service.tracing.set_headers({"Authorization": "Bearer two"})
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 8)
    assert collector.requests[-1][1]["Authorization"] == "Bearer two"


def test_log_lines_have_the_ids_of_the_span(start_gateway, engine, collector, traces, eventually, caplog):
    caplog.set_level(logging.INFO)
    gateway = start_gateway(engine, traces=traces)
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    (request,) = collector.named("POST /test/generate")
    (line,) = [each for each in caplog.records if getattr(each, "path", "") == "/test/generate"]
    assert (line.trace_id, line.span_id) == (request.trace_id.hex(), request.span_id.hex())


def test_log_records_are_exported_with_their_trace(start_gateway, engine, collector, traces, eventually):
    """Records of the exporter are not exported."""
    logging.getLogger().setLevel(logging.INFO)
    logs = collector.url.replace("/v1/traces", "/v1/logs")
    gateway = start_gateway(engine, traces=replace(traces, logs_url=logs))
    collector.statuses = [400]
    gateway.generate(max_tokens=2)
    eventually("a rejected batch", lambda: not collector.statuses)
    reply = gateway.generate(max_tokens=2)

    def access() -> list[Any]:
        mine = reply.headers["X-Request-Id"]
        return [one for one in collector.records if attributes(one.attributes).get("request_id") == mine]

    eventually("the access line", lambda: bool(access()))

    def request_spans() -> list[Any]:
        found = [
            (attributes(one.attributes)["slipway.request.id"], one) for one in collector.named("POST /test/generate")
        ]
        return [one for name, one in found if name == reply.headers["X-Request-Id"]]

    eventually("the span", lambda: bool(request_spans()))
    record = next(one for one in access() if one.body.string_value == "request")
    (request,) = request_spans()
    assert (record.trace_id, record.span_id) == (request.trace_id, request.span_id)
    found = attributes(record.attributes)
    assert (found["status"], found["path"], found["code.namespace"]) == (200, "/test/generate", "appliance.requests")
    assert (record.severity_number, record.severity_text) == (9, "INFO") and record.time_unix_nano > 0
    assert {attributes(one.attributes)["code.namespace"] for one in collector.records}.isdisjoint(EXPORTING)
    assert gateway.metric("slipway_log_records_exported_total") >= 1
    assert {path for path, _, _ in collector.requests} == {"/v1/traces", "/v1/logs"}


def test_resource_describes_the_process(start_gateway, engine, collector, traces, eventually):
    gateway = start_gateway(engine, traces=replace(traces, resource={"service.name": "chat", "team": "ml"}))
    gateway.generate(max_tokens=1)
    eventually("the spans", lambda: len(collector.spans) == 4)
    path, _, message = collector.requests[0]
    assert path == "/v1/traces"
    assert attributes(message.resource_spans[0].resource.attributes) == {"service.name": "chat", "team": "ml"}
    scope = message.resource_spans[0].scope_spans[0].scope
    assert (scope.name, scope.version) == ("slipway", "1.2.3")


def test_loading_of_media_is_a_child_of_the_request():
    """OBS-05"""
    exported = []
    span = RequestSpan(Trace("1" * 32, None), 1.0, exported.append, has_content=False)
    span.add_media(1.5, 2.0, 3, 1)
    (media,) = exported
    assert (media.name, media.parent_id, media.trace_id) == ("media", span.span_id, "1" * 32)
    assert (media.start_s, media.end_s) == (1.5, 2.0)
    assert media.attributes == {"slipway.media.items": 3, "slipway.media.cached": 1}


def test_messages_follow_the_conventions_for_generative_ai():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    texts = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ],
        "system": "be brief",
        "tools": [{"name": "not a message"}],
    }
    assert json.loads(input_messages(texts)) == [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "look"},
                {"type": "generic", "content": {"type": "image_url", "image_url": "x"}},
            ],
        },
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "f", "arguments": '{"a": 1}'}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "5"}]},
    ]
    assert json.loads(input_messages({"prompt": ["a", "b"]}))[0]["parts"][1] == {"type": "text", "content": "b"}


def test_texts_of_any_kind_can_be_encoded():
    span = Span("x", "a" * 32, None, 0.0, 0, attributes={"lone": "\ud800", "long": "x" * 70_000, "empty": []})
    found = parse(b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + orjson.dumps(span.encoded()) + b"]}]}]}")
    pairs = attributes(found.resource_spans[0].scope_spans[0].spans[0].attributes)
    assert pairs == {"lone": "?", "long": "x" * 65_536, "empty": []}


def test_a_log_message_that_does_not_fit_its_arguments_raises_nothing(monkeypatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    async def emit() -> list:
        exported: list = []
        handler = OtlpHandler(exported.append, ())
        for arguments in (("a", "b"), ("a",)):
            handler.handle(logging.LogRecord("appliance", logging.INFO, "f.py", 1, "is %s", arguments, None))
        await asyncio.sleep(0)
        return [record.body for record in exported]

    assert asyncio.run(emit()) == ["is a"]
