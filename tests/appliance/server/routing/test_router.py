"""Several engines with one journal: assignment of requests, recorded state, client disconnects."""

import asyncio
import threading
import time

import msgspec
import pytest

from appliance.observability.metrics import Metrics
from appliance.server.errors.api import EngineFailed, Overloaded, Quarantined, Unavailable
from appliance.server.routing.placement import Placement
from appliance.server.routing.router import Load, Router
from engine.api.errors import RequestError
from engine.api.messages import Pooling, Sampling, Stats, Submit


@pytest.fixture
def routed(new_config):
    """Run a test's coroutine with a connected router over the given fake engines."""

    def run(engines, body, max_waiting=1024, **limits):
        async def main():
            sockets = [str(engine.path) for engine in engines]
            router = Router(sockets, max_waiting, Metrics(new_config(*engines)), **limits)
            router.start()
            try:
                await asyncio.gather(*(engine.client.wait_ready() for engine in router.engines))
                return await asyncio.wait_for(body(router), 100)
            finally:
                await router.stop()

        return asyncio.run(main())

    return run


def submit(name="r", prompt=(1, 2, 3), max_tokens=3):
    return Submit(name, tuple(prompt), Sampling(), max_tokens)


async def until(check):
    while not check():
        await asyncio.sleep(0.002)


def engine_of(router, generation):
    """Return the index of the engine that computes a sequence."""
    (index,) = (engine.index for engine in router.engines if generation.key in engine.open)
    return index


def test_deltas_carry_the_caller_s_id_and_the_journal_keeps_what_was_given(routed, engine):
    async def body(router):
        async with router.generate(submit("mine")) as generation:
            assert engine_of(router, generation) == 0
            deltas = [delta async for delta in generation]
        assert {delta.id for delta in deltas} == {"mine"}
        assert [id for delta in deltas for id in delta.ids] == [100, 101, 102] == generation.emitted
        assert deltas[-1].finish == "length"
        assert generation.submit == submit("mine")
        assert router.open == 0

    routed([engine], body)


def test_two_requests_of_one_id_do_not_mix(routed, engine):
    """X-Request-Id is chosen by the client, so it may repeat"""

    async def body(router):
        async def collect(max_tokens):
            async with router.generate(submit("same", max_tokens=max_tokens)) as generation:
                return [id async for delta in generation for id in delta.ids]

        return await asyncio.gather(collect(2), collect(5))

    assert [len(ids) for ids in routed([engine], body)] == [2, 5]


def test_the_least_loaded_engine_takes_the_next_request(routed, new_engine):
    first, second = new_engine().start(), new_engine().start()
    first.holding = second.holding = True

    async def body(router):
        generations = router.generate_all([submit(str(number)) for number in range(3)])
        assert [engine_of(router, generation) for generation in generations] == [0, 1, 0]
        await generations[0].aclose()
        await generations[2].aclose()
        assert engine_of(router, router.generate(submit("3"))) == 0

    routed([first, second], body)


def test_a_rank_pins_all_choices_to_its_engine_however_loaded(routed, new_engine):
    """RT-06 X-data-parallel-rank"""
    engines = [new_engine().start() for _ in range(3)]
    for engine in engines:
        engine.holding = True

    async def body(router):
        pinned = router.generate_all(
            [submit(str(number)) for number in range(4)], Placement(engine_index=2, session="s")
        )
        assert [engine_of(router, generation) for generation in pinned] == [2, 2, 2, 2]
        assert engine_of(router, router.generate(submit("free"))) == 0

    routed(engines, body)


@pytest.mark.parametrize(("count", "engine_index", "possible"), [(2, 2, "0 to 1"), (2, -1, "0 to 1"), (1, 7, "0 only")])
def test_an_unknown_engine_index_is_rejected_with_valid_ones(routed, new_engine, count, engine_index, possible):
    """RT-06 out of range"""

    async def body(router):
        with pytest.raises(
            RequestError, match=rf"{engine_index}.*Possible: {possible} \(parallelism.data is {count}\)"
        ):
            router.generate(submit(), Placement(engine_index))
        assert router.open == 0

    routed([new_engine().start() for _ in range(count)], body)


