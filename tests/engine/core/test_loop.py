"""The loop over a device that needs no model: grammars, statistics, recordings. It runs in the test's own thread."""

import random
import threading
import time
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from scheduler_simulation import VOCAB, make_layout

from engine.api.errors import RequestError
from engine.api.messages import Abort, Control, Failed, Grammar, Output, Sampling, Stats, Submit, Thinking
from engine.arguments import engine_config
from engine.core.config import SchedulerConfig
from engine.core.loop import build_loop
from engine.core.plan import StepResult, wait
from engine.core.recorder import Recorder
from engine.core.records import LENGTH, Applied, PlanMade, Submitted, read_records
from engine.core.replay import main as replay_main
from engine.core.replay import replay
from engine.models.parts import Attention, Embedding, Head, Model, ResidualBlock
from engine.structured.thinking import Budget


class Device:
    """Draws the lowest token a row's mask allows, or 1."""

    weight_bytes = kv_bytes = 0
    snapshots = adapters = None
    memory = ()
    seconds = {}

    def __init__(self, blocks=40):
        part = Attention(hidden=1, heads=1, kv_heads=1, head_dim=1, rope=None)
        self.model = Model(
            embed=Embedding(vocab=VOCAB, hidden=1),
            blocks=((ResidualBlock(body=part),),),
            norm=None,
            head=Head(tied=True),
            max_context=100,
        )
        self.layout, self.blocks = make_layout((None,)), blocks
        self.started, self.waited, self.late = [], [], []

    def start(self, plan, masks):
        self.started.append(plan.step)
        self.late += [plan.step] if isinstance(masks, Future) else []
        device = self

        class Handle:
            def result(self):
                assert not isinstance(masks, Future) or masks.done(), "the device would wait for ever"
                given = wait(masks)
                sampled = []
                for index, row in enumerate(plan.rows):
                    allowed = [t for t in range(VOCAB) if given[index][0] >> t & 1] if index in given else [1]
                    sampled.append(allowed[0] if row.sample else -1)
                device.waited.append((plan.step, device.started[-1]))
                return StepResult(plan.step, tuple(sampled))

        return Handle()

    def close(self):
        pass


class Word:
    """Allows a word's tokens one after the other, then the end; a word "!" has no way on after its first token."""

    def __init__(self, text, ends):
        self.left, self.ends, self.dead = [int(c) for c in text.rstrip("!")], list(ends), text.endswith("!")

    free = 0

    @property
    def finished(self):
        return not self.left and not self.dead

    def mask(self):
        if not self.left and self.dead:
            raise RequestError("nothing may follow", "response_format")
        mask = np.zeros(1, np.uint32)
        for token in self.left[:1] or self.ends:
            mask[0] |= np.uint32(1 << token)
        return mask

    def advance(self, token):
        if self.left and self.left.pop(0) != token:
            raise RequestError(f"token {token} does not fit", "response_format")


def masks_of(matchers):
    found = []
    for matcher in matchers:
        try:
            found.append(matcher.mask())
        except RequestError as error:
            found.append(error)
    return found


class Compiler:
    def __init__(self, compiled):
        self.compiled = compiled

    def start(self, grammar, ends, thinking=None):
        future = Future()
        if grammar.text == "bad":
            future.set_exception(RequestError("no grammar", "response_format"))
        else:
            future.set_result(Word(grammar.text, ends))
        return future

    def masks(self, matchers):
        return masks_of(matchers)

    def close(self):
        pass


class SlowCompiler:
    """Is done when `gate` is open; gives up after 100 s, so that a loop that waits for it fails and does not hang."""

    def __init__(self, gate):
        self.gate = gate

    def start(self, grammar, ends, thinking=None):
        future = Future()

        def compile():
            if self.gate.wait(100):
                future.set_result(Word(grammar.text, ends))
            else:
                future.set_exception(RequestError("no step ran while the grammar was compiled", "response_format"))

        threading.Thread(target=compile, daemon=True).start()
        return future

    def masks(self, matchers):
        return masks_of(matchers)

    def close(self):
        pass


