"""Contents of /metrics after known traffic. Ids ME-* of docs/http.md."""

import re
import threading
from collections import Counter as Multiset

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api.messages import Failed, Stats

pytestmark = pytest.mark.slow

VLLM_GAUGES = ["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"]
VLLM_COUNTERS = [
    "prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "prompt_tokens_cached_by_source",
    "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "admission_rejections", "tool_call_parser_invocations",
]  # fmt: skip
VLLM_HISTOGRAMS = [
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_max_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total", "request_params_n",
    "request_num_preemptions", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
]  # fmt: skip


def families(gateway):
    return list(text_string_to_metric_families(gateway.client.get("/metrics").text))


def test_every_series_exists_before_the_first_request(gateway):
    """E all series exist, value 0, from start-up"""
    samples = gateway.samples()
    names = {name for name, _ in samples}
    wanted = {f"vllm:{name}" for name in VLLM_GAUGES}
    wanted |= {f"vllm:{name}_total" for name in VLLM_COUNTERS}
    wanted |= {f"vllm:{name}_{part}" for name in VLLM_HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert wanted <= names
    for (name, _), value in samples.items():
        if name.startswith("vllm:") and name != "vllm:cache_config_info":
            assert value == 0, name


@pytest.mark.parametrize("prefix", ["vllm:", "slipway_"])
def test_ten_completions_are_counted_exactly(start_gateway, engine, prefix):
    """ME-01 exact sums after 10 sequential completions of P prompt tokens and M=10 tokens"""
    gateway, prompt, most = start_gateway(engine), [5, 6, 7, 8, 9, 10, 11], 10
    for _ in range(10):
        assert gateway.generate(prompt=prompt, max_tokens=most).status_code == 200
    ours = prefix == "slipway_"

    def metric(vllm, slipway=None, **labels):
        return gateway.metric(prefix + ((slipway or vllm) if ours else vllm), **labels)

    assert metric("prompt_tokens_total") == 70
    assert metric("generation_tokens_total") == 100
    assert metric("request_success_total", "requests_total") == 10
    assert metric("request_success_total", "requests_total", finished_reason="length") == 10
    assert metric("time_to_first_token_seconds_count") == 10
    assert metric("e2e_request_latency_seconds_count", "request_duration_seconds_count") == 10
    for name in ("queue", "inference", "prefill", "decode"):
        assert metric(f"request_{name}_time_seconds_count") == 10
    assert metric("inter_token_latency_seconds_count") == 90
    assert metric("iteration_tokens_total_sum", "iteration_tokens_sum") == 170
    assert metric("iteration_tokens_total_count", "iteration_tokens_count") == 100
    assert metric("request_params_max_tokens_sum") == 100
    assert metric("request_prompt_tokens_sum") == 70
    assert metric("request_prompt_tokens_bucket", le="5.0") == 0
    assert metric("request_prompt_tokens_bucket", le="10.0") == 10
    assert metric("request_generation_tokens_sum") == 100
    assert metric("request_max_num_generation_tokens_sum") == 100
    assert metric("request_params_n_sum") == 10


def test_times_use_the_clock_of_the_engine(gateway):
    """ME-01 the fake engine queues 1 ms, prefills 2 ms and takes 3 ms a token"""
    gateway.generate(max_tokens=5)
    assert gateway.metric("vllm:request_queue_time_seconds_sum") == pytest.approx(0.001)
    assert gateway.metric("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.002)
    assert gateway.metric("vllm:request_decode_time_seconds_sum") == pytest.approx(0.012)
    assert gateway.metric("vllm:request_inference_time_seconds_sum") == pytest.approx(0.014)
    assert gateway.metric("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.003)


def test_gauges_show_the_load_and_return_to_zero(gateway, engine, eventually):
    """ME-02 running, waiting, cache usage during load and after cancel"""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}):
        eventually("waiting", lambda: gateway.metric("vllm:num_requests_waiting") == 1)
        assert gateway.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        engine.give(1)
        eventually("running", lambda: gateway.metric("vllm:num_requests_running") == 1)
        assert gateway.metric("vllm:kv_cache_usage_perc") == 0.1
        assert gateway.metric("slipway_kv_cache_usage_ratio") == 0.1
    eventually("all zero", lambda: [gateway.metric(name) for name in names] == [0, 0, 0])


def test_the_gauges_of_a_crashed_engine_are_zero(gateway, engine, eventually):
    """ME-02 nothing runs in an engine that is gone"""
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}) as stream:
        eventually("waiting", lambda: gateway.metric("vllm:num_requests_waiting") == 1)
        engine.die()
        eventually("down", lambda: gateway.metric("slipway_engine_up") == 0)
        assert gateway.metric("vllm:num_requests_waiting") == 0
        eventually("held", lambda: gateway.metric("slipway_requests_held") == 1)
        engine.holding = False
        engine.start()
        stream.read()
    assert gateway.metric("slipway_request_interruptions_total") == 1
    assert gateway.metric("slipway_interruption_seconds_count") == 1
    assert gateway.metric("vllm:request_success_total", finished_reason="length") == 1