def test_a_selected_engine_that_is_down_is_not_replaced(routed, new_engine):
    """RT-06 a pinned request does not move"""
    first, second = new_engine().start(), new_engine().start()

    async def body(router):
        await asyncio.to_thread(first.die)
        await until(lambda: not router.engines[0].serves)
        with pytest.raises(Unavailable, match=r"Engine 0.*restarting.*Leave the header out") as refused:
            router.generate(submit(), Placement(engine_index=0))
        assert int(refused.value.headers["Retry-After"]) >= 1
        await router.generate(submit(), Placement(engine_index=1)).aclose()

    routed([first, second], body)


def test_a_session_stays_on_its_engine_and_leaves_it_only_while_it_is_down(routed, new_engine):
    """RT-06 X-Session-ID: sticky, spread over the engines, and the loss of one moves only its own sessions"""
    engines = [new_engine().start() for _ in range(3)]
    for engine in engines:
        engine.holding = True
    sessions = [f"session-{number}" for number in range(60)]

    async def body(router):
        def chosen():
            return {
                name: engine_of(router, router.generate(submit(name), Placement(session=name))) for name in sessions
            }

        before = chosen()
        assert chosen() == before
        assert all(10 <= list(before.values()).count(index) <= 30 for index in range(3))
        await asyncio.to_thread(engines[1].die)
        await until(lambda: not router.engines[1].serves)
        without = chosen()
        assert {name for name in sessions if without[name] != before[name]} == {
            name for name in sessions if before[name] == 1
        }
        engines[1].start()
        await until(lambda: router.engines[1].serves)
        assert chosen() == before

    routed(engines, body)


def test_the_load_covers_all_ready_engines(routed, new_engine):
    """RT-06 what endpoint-load-metrics reports"""
    engines = [new_engine().start() for _ in range(2)]

    async def body(router):
        assert router.load() == Load(0.0, 0)
        for engine, used, waiting in zip(engines, (3, 6), (2, 5), strict=True):
            await asyncio.to_thread(engine.say, Stats(kv_blocks_used=used, kv_blocks_total=10, waiting=waiting))
        await until(lambda: router.load().waiting == 7)
        assert router.load() == Load(0.45, 7)
        await asyncio.to_thread(engines[1].die)
        await until(lambda: not router.engines[1].serves)
        assert router.load() == Load(0.3, 2)

    routed(engines, body)


def test_leaving_early_aborts_in_the_engine(routed, engine, eventually):
    """ER-15 ER-16 the engine drops requests that have no reader"""
    engine.holding = True

    async def body(router):
        async with router.generate(submit(max_tokens=9)) as generation:
            reading = asyncio.ensure_future(anext(aiter(generation)))
            await until(lambda: engine.open)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert router.open == 0
        await until(lambda: not engine.open)

    routed([engine], body)
    assert engine.aborted == [engine.submits[0].id]


def test_a_stop_string_ends_the_request_in_the_engine(routed, engine):
    engine.holding = True

    async def body(router):
        async with router.generate(submit(max_tokens=9)) as generation:
            reading = asyncio.ensure_future(anext(aiter(generation)))
            await until(lambda: engine.open)
            await asyncio.to_thread(engine.give)
            assert (await reading).ids == (100,)
            generation.stop()
            await until(lambda: not engine.open)  # at once, not when the other choices of the request are done too
            assert [delta async for delta in generation] == []

    routed([engine], body)


def test_letting_go_of_the_engines_is_no_error(routed, engine, caplog):
    async def body(router):
        pass

    routed([engine], body)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_all_sequences_of_a_request_are_admitted_or_none(routed, engine):
    """ER-13 overload"""
    engine.holding = True

    async def body(router):
        waiting = router.generate_all([submit("a"), submit("b")])
        with pytest.raises(Overloaded, match="currently busy") as refused:
            router.generate_all([submit("c"), submit("d")])
        assert int(refused.value.headers["Retry-After"]) >= 1
        assert router.open == 2
        for generation in waiting:
            await generation.aclose()
        router.generate(submit("e"))

    routed([engine], body, max_waiting=2)


