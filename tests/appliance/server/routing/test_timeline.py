"""Request timeline: causes in order, on one clock, bounded."""

import pytest

from appliance.cli.why import format_ms, timeline_lines
from appliance.observability.log import MediaLoad
from appliance.server.routing.account import media_event
from appliance.server.routing.timeline import (
    MAX_EVENTS,
    Arrived,
    Finished,
    FirstToken,
    Interrupted,
    Placed,
    Timeline,
    Timelines,
)
from engine.api.events import Admitted, Blocked, Ended, Preempted, Queued, TimelineEvents


def timeline() -> Timeline:
    found = Timeline("r-0")
    for at, event in (
        (5.0, Arrived(4096, 0, 3)),
        (5.0, Placed("0", 0)),
        (5.1, Queued(4096, 0, 2)),
        (5.6, Blocked("blocks", 12, 3, (("a-0", 40), ("b-0", 22)))),
        (5.9, Admitted(17, 4096, 3200)),
        (6.4, FirstToken()),
        (7.0, Preempted(60, 4130, "d-0")),
        (7.5, Admitted(66, 4130, 4100)),
        (8.0, Interrupted("0", "killed", 41)),
        (14.2, Placed("1", 41)),
        (14.3, Queued(4096, 41, 0)),
        (14.3, Admitted(1, 4137, 0)),
        (15.3, Ended("stop", 80)),
        (15.3, Finished("stop", 80)),
    ):
        found.add(at, event)
    return found


def test_time_is_summed_by_state() -> None:
    told = timeline().as_dict()
    assert told["spent_ms"] == {
        "gateway": 200.0, "queued": 500.0, "blocked": 300.0, "prefill": 500.0, "decode": 2100.0, "preempted": 500.0,
        "held": 6200.0,
    }  # fmt: skip
    assert sum(told["spent_ms"].values()) == pytest.approx(10_300)
    assert [event["at_ms"] for event in told["events"]][:4] == [0.0, 0.0, 100.0, 600.0]


def test_loading_of_media_comes_first_with_its_slowest_item() -> None:
    """OBS-05"""
    found = Timeline("r-0")
    found.add(2.0, media_event(MediaLoad(2.0, ((0.5, 0.25), (0.1, 0.0), (0.1, 0.75)))))
    found.add(3.0, Arrived(9, 0, 0))
    found.add(3.5, Finished("stop", 1))
    told = found.as_dict()
    assert told["spent_ms"] == {"media": 1000.0, "gateway": 500.0}
    event = told["events"][0]
    assert (event["type"], event["items"], event["cached"]) == ("media", 3, 1)
    assert event["text"] == "loads 3 media items, 1 of them processed before: 100.0 ms to fetch, 750.0 ms to process"
    assert found.summary(4.0)["duration_ms"] == 1500.0
    assert next(timeline_lines(told)) == "r-0: 1,500 ms (1,000 ms loading media, 500 ms in the gateway)"


def test_it_reads_as_a_time_line() -> None:
    assert list(timeline_lines(timeline().as_dict())) == [
        "r-0: 10.3 s (200 ms in the gateway, 500 ms queued, 300 ms first in the queue, 500 ms prefill, "
        "2,100 ms decode, 500 ms preempted, 6,200 ms waiting for an engine)",
        "        0 ms  arrives with 4,096 prompt tokens; 3 others in progress",
        "        0 ms  assigned to engine 0",
        "      100 ms  queued with 4,096 prompt tokens, behind 2 others",
        "      600 ms  first in the queue: KV cache full, 12 blocks needed and 3 free; "
        "the largest users are a-0 (40), b-0 (22)",
        "      900 ms  scheduled in step 17; 3,200 of 4,096 tokens were cached",
        "    1,400 ms  first token",
        "    2,000 ms  preempted at 4,130 tokens in step 60: d-0 needs its KV blocks",
        "    2,500 ms  scheduled in step 66; 4,100 of 4,130 tokens were cached",
        "    3,000 ms  engine 0 exited after token 41 (killed): queued again",
        "    9,200 ms  assigned to engine 1, after token 41",
        "    9,300 ms  queued with 4,096 prompt tokens and 41 reply tokens",
        "    9,300 ms  scheduled in step 1; no tokens were cached",
        "      10.3 s  ends (stop) with 80 tokens",
        "      10.3 s  finished (stop) with 80 tokens",
    ]
    assert format_ms(10_000) == "10.0 s"


def test_the_last_ones_are_remembered_and_each_with_its_beginning_and_end() -> None:
    timelines = Timelines(3)
    for number in range(5):
        timelines.begin(f"r{number}-0#{number}")
        timelines.add(f"r{number}-0#{number}", 1.0, Arrived(1, 0, 0))
    assert [bool(list(timelines.of(f"r{number}"))) for number in range(5)] == [False, False, True, True, True]
    for number in range(MAX_EVENTS * 2):
        timelines.add("r4-0#4", 2.0 + number, Preempted(number, number, ""))
    (found,) = timelines.of("r4-0")
    told = found.as_dict()
    assert len(told["events"]) == MAX_EVENTS and told["left_out"] == MAX_EVENTS + 1
    assert told["events"][0]["type"] == "arrived" and told["events"][-1]["step"] == MAX_EVENTS * 2 - 1
    assert list(timeline_lines(told))[-1] == "  (201 events in the middle were dropped)"
    none = Timelines(0)
    none.begin("a-0#1")
    none.add("a-0#1", 0.0, FirstToken())
    assert not list(none.of("a"))


def test_engines_tell_by_the_routers_keys_and_clients_read_their_own_ids() -> None:
    timelines = Timelines(9)
    for key in ("a-0#1", "b-0#2"):
        timelines.begin(key)
    timelines.add_reported(TimelineEvents((
        ("a-0#1", 1.0, Blocked("blocks", 2, 1, (("b-0#2", 7),))),
        ("a-0#1", 2.0, Preempted(3, 9, "b-0#2")),
        ("gone#7", 2.0, Queued(1, 0, 0)),
    )))  # fmt: skip
    (found,) = timelines.of("a")
    assert [str(event) for _, event in found.events] == [
        "first in the queue: KV cache full, 2 blocks needed and 1 free; the largest users are b-0 (7)",
        "preempted at 9 tokens in step 3: b-0 needs its KV blocks",
    ]


def test_a_request_reports_that_its_engine_crashed(start_gateway, engine, eventually) -> None:  # type: ignore[no-untyped-def]
    engine.holding = True
    gateway = start_gateway(engine)
    import threading

    sent = threading.Thread(target=gateway.client.post, args=("/test/generate",), kwargs={
        "json": {"max_tokens": 4}, "headers": {"X-Request-Id": "mine"}})  # fmt: skip
    sent.start()
    eventually("it runs", lambda: bool(engine.open))
    engine.give(2)
    engine.die()
    engine.start()
    eventually("it runs again", lambda: bool(engine.open))
    engine.give(2)
    sent.join(100)
    told = gateway.client.get("/v1/requests/chatcmpl-mine/why").json()
    kinds = [event["type"] for event in told["choices"][0]["events"]]
    assert kinds == ["arrived", "placed", "first_token", "interrupted", "placed", "over"]
    assert told["choices"][0]["events"][3]["emitted"] == 2 and told["choices"][0]["id"] == "mine-0"
    missing = gateway.client.get("/v1/requests/other/why")
    assert missing.status_code == 404 and "the last 1000 replies are" in missing.json()["error"]["message"]