def test_each_choice_of_a_request_is_counted(gateway):
    """ME-03 n=2"""
    gateway.generate(n=2, max_tokens=3)
    assert gateway.metric("vllm:request_params_n_sum") == 2
    assert gateway.metric("vllm:request_params_n_count") == 1
    assert gateway.metric("vllm:request_success_total") == 2
    assert gateway.metric("vllm:request_max_num_generation_tokens_sum") == 3


def test_cached_prompt_tokens_are_counted_by_source(gateway, engine):
    """ME-04 prefix hits; OBS-01 sources sum to the prompt tokens"""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    gateway.generate(prompt=prompt)
    engine.cached = 4
    gateway.generate(prompt=prompt)
    assert gateway.metric("vllm:prompt_tokens_total") == 14
    assert gateway.metric("vllm:prompt_tokens_cached_total") == 4
    assert gateway.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4
    assert gateway.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 10
    assert gateway.metric("vllm:prompt_tokens_by_source_total") == 14
    assert gateway.metric("vllm:request_prefill_kv_computed_tokens_sum") == 10
    assert gateway.metric("vllm:prefix_cache_queries_total") == 14
    assert gateway.metric("slipway_prefix_cache_hit_tokens_total") == gateway.metric("vllm:prefix_cache_hits_total") > 0


def test_refused_and_aborted_requests_are_counted(start_gateway, engine, eventually):
    """ME-05 503 rejections, finished_reason abort"""
    gateway = start_gateway(engine, **{"limits.max_waiting": 1})
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}):
        eventually("one waits", lambda: len(engine.open) == 1)
        assert gateway.generate().status_code == 503
    eventually("abort", lambda: gateway.metric("vllm:request_success_total", finished_reason="abort") == 1)
    assert gateway.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1


def test_a_request_over_the_token_backlog_is_refused_and_counted(start_gateway, engine, eventually):
    """ER-14 ME-05 the whole reply, and the other reason of the counter"""
    gateway = start_gateway(engine, **{"limits.max_waiting_tokens": 3})
    refused = {"name": "vllm:admission_rejections_total", "reason": "max_num_queued_tokens"}
    assert gateway.metric(**refused) == 0
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"prompt": [1, 2, 3], "max_tokens": 9, "stream": True}):
        eventually("one waits", lambda: len(engine.open) == 1)
        reply = gateway.generate(prompt=[1])
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "Service Unavailable")
    assert reply.json()["error"]["message"] == (
        "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
    )
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert gateway.metric(**refused) == gateway.metric("slipway_admission_rejections_total") == 1


def test_a_reply_cut_at_a_stop_string_counts_as_stop(gateway, engine, eventually):
    """request_success by finished_reason"""
    engine.holding = True
    thread = threading.Thread(target=lambda: gateway.generate(max_tokens=9, stop_after=2))
    thread.start()
    eventually("submitted", lambda: len(engine.open) == 1)
    engine.give(2)
    thread.join()
    assert gateway.metric("vllm:request_success_total", finished_reason="stop") == 1
    assert gateway.metric("vllm:request_success_total") == 1
    assert gateway.metric("vllm:generation_tokens_total") == 2
    assert gateway.metric("vllm:request_decode_time_seconds_count") == 1
    eventually("the engine let go", lambda: engine.open == {})


def test_there_are_no_speculative_series_without_speculation(gateway):
    """ME-06 vllm-bench takes their absence for "not enabled", a 0 for "never accepted" """
    assert "spec_decode" not in gateway.client.get("/metrics").text