def run(messages, *, device=None, open_compiler=Compiler, **changes):
    """Run the loop on these messages until all requests end, and return the messages that it sends."""
    config = engine_config(**{"model": "m", "kv_bytes": 1, "max_context": 100, "max_step_tokens": 16, **changes})
    sent = []
    loop = build_loop(config, device or Device(), sent.extend, open_compiler)
    loop.post([*messages, Control("drain")])
    loop.run()
    assert loop.drained
    return sent


def streams(sent):
    ids, ends = {}, {}
    for message in sent:
        for delta in message.deltas if isinstance(message, Output) else ():
            ids[delta.id] = ids.get(delta.id, ()) + delta.ids
            if delta.finish:
                ends[delta.id] = delta.finish
    return ids, ends


def ask(id, prompt=(1, 2, 3), max_tokens=4, **changes):
    return Submit(id, prompt, Sampling(), max_tokens, **changes)


def test_next_step_starts_before_the_last_one_is_awaited():
    ahead, behind = Device(), Device()
    run([ask("a", max_tokens=5)], device=ahead)
    run([ask("a", max_tokens=5)], device=behind, overlap=False)
    assert ahead.waited == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]
    assert behind.waited == [(step, step) for step in range(1, 6)]


def test_grammar_constrains_and_ends_its_request():
    word = ask("a", max_tokens=9, grammar=Grammar("regex", "304"), eos_token_ids=(5,))
    ids, ends = streams(run([word, ask("b")]))
    assert ids == {"a": (3, 0, 4), "b": (1,) * 4}
    assert ends == {"a": "stop", "b": "length"}


@pytest.mark.parametrize("overlap", [True, False])
def test_compilation_does_not_delay_other_requests(overlap):
    """SO-06 the compilation ends only after four steps of the other request, and loses it none of its own"""
    gate = threading.Event()

    class Opening(Device):
        def start(self, plan, masks):
            if plan.step == 4:
                gate.set()
            return super().start(plan, masks)

    word = ask("a", max_tokens=9, grammar=Grammar("regex", "304"), eos_token_ids=(5,))
    sent = run(
        [word, ask("b", max_tokens=12)],
        device=Opening(),
        open_compiler=lambda _: SlowCompiler(gate),
        overlap=overlap,
    )
    steps = {"a": [], "b": []}
    for output in sent:
        for delta in output.deltas if isinstance(output, Output) else ():
            steps[delta.id] += [output.step] * len(delta.ids)
    assert steps["b"] == list(range(1, 13))
    assert len(steps["a"]) == 3 and steps["a"][0] > 4
    assert streams(sent) == ({"a": (3, 0, 4), "b": (1,) * 12}, {"a": "stop", "b": "length"})


def test_a_resumed_request_resumes_its_grammar():
    word = ask("a", max_tokens=9, emitted=(3, 0), grammar=Grammar("regex", "304"), eos_token_ids=(5,))
    assert streams(run([word])) == ({"a": (4,)}, {"a": "stop"})


class Thoughts:
    """Compiler of thinking budgets: the device draws token 1; tokens 3 and 4 are the end marker."""

    def __init__(self, compiled):
        pass

    def masks(self, matchers):
        return masks_of(matchers)

    def start(self, grammar, ends, thinking=None):
        assert grammar is None, "the request has no grammar"
        future = Future()
        future.set_result(Budget(thinking, lambda token: b"x/>..."[token : token + 1], 8))
        return future

    def close(self):
        pass


@pytest.mark.parametrize("overlap", [True, False])
def test_a_thinking_budget_is_exact_wherever_a_request_is_resumed(overlap):
    """C.9: three tokens, then the marker, and the same tokens behind any number that an earlier engine gave."""
    limit = Thinking(3, (3, 4), ("<",), (".!",), begun=True, open=True)
    whole = (1, 1, 1, 3, 4, 1, 1, 1)
    for given in range(len(whole)):
        resumed = ask("a", max_tokens=8, emitted=whole[:given], thinking=limit)
        ids, ends = streams(run([resumed, ask("b")], open_compiler=Thoughts, overlap=overlap))
        assert ids["a"] == whole[given:], given
        assert ends["a"] == "length"
        assert ids["b"] == (1,) * 4, "others are free"


