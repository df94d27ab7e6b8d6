"""Request timeline: causes in order, on one clock, bounded."""

import pytest

from appliance.cli.why import spell_ms, story_lines
from appliance.server.routing.timeline import (
    MOST_EVENTS,
    Arrived,
    FirstToken,
    Interrupted,
    Over,
    Placed,
    Stories,
    Story,
)
from engine.api.events import Admitted, Blocked, Ended, Preempted, Queued, Told


def story() -> Story:
    found = Story("r-0")
    for at, what in (
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
        (15.3, Over("stop", 80)),
    ):
        found.add(at, what)
    return found


def test_time_is_summed_up_by_what_it_was_spent_on() -> None:
    told = story().told()
    assert told["spent_ms"] == {
        "gateway": 200.0, "queued": 500.0, "blocked": 300.0, "prefill": 500.0, "decode": 2100.0, "preempted": 500.0,
        "held": 6200.0,
    }  # fmt: skip
    assert sum(told["spent_ms"].values()) == pytest.approx(10_300)
    assert [event["at_ms"] for event in told["events"]][:4] == [0.0, 0.0, 100.0, 600.0]


def test_it_reads_as_a_time_line() -> None:
    assert list(story_lines(story().told())) == [
        "r-0: 10.3 s (200 ms in the gateway, 500 ms queued, 300 ms first to wait, 500 ms computing the prompt, "
        "2,100 ms giving tokens, 500 ms preempted, 6,200 ms held without an engine)",
        "        0 ms  arrives with 4,096 prompt tokens; 3 others under way",
        "        0 ms  engine 0 takes it",
        "      100 ms  queued with 4,096 prompt tokens, behind 2 others",
        "      600 ms  first to wait: KV cache full, 12 blocks needed and 3 free; most are held by a-0 (40), b-0 (22)",
        "      900 ms  runs from step 17 on; 3,200 of 4,096 tokens were cached",
        "    1,400 ms  first token",
        "    2,000 ms  preempted at 4,130 tokens in step 60: d-0 needs its KV blocks",
        "    2,500 ms  runs from step 66 on; 4,100 of 4,130 tokens were cached",
        "    3,000 ms  engine 0 is gone behind token 41 (killed): it is held",
        "    9,200 ms  engine 1 takes it, behind token 41",
        "    9,300 ms  queued with 4,096 prompt tokens and 41 of its reply",
        "    9,300 ms  runs from step 1 on; nothing of it was cached",
        "      10.3 s  ends (stop) with 80 tokens",
        "      10.3 s  over (stop) with 80 tokens",
    ]
    assert spell_ms(10_000) == "10.0 s"


def test_the_last_ones_are_remembered_and_each_with_its_beginning_and_end() -> None:
    stories = Stories(3)
    for number in range(5):
        stories.begin(f"r{number}-0#{number}")
        stories.add(f"r{number}-0#{number}", 1.0, Arrived(1, 0, 0))
    assert [bool(list(stories.of(f"r{number}"))) for number in range(5)] == [False, False, True, True, True]
    for number in range(MOST_EVENTS * 2):
        stories.add("r4-0#4", 2.0 + number, Preempted(number, number, ""))
    (found,) = stories.of("r4-0")
    told = found.told()
    assert len(told["events"]) == MOST_EVENTS and told["left_out"] == MOST_EVENTS + 1
    assert told["events"][0]["type"] == "arrived" and told["events"][-1]["step"] == MOST_EVENTS * 2 - 1
    assert list(story_lines(told))[-1] == "  (201 events in the middle are not remembered)"
    none = Stories(0)
    none.begin("a-0#1")
    none.add("a-0#1", 0.0, FirstToken())
    assert not list(none.of("a"))


def test_engines_tell_by_the_routers_keys_and_clients_read_their_own_ids() -> None:
    stories = Stories(9)
    for key in ("a-0#1", "b-0#2"):
        stories.begin(key)
    stories.told(Told((
        ("a-0#1", 1.0, Blocked("blocks", 2, 1, (("b-0#2", 7),))),
        ("a-0#1", 2.0, Preempted(3, 9, "b-0#2")),
        ("gone#7", 2.0, Queued(1, 0, 0)),
    )))  # fmt: skip
    (found,) = stories.of("a")
    assert [str(what) for _, what in found.events] == [
        "first to wait: KV cache full, 2 blocks needed and 1 free; most are held by b-0 (7)",
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
    sent.join(60)
    told = gateway.client.get("/v1/requests/chatcmpl-mine/why").json()
    kinds = [event["type"] for event in told["choices"][0]["events"]]
    assert kinds == ["arrived", "placed", "first_token", "interrupted", "placed", "over"]
    assert told["choices"][0]["events"][3]["emitted"] == 2 and told["choices"][0]["id"] == "mine-0"
    missing = gateway.client.get("/v1/requests/other/why")
    assert missing.status_code == 404 and "the last 1000 replies are" in missing.json()["error"]["message"]
