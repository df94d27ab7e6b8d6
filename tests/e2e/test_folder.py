"""`slipway serve FOLDER` with settings on the command line: affinity of threads, measurements, profiles and traces.

One service has all of these settings. A test that changes them starts its own.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.supervisor.supervise import NICE
from benchmarks import start
from kernels.cpu.library import usable
from tests.appliance.observability.collector import Collector, attributes, collecting
from tests.documented import documented
from tests.e2e.conftest import ROOT, Appliance, until

DEMO = ROOT / "manifests" / "demo"
ALLOWED = sorted(os.sched_getaffinity(0))
ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "canary question"}], "max_tokens": 8, "temperature": 0, "seed": 3}
ID, KILLED, REFUSED = ("4bf92f3577b34da6a3ce929d0e0e4736", "5" * 32, "6" * 32)  # of traces

pinned = pytest.mark.skipif(
    len(ALLOWED) < 2 or not usable(), reason="one CPU has no other, and only threads of compiled kernels are pinned"
)


def options(*settings: str) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], collector: Collector, profiles: Path) -> Appliance:
    settings = options(
        "observability.mfu_metrics=true",
        f"observability.profiler_folder={profiles}",
        f"observability.traces.endpoint={collector.url}",
        "observability.traces.service_name=demo",
    )
    affinity = {"SLIPWAY__HARDWARE__CPUS": str(ALLOWED[0])} if len(ALLOWED) > 1 else {}
    appliance = launch(DEMO, *settings, threads="", **affinity)
    appliance.wait_ready()
    return appliance


def test_the_benchmark_of_starts_reads_cpu_times_and_the_time_of_the_first_answer(service: Appliance) -> None:
    used = start.cpu_seconds(service.process.pid)
    assert {"launcher", "supervisord", "gateway", "engine-0", "engine-0-reaper", "monitor"} <= used.keys()
    assert all(seconds > 0 for seconds in used.values()) and used["engine-0"] > used["monitor"]
    answers_s = start.answer_time(service.output())
    assert 0 < answers_s < 300
    one = start.Start(answers_s, 2.0, 0.5, used, 9.0)
    starts = [one, replace(one, ready_s=3.0), replace(one, ready_s=7.0, cpu_s={**used, "others": 1.0})]
    lists = start.values(starts)
    assert lists["ready"] == [2.0, 3.0, 7.0] and all(len(each) == 3 for each in lists.values())
    with pytest.raises(TypeError, match="stop: must be a list with a value for each start"):
        start.medians({**lists, "stop": 0.5})
    found = start.medians(lists)
    assert found["ready"] == 3.0 and found["cpu in total"] == 9.0
    assert found["cpu of engine-0"] == used["engine-0"] and found["cpu until ready"] == sum(used.values())


def test_a_folder_is_served_without_a_manifest(service: Appliance) -> None:
    assert [model["id"] for model in service.client.get("/v1/models").json()["data"]] == ["demo"]
    assert service.client.post("/v1/completions", json=ASK).status_code == 200
    said = service.output()
    assert f"slipway serve:       path: {DEMO}" in said
    assert f"save it with `slipway init {DEMO} -o my.yaml`" in said


def threads(pid: int) -> list[set[int]]:
    """CPU affinity of each thread of a process."""
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


@pinned
def test_threads_have_a_cpu_each_and_the_others_keep_away_and_yield(service: Appliance) -> None:
    engines, others = ALLOWED[:1], set(ALLOWED[1:])
    assert service.client.post("/v1/completions", json=ASK).status_code == 200
    pids = service.pids()
    found = threads(pids["engine-0"])
    assert found.count({engines[0]}) == 1  # the worker; its team has no other thread
    assert all(cpus == {engines[0]} or cpus >= {engines[0]} for cpus in found) and len(found) > 1
    beside = [pid for pid in service.processes() if pid != pids["engine-0"]]
    assert len(beside) >= 4  # slipway serve, supervisord, gateway, monitor
    assert all(cpus == others for pid in beside for cpus in threads(pid))
    assert os.getpriority(os.PRIO_PROCESS, pids["gateway"]) == NICE
    assert os.getpriority(os.PRIO_PROCESS, pids["engine-0"]) == 0


@pinned
@pytest.mark.nightly("tests/e2e/test_folder.py::test_threads_have_a_cpu_each_and_the_others_keep_away_and_yield")
def test_a_team_is_pinned_thread_by_thread(launch: Callable[..., Appliance]) -> None:
    appliance = launch(threads="", SLIPWAY__HARDWARE__CPUS=f"{ALLOWED[0]},{ALLOWED[1]}")
    appliance.wait_ready()
    found = threads(appliance.pids()["engine-0"])
    assert found.count({ALLOWED[0]}) == found.count({ALLOWED[1]}) == 1
    assert all(cpus == set(ALLOWED[:2]) for cpus in threads(appliance.pids()["gateway"])) or len(ALLOWED) > 2


def test_service_counts_operations_and_writes_profiles(service: Appliance, profiles: Path) -> None:
    assert service.client.post("/stop_profile").status_code == 400
    before = service.metric("slipway_flops_total")
    assert json.loads(documented("docs/operations.md", "start_profile", service.url)) == {"status": "started"}
    body = {"prompt": [5] * 40, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    assert service.client.post("/v1/completions", json=body).status_code == 200
    stopped = json.loads(documented("docs/operations.md", "stop_profile", service.url))
    files = [Path(file) for file in stopped["files"]]
    assert {file.parent for file in files} == {profiles} and len(files) == 2
    steps, operations = (json.loads(file.read_text())["traceEvents"] for file in files)
    assert sum(event["name"].startswith("step ") for event in steps) == 8
    assert any(str(event.get("name", "")).startswith("step ") for event in operations)
    until("the operations are reported", lambda: service.metric("slipway_flops_total") > before)
    assert service.metric("slipway_hardware_flops_per_second") > 0
    used = service.client.get("/v1/usage").json()["total"]
    assert used["prompt_tokens"] >= 40 and used["completion_tokens"] >= 8


def traced(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}


def test_collector_receives_the_spans_of_requests_and_of_a_killed_engine(
    service: Appliance, collector: Collector
) -> None:
    client = service.client
    reply = client.post("/v1/chat/completions", json=CHAT, headers=traced(ID)).json()
    long = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=long, headers=traced(KILLED)) as stream:
        lines = stream.iter_lines()
        for _ in range(20):
            next(lines)
        os.kill(service.pids()["engine-0"], signal.SIGKILL)
        rest = list(lines)
    assert "data: [DONE]" in rest
    client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1}, headers=traced(REFUSED))

    def spans(trace: str) -> dict[str, Any]:
        return {each.name: each for each in collector.spans if each.trace_id.hex() == trace}

    def complete() -> bool:
        outer = [each for trace in (ID, KILLED, REFUSED) for each in spans(trace).values() if each.kind == 2]
        return len(outer) == 3 and all("decode" in spans(trace) for trace in (ID, KILLED))

    until("spans", complete)
    assert collector.faults == []
    chat, completion, refused = spans(ID), spans(KILLED), spans(REFUSED)
    assert set(chat) == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    found = attributes(chat["POST /v1/chat/completions"].attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == [reply["choices"][0]["finish_reason"]]
    assert found["gen_ai.response.model"] == reply["model"]
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.seed"]) == (8, 3)
    assert "canary" not in json.dumps(found)
    ordered = [chat[name] for name in ("queue", "prefill", "decode")]
    for before, after in zip(ordered, ordered[1:], strict=False):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    request = chat["POST /v1/chat/completions"]
    assert request.start_time_unix_nano <= ordered[0].start_time_unix_nano
    assert ordered[-1].end_time_unix_nano <= request.end_time_unix_nano
    events = [each.name for each in completion["decode"].events]
    assert events[0] == "slipway.engine.lost" and events[-1] == "slipway.engine.assigned"
    assert attributes(completion["decode"].attributes)["gen_ai.usage.output_tokens"] == 400
    failed = refused["POST /v1/chat/completions"]
    assert attributes(failed.attributes)["http.response.status_code"] == 400 and failed.status.code == 0
    resource = attributes(collector.requests[0][2].resource_spans[0].resource.attributes)
    assert resource["service.name"] == "demo"
    service.wait_ready()


@pytest.mark.nightly(
    "tests/appliance/observability/test_tracing.py::test_messages_follow_the_conventions_for_generative_ai"
)
def test_content_is_recorded_if_the_manifest_asks_for_it(
    launch: Callable[..., Appliance], eventually: Callable[..., None]
) -> None:
    with collecting() as collector:
        settings = options(f"observability.traces.endpoint={collector.url}", "observability.traces.content=true")
        appliance = launch(ROOT / "manifests" / "demo.yaml", *settings)
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