def test_steps_wait_for_masks_only_if_needed():
    """Three tokens of reasoning, a marker of two, then content: steps 4 and 5 draw the marker, and step 6 may draw
    anything once the marker is known to be complete. All start before the step ahead of them has ended."""
    limit = Thinking(3, (3, 4), ("<",), (".!",), begun=True, open=True)
    device = Device()
    ids, _ = streams(run([ask("a", max_tokens=9, thinking=limit)], device=device, open_compiler=Thoughts))
    assert ids["a"] == (1, 1, 1, 3, 4, 1, 1, 1, 1)
    assert device.late == [4, 5, 6]
    assert device.waited == [*((step, step + 1) for step in range(1, 9)), (9, 9)]


def test_unused_thinking_budget_causes_no_wait():
    free, limited = Device(), Device()
    run([ask("a", max_tokens=9)], device=free)
    for limit in (
        Thinking(9, (3, 4), ("<",), (".!",), begun=True, open=True),
        Thinking(9, (3, 4), ("<",), (".!",)),  # may begin with the first token
        Thinking(0, (3, 4), ("<",), (".!",), begun=True, open=True),
    ):
        device = Device()
        emitted = (3, 4) if limit.budget == 0 else ()  # resumed after the reasoning
        asked = ask("a", max_tokens=9 + len(emitted), emitted=emitted, thinking=limit)
        sent = run([asked], device=device, open_compiler=Thoughts)
        assert len(streams(sent)[0]["a"]) == 9
        assert device.waited == free.waited and device.late == []
        assert [message for message in sent if isinstance(message, Stats)][-1].masks == 0
    again = msgspec.structs.replace(limit, budget=9, again=True)
    run([ask("a", max_tokens=9, thinking=again)], device=limited, open_compiler=Thoughts)
    assert limited.waited == free.waited and limited.late == []


def test_grammar_after_reasoning_masks_each_token():
    """It holds within the reasoning as well: there it knows what may not occur in it."""

    class Both(Thoughts):
        def start(self, grammar, ends, thinking=None):
            future = Future()
            inner = Word(grammar.text, ends)
            future.set_result(Budget(thinking, lambda token: b"x/>..."[token : token + 1], 8, inner))
            return future

    device = Device()
    limit = Thinking(3, (3, 4), ("<",), (".!",), begun=True, open=True)
    asked = ask("a", max_tokens=9, thinking=limit, grammar=Grammar("regex", "11134022"), eos_token_ids=(5,))
    assert streams(run([asked], device=device, open_compiler=Both))[0]["a"] == (1, 1, 1, 3, 4, 0, 2, 2)
    assert device.late[:7] == [2, 3, 4, 5, 6, 7, 8]


LETTERS = "abc</>d"  # text of each token of a Thinker
MARKER = (3, 4, 5)