@pytest.mark.parametrize("vllm_metrics", [True, False])
def test_exposition_parses_and_has_no_duplicate_series(start_gateway, engine, vllm_metrics):
    """ME-07 prometheus_client.parser, no duplicates"""
    gateway = start_gateway(engine, **{"observability.vllm_metrics": vllm_metrics})
    gateway.generate()
    found = families(gateway)
    assert [name for name, count in Multiset(family.name for family in found).items() if count > 1] == []
    series = Multiset((s.name, tuple(sorted(s.labels.items()))) for family in found for s in family.samples)
    assert [one for one, count in series.items() if count > 1] == []
    assert any(name.startswith("vllm:") for name, _ in series) == vllm_metrics


def test_metric_names_follow_the_prometheus_conventions(start_gateway, engine):
    """ME-07 lint: the rules of promtool check metrics, by hand"""
    gateway = start_gateway(engine, **{"observability.vllm_metrics": False})
    gateway.generate()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", gateway.client.get("/metrics").text, re.MULTILINE))
    helped = set(re.findall(r"^# HELP (\S+) \S", gateway.client.get("/metrics").text, re.MULTILINE))
    assert types.keys() == helped
    for name, kind in types.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), f"{name}: lower snake case, no colon"
        assert name.endswith("_total") == (kind == "counter"), f"{name}: _total is for counters, and for all of them"
        assert not re.search(r"_(count|sum|bucket)$", name), f"{name}: reserved suffix"
        assert not re.search(r"(milli|micro)seconds|_ms$|_percent|_perc$|kilobytes|megabytes", name), (
            f"{name}: base units"
        )
        assert kind not in name.split("_"), f"{name}: the type is not part of a name"


def test_slipway_and_vllm_names_show_the_same_numbers(gateway):
    """E one truth, two names"""
    gateway.generate(max_tokens=3)
    first, second = "slipway_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
    samples = gateway.samples()
    mine = {(key[0].removeprefix(first), key[1]): value for key, value in samples.items() if key[0].startswith(first)}
    theirs = {
        (key[0].removeprefix(second), key[1]): value for key, value in samples.items() if key[0].startswith(second)
    }
    assert mine == theirs
    assert len(mine) > 20


def test_http_metrics_use_route_templates_and_leave_probes_out(gateway):
    """E HTTP metrics of the instrumentator"""
    gateway.client.get("/v1/models/tiny")
    gateway.client.get("/v1/models/org/alias")
    gateway.client.get("/made/up/by/a/client")
    gateway.generate()
    labels = {"handler": "/v1/models/{name:path}", "method": "GET", "status": "2xx"}
    assert gateway.metric("http_requests_total", **labels) == 2
    assert gateway.metric("http_requests_total", handler="none", status="4xx") == 1
    assert gateway.metric("http_request_duration_seconds_count", handler="/test/generate") == 1
    assert gateway.metric("http_request_size_bytes_sum", handler="/test/generate") == len(b"{}")
    assert gateway.metric("http_response_size_bytes_sum", handler="/test/generate") > 10
    text = gateway.client.get("/metrics").text
    assert 'handler="/health"' not in text and 'handler="/ready"' not in text and 'handler="/metrics"' not in text


def test_build_info_and_phase_are_exported(gateway, engine, eventually):
    """OB-03 build, manifest, phase, engine"""
    info = gateway.metric("slipway_build_info", version="1.2.3", manifest_sha256="ab" * 32, model_name="tiny")
    assert info == 1
    assert gateway.metric("slipway_phase", phase="ready") == 1
    assert gateway.metric("slipway_phase") == 1
    assert gateway.metric("slipway_engine_up", engine="0") == 1
    assert gateway.metric("vllm:cache_config_info", block_size="4", num_gpu_blocks="10", kv_cache_size_tokens="40") == 1
    engine.die()
    eventually("restarting", lambda: gateway.metric("slipway_phase", phase="restarting") == 1)
    assert gateway.metric("slipway_phase") == 1


def test_counters_increase_across_an_engine_restart(gateway, engine, eventually):
    """ME-04 counters never fall"""
    gateway.generate(prompt=[1, 2, 3])
    eventually("three", lambda: gateway.metric("vllm:prefix_cache_queries_total") == 3)
    engine.die()
    engine.submits.clear()
    engine.start()
    eventually("back", lambda: gateway.client.get("/ready").status_code == 200)
    gateway.generate(prompt=[1, 2])
    eventually("five", lambda: gateway.metric("vllm:prefix_cache_queries_total") == 5)