def test_running_requests_do_not_count_as_waiting(routed, engine):
    """ER-13 the limit counts the queue, not running requests"""
    engine.holding = True

    async def body(router):
        generation = router.generate(submit(max_tokens=9))
        reading = asyncio.ensure_future(anext(aiter(generation)))
        await until(lambda: engine.open)
        assert router.waiting == 1
        await asyncio.to_thread(engine.give)
        await reading
        assert (router.open, router.waiting) == (1, 0)
        router.generate(submit("next"))
        await generation.aclose()

    routed([engine], body, max_waiting=1)


def test_prompt_tokens_that_wait_are_limited_and_the_first_token_frees_them(routed, engine):
    """ER-14 the backlog is full from its limit on, however large the prompt that took it there"""
    engine.holding = True

    async def body(router):
        first = router.generate(submit("a", prompt=range(9), max_tokens=9))
        second = router.generate(submit("b", prompt=range(50)))
        assert router.waiting_tokens == 59
        with pytest.raises(Overloaded, match="reached its prefill token backlog limit") as refused:
            router.generate(submit("c", prompt=(1,)))
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
        assert router.open == 2
        reading = asyncio.ensure_future(anext(aiter(first)))
        await second.aclose()
        await until(lambda: engine.open)
        assert router.waiting_tokens == 9
        await asyncio.to_thread(engine.give)
        await reading
        assert router.waiting_tokens == 0
        await router.generate(submit("d", prompt=(1,))).aclose()
        await first.aclose()

    routed([engine], body, max_waiting_tokens=10)


def test_without_a_limit_any_number_of_tokens_waits(routed, engine):
    """ER-14 null is no limit"""
    engine.holding = True

    async def body(router):
        for generation in [router.generate(submit(str(number), prompt=range(1000))) for number in range(20)]:
            await generation.aclose()

    routed([engine], body)


def test_without_an_engine_requests_are_refused_at_once(new_engine, new_config):
    async def body():
        router = Router([str(new_engine().path)], 1, Metrics(new_config(new_engine())))
        with pytest.raises(Unavailable, match="starting") as refused:
            router.generate(submit())
        assert int(refused.value.headers["Retry-After"]) >= 1
        assert router.open == 0

    asyncio.run(body())


def test_requests_of_a_crashed_engine_resume_on_the_other_after_their_last_token(routed, new_engine):
    """ER-12 with data parallelism"""
    first, second = new_engine().start(), new_engine().start()
    first.holding = second.holding = True

    async def body(router):
        async def collect(generation):
            async with generation:
                return [id async for delta in generation for id in delta.ids]

        moved, safe = (asyncio.ensure_future(collect(each)) for each in router.generate_all([submit("a"), submit("b")]))
        await until(lambda: first.open and second.open)
        await asyncio.to_thread(first.give)
        await until(lambda: any(generation.emitted for generation in router.engines[0].open.values()))
        await asyncio.to_thread(first.die)
        await until(lambda: len(second.open) == 2)
        assert second.submits[-1].emitted == (100,)
        await asyncio.to_thread(second.give, 3)
        assert (await moved, await safe) == ([100, 101, 102], [100, 101, 102])
        assert router.open == 0

    routed([first, second], body)


def test_abort_all_ends_every_stream_with_abort(routed, engine):
    """RT-07 after the drain budget"""
    engine.holding = True

    async def body(router):
        async def last(generation):
            async with generation:
                return [delta async for delta in generation][-1]

        reading = [asyncio.ensure_future(last(each)) for each in router.generate_all([submit("a"), submit("b")])]
        await until(lambda: len(engine.open) == 2)
        router.abort_all()
        assert [delta.finish for delta in await asyncio.gather(*reading)] == ["abort", "abort"]

    routed([engine], body)