class Thinker(Device):
    """Draws by seed and all tokens before, and what its mask leaves; it often writes pieces of the end marker."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.table = {}

    def start(self, plan, masks):
        self.started.append(plan.step)
        device = self

        class Handle:
            def result(self):
                return StepResult(plan.step, tuple(device.draw(plan, wait(masks))))

        return Handle()

    def draw(self, plan, masks):
        for slot in plan.dropped:
            del self.table[slot]
        for new in plan.new:
            self.table[new.slot] = (new.sampling.seed, list(new.ids))
        for index, row in enumerate(plan.rows):
            seed, ids = self.table[row.slot]
            if row.sample:
                assert len(ids) == row.first + row.count
                allowed = [t for t in range(VOCAB) if index not in masks or masks[index][0] >> t & 1]
                ids.append(allowed[drawn(seed, ids) % len(allowed)])
            yield ids[-1] if row.sample else -1


def drawn(seed, ids):
    return random.Random(str((seed, ids))).choice((0, 1, 2, 3, 4, 5, 3, 4, 5, 6))


def thought_through(submit):
    """The undisturbed reply, token by token: the reasoning is open until its text has the marker."""
    reply, close = [], submit.thinking.close
    while len(reply) < submit.max_tokens:
        text = "".join(LETTERS[token] for token in reply)
        if "</>" not in text and len(reply) >= submit.thinking.budget:
            written = max(k for k in range(len(close)) if k == 0 or tuple(reply[-k:]) == close[:k])
            reply.append(close[written])
        else:
            reply.append(drawn(submit.sampling.seed, [*submit.prompt, *reply]) % VOCAB)
    return tuple(reply)


@pytest.mark.parametrize("overlap", [True, False])
def test_budgets_are_exact_under_preemption_and_replay(tmp_path, overlap):
    """C.9: several choices of a prompt, each with its seed, resumed anywhere; a cache too small for all."""

    class Lettered(Thoughts):
        def start(self, grammar, ends, thinking=None):
            future = Future()
            future.set_result(Budget(thinking, lambda token: LETTERS[token].encode(), VOCAB))
            return future

    chance, asked = random.Random(20), []
    for number in range(40):
        budget = chance.choice((0, 1, 2, 3, 5, 8, 13, 40))
        limit = Thinking(budget, MARKER, ("<t>",), ("</>",), begun=True, open=True)
        prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.choice((1, 3, 4, 9))))
        for seed in range(3):  # n=3
            one = ask(f"{number}/{seed}", prompt, 24, thinking=limit)
            one = msgspec.structs.replace(one, sampling=Sampling(seed=seed))
            given = chance.choice((0, 0, 1, 4, 5, 6, 11, 20))
            asked.append(msgspec.structs.replace(one, emitted=thought_through(one)[:given]))
    changes = {"overlap": overlap, "record": str(tmp_path / "r"), "max_running": 9}
    sent = run(asked, device=Thinker(33), open_compiler=Lettered, **changes)
    ids, ends = streams(sent)
    for one in asked:
        assert one.emitted + ids[one.id] == thought_through(one), one
        assert ends[one.id] == "length"
    assert [message for message in sent if isinstance(message, Stats)][-1].preemptions > 5
    assert replay(read_records(tmp_path / "r")).difference is None


@pytest.mark.parametrize("text, words, ids", [("bad", "no grammar", ()), ("3!", "nothing may follow", (3,))])
def test_grammar_error_fails_only_its_request(text, words, ids):
    sent = run([ask("a", grammar=Grammar("regex", text)), ask("b")])
    (failed,) = [message for message in sent if isinstance(message, Failed)]
    assert (failed.id, failed.code, failed.message) == ("a", "request", words)
    assert streams(sent)[0].get("a", ()) == ids
    assert streams(sent)[1]["b"] == "length"


def test_invalid_requests_are_rejected_and_aborts_work_in_any_state():
    sent = run([ask("a"), ask("a"), ask("c", ()), ask("d", grammar=Grammar("regex", "3")), Abort(("a", "d", "none"))])
    assert [(f.id, f.param) for f in sent if isinstance(f, Failed)] == [("a", "id"), ("c", "prompt")]
    assert streams(sent)[1] == {"a": "abort", "d": "abort"}


def test_idle_engine_has_reported_its_counters():
    sent = run([ask("a", tuple(range(5)), 3), ask("b", tuple(range(5)), 3)], max_running=1)
    last = [message for message in sent if isinstance(message, Stats)][-1]
    assert (last.running, last.waiting, last.kv_blocks_used, last.kv_blocks_total) == (0, 0, 0, 39)
    assert (last.prompt_tokens, last.cached_tokens, last.generated_tokens) == (10, 4, 6)
    assert sum(sum(m.step_tokens) for m in sent if isinstance(m, Stats)) == 5 + 2 + 1 + 2


def record(path, **changes):
    messages = [ask(str(i), tuple((i + j) % VOCAB for j in range(7)), 30, salt=str(i)) for i in range(5)]
    run(messages, device=Device(blocks=13), record=str(path), **changes)


def test_a_request_that_arrives_during_a_step_is_stamped_with_its_arrival(tmp_path):
    class Arriving(Device):
        """Another request reaches the engine while steps 1 and 2 run."""

        posted_by = 0.0

        def start(self, plan, masks):
            if plan.step == 2:
                loop.post([ask("b")])
                self.posted_by = time.monotonic()
            elif plan.step == 4:
                loop.post([Control("drain")])
            return super().start(plan, masks)

    device, path, sent = Arriving(), tmp_path / "recording", []
    config = engine_config(model="m", kv_bytes=1, max_context=100, max_step_tokens=16, record=str(path))
    loop = build_loop(config, device, sent.extend, Compiler)
    loop.post([ask("a", max_tokens=9)])
    loop.post([ask("dropped")], accepts=lambda: False)
    loop.run()
    assert streams(sent)[1] == {"a": "length", "b": "length"}
    arrived = {record.submit.id: record.now for record in read_records(path) if isinstance(record, Submitted)}
    settled = next(record.now for record in read_records(path) if isinstance(record, Applied))
    assert arrived["b"] <= device.posted_by <= settled


def test_a_recorded_run_replays_to_equal_plans(tmp_path, capsys):
    record(tmp_path / "r")
    record(tmp_path / "r", policy="priority", overlap=False)
    assert replay_main([str(tmp_path / "r")]) == 0
    assert "2 runs: all plans equal" in capsys.readouterr().out
    plans = [r for r in read_records(tmp_path / "r") if isinstance(r, PlanMade) and r.plan is not None]
    assert len(plans) == replay(read_records(tmp_path / "r")).steps > 60


def test_a_replay_of_other_events_names_the_first_step_that_differs(tmp_path):
    record(tmp_path / "r")
    records = [
        Submitted(ask(r.submit.id, (1,)), r.now) if isinstance(r, Submitted) and r.submit.id == "1" else r
        for r in read_records(tmp_path / "r")
    ]
    outcome = replay(iter(records))
    assert outcome.difference.recorded.step == outcome.difference.replayed.step == outcome.steps + 1


def test_a_request_can_be_explained(tmp_path, capsys):
    record(tmp_path / "r")
    assert replay_main([str(tmp_path / "r"), "--explain", "1"]) == 0
    said = capsys.readouterr().out
    for words in (
        "0.0 ms: queued with 7 prompt",
        "scheduled in step 1",
        "preempted at",
        "needs",
        "ends (length) with 30 tokens",
    ):
        assert words in said
    assert replay_main([str(tmp_path / "r"), "--explain", "nobody"]) == 1


def test_a_recording_cut_off_by_a_crash_replays_as_far_as_it_goes(tmp_path):
    record(tmp_path / "r")
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data[: len(data) * 2 // 3])
    outcome = replay(read_records(tmp_path / "r"))
    assert outcome.difference is None and outcome.steps > 0


def plans(path):
    return [record.plan for record in read_records(path) if isinstance(record, PlanMade) and record.plan is not None]


def record_long(path, **changes):
    """Requests that share a cache too small for them, so that some are preempted and prefixes are found again."""
    messages = [ask(str(i), tuple((i // 3 + j) % VOCAB for j in range(7)), 30) for i in range(60)]
    run(messages, device=Device(blocks=13), record=str(path), **changes)


LIMIT = 40_000


def test_a_bounded_recording_keeps_the_last_steps_and_replays_from_where_it_begins(tmp_path, capsys):
    record_long(tmp_path / "whole")
    record_long(tmp_path / "r", record_size=LIMIT)
    sizes = [(tmp_path / name).stat().st_size for name in ("r", "r.1")]
    assert sum(sizes) <= LIMIT < 2 * LIMIT < (tmp_path / "whole").stat().st_size and len(list(tmp_path.iterdir())) == 3
    kept, everything = plans(tmp_path / "r"), plans(tmp_path / "whole")
    assert 90 < len(kept) < len(everything) and kept == everything[-len(kept) :]
    outcome = replay(read_records(tmp_path / "r"))
    assert (outcome.runs, outcome.steps, outcome.difference) == (1, len(kept), None)
    assert outcome.dropped == kept[0].step - 1 == len(everything) - len(kept)
    assert replay_main([str(tmp_path / "r")]) == 0
    out, err = capsys.readouterr()
    assert f"{len(kept)} steps of 1 runs: all plans equal" in out
    assert err == f"the recording begins after step {outcome.dropped}; earlier steps were deleted\n"
    assert replay_main([str(tmp_path / "r"), "--explain", "59"]) == 0
    assert "ends (length) with 30 tokens" in capsys.readouterr().out


def test_the_newer_file_of_a_bounded_recording_replays_alone(tmp_path):
    """Files begin at other steps with each limit: with requests that wait, run, were preempted, have just ended. One
    may begin after the last step of all, as sizes vary a little with the times that are recorded."""
    limits, with_steps = range(11_000, 40_000, 1_699), 0
    for limit in limits:
        folder = tmp_path / str(limit)
        folder.mkdir()
        record_long(folder / "r", record_size=limit)
        (folder / "r.1").unlink()
        outcome = replay(read_records(folder / "r"))
        assert outcome.difference is None and outcome.dropped > 0
        with_steps += outcome.steps > 0
    assert with_steps > len(limits) // 2


def test_a_difference_in_a_bounded_recording_names_the_step_of_the_run(tmp_path, capsys):
    record_long(tmp_path / "r", record_size=LIMIT)
    records = list(read_records(tmp_path / "r"))
    at = max(index for index, record in enumerate(records) if isinstance(record, PlanMade) and record.plan)
    step = records[at].plan.step
    records[at] = PlanMade(records[at].now, None)
    bodies = list(map(msgspec.msgpack.encode, records))
    (tmp_path / "cut").write_bytes(b"".join(LENGTH.pack(len(body)) + body for body in bodies))
    assert replay_main([str(tmp_path / "cut")]) == 1
    assert f"step {step} differs" in capsys.readouterr().out


def test_requests_that_are_refused_fill_no_disk(tmp_path):
    """They are recorded although no step follows."""
    config = SchedulerConfig(layout=make_layout((None,)), blocks=13, max_context=100)
    recorder = Recorder(config, str(tmp_path / "r"), LIMIT)
    for number in range(1000):
        with pytest.raises(RequestError):
            recorder.submit(ask(str(number), (1,) * 101), 0.0)
        recorder.on_idle()
    assert LIMIT // 4 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= LIMIT


def test_abort_cancels_the_compilation():
    """SO-06: a compilation that has not started is cancelled; costs are counted, and cached grammars cost nothing."""
    waiting = Future()

    class Waiting(Compiler):
        def start(self, grammar, ends, thinking=None):
            if grammar.text == "30":
                return waiting
            self.compiled(0.25)
            self.compiled(0.0)
            return super().start(grammar, ends)

    left = ask("a", max_tokens=9, grammar=Grammar("regex", "30"), eos_token_ids=(5,))
    other = ask("b", max_tokens=9, grammar=Grammar("regex", "304"), eos_token_ids=(5,))
    sent = run([left, Abort(("a",)), other], open_compiler=Waiting)
    assert waiting.cancelled()
    assert streams(sent)[1] == {"a": "abort", "b": "stop"}
    last = [message for message in sent if isinstance(message, Stats)][-1]
    assert (last.grammars_compiled, last.grammars_cached, last.grammar_seconds, last.masks) == (1, 1, 0.25, 3)
    assert last.waiting == 0
