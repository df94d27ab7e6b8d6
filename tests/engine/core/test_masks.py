"""Tests of the timing of masks for constrained rows: the device never waits forever and no step waits for masks."""

import threading
from concurrent.futures import Future

import pytest
from test_loop import Compiler, Device, ask, run, streams

from engine.api.messages import Abort, Failed, Grammar
from engine.arguments import engine_config
from engine.core.loop import build_loop
from engine.core.plan import wait


class Watched(Device):
    """Writes down of each step: how many rows, whether its masks were late, and the steps whose result was known when
    it started and when its masks came."""

    def __init__(self, blocks=40):
        super().__init__(blocks)
        self.steps, self.masked_at = [], {}

    def start(self, plan, masks):
        late = isinstance(masks, Future)
        self.steps.append((plan.step, len(plan.rows), late, len(self.waited)))
        if late:
            masks.add_done_callback(lambda _: self.masked_at.setdefault(plan.step, len(self.waited)))
        return super().start(plan, masks)


def word(id, text, **changes):
    return ask(id, max_tokens=20, grammar=Grammar("regex", text), eos_token_ids=(5,), **changes)


def test_constrained_row_delays_no_step():
    """A batch with a grammar takes as many steps as one without.

    Every row gets a token in every step, each step starts before the previous result is awaited, and the masks arrive
    in between."""
    device = Watched()
    ids, ends = streams(run([word("a", "30430430"), ask("b", max_tokens=9)], device=device))
    assert ids == {"a": (3, 0, 4, 3, 0, 4, 3, 0), "b": (1,) * 9}
    assert ends == {"a": "stop", "b": "length"}
    assert [rows for _, rows, _, _ in device.steps] == [2] * 9, "the ninth row of the word is the step planned ahead"
    assert device.waited == [(step, min(step + 1, 9)) for step in range(1, 10)]
    assert [late for _, _, late, _ in device.steps] == [False] + [True] * 8
    assert device.masked_at == {step: step - 1 for step in range(2, 10)}, "as soon as the token before them is known"


def test_batch_of_constrained_rows_keeps_the_device_busy():
    device = Watched()
    sent = run([word("a", "304"), word("b", "403"), word("c", "0")], device=device)
    assert streams(sent)[0] == {"a": (3, 0, 4), "b": (4, 0, 3), "c": (0,)}
    assert device.waited == [(1, 2), (2, 3), (3, 4), (4, 4)]


def test_masks_are_ready_at_the_start_without_overlap():
    device = Watched()
    ids, _ = streams(run([word("a", "304"), ask("b")], device=device, overlap=False))
    assert ids == {"a": (3, 0, 4), "b": (1,) * 4}
    assert not any(late for _, _, late, _ in device.steps)


def test_a_prompt_in_chunks_beside_a_constrained_row_delays_nobody():
    """The first mask of a request depends only on its prompt: it is ready at once, unlike those of other rows."""
    device = Watched()
    long = word("b", "40", prompt=tuple(range(7)) * 4)
    ids, ends = streams(run([word("a", "3043043043"), long], device=device))
    assert ids == {"a": (3, 0, 4) * 3 + (3,), "b": (4, 0)} and set(ends.values()) == {"stop"}
    assert len(device.steps) == 11


def test_dead_end_in_a_started_step_fails_only_its_request():
    device = Watched()
    sent = run([word("a", "30!"), ask("b", max_tokens=8), word("c", "404")], device=device)
    (failed,) = [message for message in sent if isinstance(message, Failed)]
    assert (failed.id, failed.code, failed.message) == ("a", "request", "nothing may follow")
    ids, ends = streams(sent)
    assert ids == {"a": (3, 0), "b": (1,) * 8, "c": (4, 0, 4)}
    assert ends == {"a": "error", "b": "length", "c": "stop"}


@pytest.mark.parametrize("blocks", [9, 13, 40])
@pytest.mark.parametrize("overlap", [True, False])
def test_grammar_holds_under_preemption_and_slot_reuse(blocks, overlap):
    texts = {str(n): "3040"[n % 4 :] * (1 + n % 3) + "34"[n % 2] for n in range(12)}
    asked = [word(id, text, prompt=(int(id) % 7, 1, 2)) for id, text in texts.items()]
    asked += [ask(f"free {n}", max_tokens=5 + n) for n in range(4)]
    sent = run(asked, device=Watched(blocks), overlap=overlap, max_running=5)
    ids, ends = streams(sent)
    for id, text in texts.items():
        assert (ids[id], ends[id]) == (tuple(map(int, text)), "stop"), id
    for n in range(4):
        assert ids[f"free {n}"] == (1,) * (5 + n)


class Worker(Device):
    """Simulated device that samples in its own thread, like a worker, and waits for late masks there.

    `dies`: number of the step that fails."""

    def __init__(self, dies=0):
        super().__init__()
        self.dies, self.threads, self.given = dies, [], []

    def start(self, plan, masks):
        done, inner = Future(), super().start(plan, masks)

        def work():
            try:
                self.given.append((plan.step, dict(wait(masks))))
                assert plan.step != self.dies, "the device is broken"
                done.set_result(inner.result())
            except BaseException as error:
                done.set_exception(error)

        thread = threading.Thread(target=work, daemon=True)
        self.threads.append(thread)
        thread.start()
        return done


def loop_over(device, messages, sent):
    config = engine_config(model="m", kv_bytes=1, max_context=100, max_step_tokens=16)
    loop = build_loop(config, device, sent.extend, Compiler)
    loop.post(messages)
    return loop


def ended(device):
    for thread in device.threads:
        thread.join(100)
    return not any(thread.is_alive() for thread in device.threads)


def test_failed_step_leaves_no_worker_waiting():
    device = Worker(dies=3)
    with pytest.raises(AssertionError, match="the device is broken"):
        loop_over(device, [word("a", "304304")], []).run()
    assert len(device.threads) == 4 and ended(device)
    assert device.given[-1] == (4, {}), "the step behind it was let go without any"


def test_stopped_loop_leaves_no_worker_waiting():
    device, sent = Worker(), []
    loop = loop_over(device, [word("a", "304" * 6)], sent)
    loop._send = lambda messages: (sent.extend(messages), len(device.started) > 4 and loop.stop())
    loop.run()
    assert len(device.threads) > 4 and ended(device)
    found = streams(sent)[0]["a"]
    assert 0 < len(found) < 18 and found == ((3, 0, 4) * 6)[: len(found)]


def test_a_request_that_is_aborted_while_its_step_runs_gets_nothing_more():
    device, sent = Watched(), []
    loop = loop_over(device, [word("a", "304" * 6), ask("b", max_tokens=9)], sent)

    def send(messages):
        sent.extend(messages)
        seen = streams(sent)
        if len(seen[0].get("a", ())) == 4 and not seen[1]:
            loop.post([Abort(("a",))])
        if "b" in seen[1]:
            loop.stop()

    loop._send = send
    loop.run()
    ids, ends = streams(sent)
    assert (ids["a"], ends["a"]) == ((3, 0, 4, 3), "abort") and ids["b"] == (1,) * 9