def test_clients_that_leave_free_their_requests_and_the_next_one_is_served(gateway, engine, eventually):
    """ER-18 many impatient clients, then a patient one"""
    engine.holding = True
    leaving = threading.Event()

    def impatient():
        with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}):
            leaving.wait(100)

    clients = [threading.Thread(target=impatient) for _ in range(50)]
    for client in clients:
        client.start()
    eventually("all submitted", lambda: len(engine.open) == 50)
    leaving.set()
    for client in clients:
        client.join()
    eventually("all freed", lambda: not engine.open and gateway.service.router.open == 0)
    engine.holding = False
    assert gateway.generate(max_tokens=2).json()["choices"] == [{"ids": [100, 101], "finish": "length"}]


def test_a_client_that_leaves_before_its_whole_reply_frees_the_request(gateway, engine, eventually):
    """ER-15 client disconnect, non-stream"""
    import socket

    engine.holding = True
    body = b'{"max_tokens": 9, "n": 2}'
    with socket.create_connection(("127.0.0.1", gateway.client.base_url.port)) as connection:
        head = (
            b"POST /test/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        connection.sendall(head % len(body) + body)
        eventually("submitted", lambda: len(engine.open) == 1)
    eventually("freed", lambda: not engine.open and gateway.service.router.open == 0)
    assert gateway.metric("vllm:request_success_total", finished_reason="abort") == 2
    eventually("no load", lambda: gateway.client.get("/load").json() == {"server_load": 0})


# -- engines that crash ------------------------------------------------------------------------------------------------


async def collected(generation):
    async with generation:
        return [id async for delta in generation for id in delta.ids]


def test_requests_resume_on_the_next_engine_after_their_last_token(routed, engine):
    """A crash is a pause: nothing is lost, repeated or changed"""
    engine.holding = True

    async def body(router):
        prompts = [submit(str(number), max_tokens=20 + number) for number in range(5)]
        reading = [asyncio.ensure_future(collected(each)) for each in router.generate_all(prompts)]
        await until(lambda: len(engine.open) == 5)
        emitted = 0
        for gain in (2, 12, 5):  # no two crashes at the same point
            await asyncio.to_thread(engine.give, gain)
            emitted += gain
            await until(lambda emitted=emitted: all(len(g.emitted) == emitted for g in router._generations()))
            await asyncio.to_thread(engine.die)
            await until(lambda: router.pending == 5)
            assert router.waiting == 0 and router.open == 5
            engine.start()
            await until(lambda: len(engine.open) == 5)
        await asyncio.to_thread(engine.give, 9)
        assert await asyncio.gather(*reading) == [list(range(100, 120 + number)) for number in range(5)]
        assert router.open == router.pending == 0

    routed([engine], body)


def test_tokens_from_before_an_engine_crash_are_delivered_first(routed, engine):
    """Deltas that the client had not taken yet are counted as emitted"""
    engine.holding = True

    async def body(router):
        generation = router.generate(submit(max_tokens=6))
        first = asyncio.ensure_future(anext(aiter(generation)))
        await until(lambda: engine.open)
        await asyncio.to_thread(engine.give)
        await first
        await asyncio.to_thread(engine.give, 3)  # no request reads these tokens
        await until(lambda: router.engines[0].client.stats.step == 4)
        await asyncio.to_thread(engine.die)
        rest = asyncio.ensure_future(collected(generation))
        await until(lambda: router.pending == 1)
        engine.start()
        await until(lambda: engine.open)
        assert engine.submits[-1].emitted == (100, 101, 102, 103)
        await asyncio.to_thread(engine.give, 2)
        assert await rest == [101, 102, 103, 104, 105]

    routed([engine], body)


def test_a_client_that_leaves_while_its_request_waits_is_forgotten(routed, engine):
    engine.holding = True

    async def body(router):
        generation = router.generate(submit(max_tokens=6))
        reading = asyncio.ensure_future(collected(generation))
        await until(lambda: engine.open)
        await asyncio.to_thread(engine.die)
        await until(lambda: router.pending == 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert router.pending == router.open == 0
        engine.start()
        await until(lambda: router.serves)
        assert len(engine.submits) == 1

    routed([engine], body)


def test_requests_that_wait_when_the_service_ends_are_aborted_or_fail(routed, engine):
    engine.holding = True

    async def body(router):
        async def last(generation):
            async with generation:
                return [delta async for delta in generation][-1].finish

        reading = [asyncio.ensure_future(last(each)) for each in router.generate_all([submit("a"), submit("b")])]
        await until(lambda: len(engine.open) == 2)
        await asyncio.to_thread(engine.die)
        await until(lambda: router.pending == 2)
        router.abort_all()
        assert await asyncio.gather(*reading) == ["abort", "abort"]
        left = asyncio.ensure_future(collected(router.generate(submit("c"))))
        await until(lambda: router.pending == 1)
        await router.stop()
        with pytest.raises(EngineFailed):
            await left

    routed([engine], body)


def test_a_pinned_request_waits_for_its_own_engine(routed, new_engine):
    first, second = new_engine().start(), new_engine().start()
    first.holding = second.holding = True

    async def body(router):
        reading = asyncio.ensure_future(collected(router.generate(submit(), Placement(engine_index=0))))
        await until(lambda: first.open)
        await asyncio.to_thread(first.die)
        await until(lambda: router.pending == 1)
        assert not second.open
        first.start()
        await until(lambda: first.open)
        await asyncio.to_thread(first.give, 3)
        assert await reading == [100, 101, 102]

    routed([first, second], body)


POISON = 666


async def life(engine, router):
    """Let an engine give tokens, and start it again after each crash on the poison token."""
    lives = 0
    while True:
        await asyncio.to_thread(engine.give)
        if len(engine.deaths) > lives:
            lives += 1
            await until(lambda: not router.serves)
            engine.start()
        await asyncio.sleep(0)


@pytest.mark.slow
def test_a_request_after_the_tests_of_the_quarantine_gets_its_reply(routed, new_engine):
    """The last test runs a request alone, for which its engine is reserved."""
    engine = new_engine().start()
    engine.holding, engine.poison = True, POISON

    async def body(router):
        living = asyncio.create_task(life(engine, router))
        good = asyncio.ensure_future(collected(router.generate(submit("good", max_tokens=40))))
        with pytest.raises(Quarantined):
            await collected(router.generate(submit("bad", prompt=(1, POISON))))
        assert await good == list(range(100, 140))
        assert await asyncio.wait_for(collected(router.generate(submit("later"))), 60) == [100, 101, 102]
        living.cancel()

    routed([engine], body)


@pytest.mark.slow
@pytest.mark.parametrize("decoder_start_ids", [(), (7, 8)])
def test_a_poison_request_is_isolated_and_the_others_finish(routed, new_engine, caplog, decoder_start_ids):
    """Poison quarantine over real sockets: an engine that crashes on one prompt, restarted each time. Health checks
    of an encoder-decoder engine include an encoder input."""
    engine = new_engine().start()
    engine.holding, engine.poison = True, POISON
    crash_exemptions = []

    async def body(router):
        living = asyncio.create_task(life(engine, router))
        good = [asyncio.ensure_future(collected(router.generate(submit(f"g{n}", max_tokens=40)))) for n in range(9)]
        bad = asyncio.ensure_future(collected(router.generate(submit("bad", prompt=(1, POISON)))))
        with pytest.raises(Quarantined, match="is isolated") as refused:
            await bad
        assert refused.value.status == 422
        with pytest.raises(Quarantined):
            router.generate(submit("again", prompt=(1, POISON)))
        assert await asyncio.gather(*good) == [list(range(100, 140))] * 9
        living.cancel()
        assert router.open == router.pending == 0 and not router.isolation.quarantine.on

    routed(
        [engine],
        body,
        decoder_start_ids=decoder_start_ids,
        exempt=lambda program, crashes, kind: crash_exemptions.append((program, kind)),
    )
    controls = {(one.prompt, one.source) for one in engine.submits if one.id.startswith("control#")}
    assert controls == {((0, *decoder_start_ids), 1 if decoder_start_ids else 0)}
    deaths = [[key.partition("#")[0] for key in keys] for keys in engine.deaths]
    assert deaths[-2:] == [["bad"], ["bad"]], "it crashed the engine alone"
    assert len(deaths) <= 8
    kinds = [kind for program, kind in crash_exemptions if program == "engine-0"]
    assert kinds.count("attributed") == 2, "the crashes before the tests"
    assert kinds.count("expected") - kinds.count("cancelled") == len(deaths) - 2, "each crash of a test was announced"
    assert "restored" not in kinds
    assert "request bad is isolated" in caplog.text


def test_an_engine_swap_is_not_a_crash_and_requests_wait_until_it_is_over(routed, engine):
    engine.holding = True

    async def body(router):
        async def collect(generation):
            async with generation:
                return [id async for delta in generation for id in delta.ids]

        old = asyncio.ensure_future(collect(router.generate(submit("old"))))
        await until(lambda: engine.open)
        await asyncio.to_thread(engine.give)
        for _ in range(3):  # more crashes than a candidate is allowed, without a token between them
            router.expect_end(0)
            assert not router.has_swapped(0)
            await asyncio.to_thread(engine.die)
            await until(lambda: router.pending)
            assert router.accepts and not router.isolation.quarantine.on
            await asyncio.to_thread(engine.start)
            await until(lambda: router.has_swapped(0))
        router.expect_end(0)
        await asyncio.to_thread(engine.die)
        await until(lambda: router.pending)
        new = asyncio.ensure_future(collect(router.generate(submit("new"))))
        await asyncio.to_thread(engine.start)
        await until(lambda: len(engine.open) == 2)
        await asyncio.to_thread(engine.give, 3)
        assert await old == await new == [100, 101, 102]
        # An unannounced end is a crash again: with hold_s 0 no request waits for the engine.
        await asyncio.to_thread(engine.die)
        await until(lambda: not router.serves)
        assert not router.accepts

    routed([engine], body, hold_s=0.0)


def test_a_crash_of_a_replacement_engine_counts_as_a_crash(routed, engine):
    async def body(router):
        router.expect_end(0)
        await asyncio.to_thread(engine.die)
        await until(lambda: not router.serves)
        assert router.accepts
        engine.first = []
        await asyncio.to_thread(engine.start)
        await until(lambda: engine.is_connected)
        await asyncio.to_thread(engine.die)
        await until(lambda: not router.accepts)

    routed([engine], body, hold_s=0.0)


@pytest.mark.parametrize("pooling", [None, Pooling("embed")])
@pytest.mark.parametrize("placed", [True, False])
def test_requests_end_at_their_deadline_whatever_the_engine_does(routed, engine, pooling, placed):
    """Generating and pooling requests, on an engine that does not answer and queued while there is none"""
    engine.holding = True

    async def body(router):
        if not placed:
            await asyncio.to_thread(engine.die)
            await until(lambda: not router.serves)
        late = msgspec.structs.replace(submit(), pooling=pooling, deadline=time.monotonic() + 0.3)
        reading = asyncio.ensure_future(deltas_of(router.generate(late)))
        if placed:
            await until(lambda: engine.open)
        assert [delta.finish for delta in await reading] == ["deadline"]
        assert router.open == router.pending == 0
        if placed:
            await until(lambda: engine.aborted)

    routed([engine], body)


async def deltas_of(generation):
    async with generation:
        return [delta async for delta in generation]


def test_a_client_that_does_not_read_does_not_keep_its_request_out_of_a_resumed_engine(routed, engine):
    """The next engine gets it as soon as it is ready, with all tokens of the previous engine"""
    engine.holding = True

    async def body(router):
        generation = router.generate(submit(max_tokens=9))
        first = asyncio.ensure_future(anext(aiter(generation)))
        await until(lambda: engine.open)
        await asyncio.to_thread(engine.give, 4)
        await first
        await asyncio.to_thread(engine.die)
        await until(lambda: router.pending == 1)
        engine.start()
        await until(lambda: engine.open)
        assert engine.submits[-1].emitted == (100, 101, 102, 103)
        await asyncio.to_thread(engine.give, 5)
        rest = [id async for delta in generation for id in delta.ids]
        assert [*(await first).ids, *rest] == list(range(100, 109))

    routed([engine], body)