def test_each_engine_has_its_own_series(start_gateway, new_engine, eventually):
    """E label engine"""
    gateway = start_gateway(new_engine().start(), new_engine().start())
    eventually("both", lambda: gateway.metric("slipway_engine_up") == 2)
    gateway.generate(n=2)
    assert gateway.metric("vllm:generation_tokens_total", engine="0") == 2
    assert gateway.metric("vllm:generation_tokens_total", engine="1") == 2


def test_tool_call_searches_are_counted(gateway):
    """tool_call_parser_invocations"""
    gateway.service.metrics.tool_calls(streaming=True, found=False)
    gateway.service.metrics.tool_calls(streaming=False, found=True)
    name = "vllm:tool_call_parser_invocations_total"
    assert gateway.metric(name, mode="streaming", outcome="no_tool_call", request_type="chat_completions") == 1
    assert gateway.metric(name, mode="non_streaming", outcome="tool_call") == 1
    assert gateway.metric(name) == 2


def test_golden_prompts_and_their_failures_are_counted(start_gateway, new_engine, eventually):
    """The engine's own counters start at zero with it; the failed prompt that ended it is in its last message"""
    engine = new_engine().start()
    gateway = start_gateway(engine)
    name = "slipway_self_test_"
    assert gateway.metric(f"{name}last_result") == -1 and gateway.metric(f"{name}runs_total") == 0
    engine.say(Stats(self_tests=4, self_test_s=0.25))
    engine.say(Stats(self_tests=5, self_test_yields=2, self_test_s=0.5))
    eventually("five runs", lambda: gateway.metric(f"{name}runs_total") == 5)
    assert gateway.metric(f"{name}seconds") == 0.5 and gateway.metric(f"{name}yields_total") == 2
    assert gateway.metric(f"{name}last_result") == 1 and gateway.metric(f"{name}failures_total") == 0
    engine.say(Failed(None, "drift", "golden prompt short"))
    eventually("the failure", lambda: gateway.metric(f"{name}failures_total") == 1)
    assert gateway.metric(f"{name}last_result") == 0 and gateway.metric(f"{name}runs_total") == 6
    engine.die()
    engine.start()
    eventually("the next engine", lambda: gateway.client.get("/ready").status_code == 200)
    engine.say(Stats(self_tests=3))
    eventually("the next engine's", lambda: gateway.metric(f"{name}runs_total") == 9)
    assert gateway.metric(f"{name}last_result") == 1
    engine.say(Failed(None, "crash", "something else"))
    eventually("not ready", lambda: gateway.client.get("/ready").status_code == 503)
    assert gateway.metric(f"{name}failures_total") == 1


def test_drafts_are_counted_across_restarts_of_the_engine(start_gateway, new_engine, eventually):
    engine = new_engine().start()
    gateway = start_gateway(engine, speculation="suffix")
    first = Stats(drafts=4, draft_tokens=12, accepted_tokens=7, accepted_at=(3, 2, 2), drafting_seconds=0.25)
    engine.say(first)
    eventually("drafts", lambda: gateway.metric("slipway_drafts_total") == 4)
    assert gateway.metric("slipway_draft_acceptance_length") == 1 + 7 / 4
    engine.die()
    engine.start()
    eventually("the next engine", lambda: gateway.client.get("/ready").status_code == 200)
    engine.say(Stats(drafts=1, draft_tokens=3, accepted_tokens=1, accepted_at=(1, 0, 0), drafting_seconds=0.5))
    eventually("its drafts", lambda: gateway.metric("slipway_drafts_total") == 5)
    for name, value in {"tokens": 15, "accepted_tokens": 8, "search_seconds": 0.75}.items():
        assert gateway.metric(f"slipway_draft_{name}_total") == value
    name = "slipway_draft_accepted_tokens_by_position_total"
    assert [gateway.metric(name, position=str(at)) for at in range(3)] == [4, 2, 2]
    assert gateway.metric("slipway_draft_acceptance_length") == 2
    assert gateway.metric("vllm:spec_decode_num_accepted_tokens_total") == 8
