"""Tests of golden prompts between requests on a simulated device: their steps, when they run, when they yield."""

import threading

import numpy as np
import pytest
from scheduler_simulation import make_layout

from engine.api.config import SelfTest
from engine.api.errors import Drift, SelfTestFailed
from engine.api.golden import REPLY_TOKENS, Arithmetic, Prompt, Recorded
from engine.api.heartbeat import State
from engine.api.messages import Control, Output, Sampling, Stats, Submit
from engine.arguments import engine_config
from engine.core.golden import SLOT, HealthCheck, Run
from engine.core.loop import build_loop, build_self_test
from engine.core.plan import StepResult
from engine.kv.layout import NULL_BLOCK
from engine.models.parts import Attention, Embedding, Head, Model, ResidualBlock
from engine.worker.logit_fingerprint import logit_fingerprint

EXACT = Arithmetic(device="a", kernels="amx", dtype="float32", kv_dtype="float32", weights="stored", exact=True)
BLOCKS, RESERVED, VOCAB = 40, 64, 101


class Device:
    """Simulated device whose tokens and logits depend on all earlier ids, read from pages through the block table.

    A block that another request overwrites, or that was never allocated, changes them.
    Changing `weight` causes drift."""

    weight_bytes = kv_bytes = 0
    snapshots = adapters = None
    memory = ()
    arithmetic = EXACT

    def __init__(self):
        part = Attention(hidden=1, heads=1, kv_heads=1, head_dim=1, rope=None)
        self.model = Model(
            embed=Embedding(vocab=VOCAB, hidden=1),
            blocks=((ResidualBlock(body=part),),),
            norm=None,
            head=Head(tied=True),
            max_context=100,
        )
        self.layout, self.blocks = make_layout((None,)), BLOCKS
        self.reserved = tuple(range(BLOCKS, BLOCKS + RESERVED))
        self.seconds = {}
        self.pages = np.full((BLOCKS + RESERVED, self.layout.block_tokens), -1)
        self.plans, self.weight, self.before_step = [], 0.0, lambda plan: None
        self._ids, self._tables = {}, {}

    def start(self, plan, masks):
        self.before_step(plan)
        self.plans.append(plan)
        for new in plan.new:
            self._ids[new.slot], self._tables[new.slot] = list(new.ids), [[] for _ in self.layout.groups]
        sampled, fingerprints = [], {}
        for index, row in enumerate(plan.rows):
            ids, tables = self._ids[row.slot], self._tables[row.slot]
            for table, added in zip(tables, row.blocks, strict=True):
                table.extend(added)
            for at in range(row.first, row.first + row.count):
                for table in tables:
                    block, offset = divmod(at, self.layout.block_tokens)
                    self.pages[table[block], offset] = ids[at]
            kept = [self.pages[tables[0][at // self.layout.block_tokens], at % self.layout.block_tokens]
                    for at in range(row.first + row.count)]  # fmt: skip
            logits = np.random.default_rng(kept).standard_normal(VOCAB).astype(np.float32) + np.float32(self.weight)
            token = int(logits.argmax()) if row.sample else -1
            if row.sample:
                ids.append(token)
                if plan.fingerprinted:
                    fingerprints[index] = logit_fingerprint(logits)
            sampled.append(token)
        result = StepResult(plan.step, tuple(sampled), fingerprints=fingerprints)

        class Handle:
            def result(self):
                return result

        return Handle()

    def close(self):
        pass


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def configured(**changes):
    test = SelfTest(**{"prompts": 3, "every": 10.0, **changes})
    return engine_config(model="m", kv_bytes=1, max_context=100, max_step_tokens=16, self_test=test)


def watched(device, **changes):
    watch = build_self_test(configured(**changes), device)
    tested = watch.start(lambda plan: device.start(plan, {}).result(), lambda: 0.0, lambda share: None)
    return watch, tested


def recorded(device):
    watch, _ = watched(device)
    return Recorded(EXACT, tuple(watch.references.values()))


def steps(run):
    """Its plans, each settled with token 1."""
    found = []
    while (plan := run.plan()) is not None:
        found.append(plan)
        token = 1 if plan.rows[0].sample else -1
        run.apply(StepResult(0, (token,), fingerprints={0: logit_fingerprint(np.ones(3, np.float32))}))
    return found


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("step_tokens", [1, 2, 7, 16, 512])
def test_a_prompt_is_computed_in_chunks_and_its_reply_token_by_token(length, step_tokens):
    layout = make_layout((None, 8))
    taken = []
    run = Run(Prompt("p", tuple(range(length))), layout, range(100, 200), step_tokens)
    computed = 0
    for plan in steps(run):
        (row,) = plan.rows
        assert row.slot == SLOT and row.first == computed and 1 <= row.count <= step_tokens and plan.fingerprinted
        computed += row.count
        assert row.sample == (computed >= length)
        taken += [block for blocks in row.blocks for block in blocks]
        filled = {len(blocks) for blocks in row.blocks}
        assert len(filled) == 1
    assert computed == length + REPLY_TOKENS - 1
    assert len(set(taken)) == len(taken) == 2 * -(-computed // layout.block_tokens)
    assert len(run.golden.reply) == len(run.golden.fingerprints) == REPLY_TOKENS


def test_health_check_is_one_step_without_writes():
    (plan,) = [HealthCheck(make_layout((None, 8))).plan()]
    assert [row.blocks for row in plan.rows] == [((NULL_BLOCK,), (NULL_BLOCK,))] and not plan.fingerprinted


def test_start_without_a_lock_records_its_own_reference():
    device = Device()
    watch, tested = watched(device)
    assert (tested.prompts, tested.skipped, tested.against, tested.band) == (3, 0, "itself", "bit for bit")
    assert set(watch.references) == {"short", "long", "short-2"} and watch.counts.runs == 3


def test_start_with_changed_weights_fails_the_self_test():
    locked = recorded(Device())
    assert watched(Device(), locked=locked)[1].against == "lock"
    broken = Device()
    broken.weight = 0.001
    with pytest.raises(SelfTestFailed, match=r"golden prompt short .* expected, .* found, .* bit for bit with"):
        watched(broken, locked=locked)
    tested = watched(broken, locked=locked, refuses=False)[1]
    assert tested.prompts == 3 and "golden prompt short" in tested.differs and "golden prompt long" in tested.differs


def test_other_engine_type_is_compared_within_its_band():
    locked = recorded(Device())
    other = Device()
    other.arithmetic = Arithmetic(
        device="b", kernels="avx2", dtype="float32", kv_dtype="float32", weights="stored", exact=True
    )
    other.weight = 1e-4
    assert watched(other, locked=locked)[1].band == "within 0.1 %"
    other.weight = 0.02
    with pytest.raises(SelfTestFailed, match="other device a and b, kernels amx and avx2"):
        watched(other, locked=locked)
    assert watched(other, locked=locked, tolerance=0.5)[1].against == "lock"
    other.arithmetic = Arithmetic(device="b", kernels="avx2", dtype="float32", kv_dtype="float32", weights="int8")
    assert watched(other, locked=locked)[1].against == "itself", "weights that were rounded otherwise are others"


def test_prompts_of_the_lock_are_used_with_another_block_size():
    locked = recorded(Device())
    config = configured(locked=locked, prompts=4)
    device = Device()
    device.layout = make_layout((None,))
    found = build_self_test(config, device).prompts
    assert list(found)[:3] == [one.prompt for one in locked.goldens] and len(found) == 4


def test_budget_ends_the_self_test_after_at_least_one_prompt():
    device, clock = Device(), Clock()

    def slow(plan):
        clock.now += 1.0
        return device.start(plan, {}).result()

    for budget, expected in ((0.1, 1), (5.0, 2), (1e9, 3)):
        watch = build_self_test(configured(budget=budget), device)
        tested = watch.start(slow, clock, lambda share: None)
        assert (tested.prompts, tested.skipped) == (expected, 3 - expected)


# Between requests


class Service:
    """An engine loop in the test's thread. It calls `idle` before each sleep to get the next action."""

    def __init__(self, device, clock, idle, **changes):
        self.sent, self.device, self.clock, self.idle = [], device, clock, idle
        config = configured(**changes)
        self.watch = build_self_test(config, device)
        if config.lifecycle.self_test.at_start:
            self.watch.start(lambda plan: device.start(plan, {}).result(), clock, lambda share: None)
        device.plans.clear()
        self.loop = build_loop(config, device, self.sent.extend, None, self.beat, self.watch)
        self.loop._clock = clock
        self.loop._idle_since = clock()

    def beat(self, state):
        if state is State.IDLE:
            self.idle(self)

    def run(self):
        self.loop.run()

    def ask(self, id, prompt, tokens=5):
        self.loop.post([Submit(id, tuple(prompt), Sampling(temperature=0.0), tokens)])

    def reply(self, id):
        return [token for m in self.sent if isinstance(m, Output) for d in m.deltas if d.id == id for token in d.ids]


def script(*moves):
    """Makes one move each time the engine is idle, then stops."""
    left = list(moves)

    def idle(service):
        if left:
            left.pop(0)(service)
        else:
            service.loop.stop()

    return idle


def later(seconds):
    def move(service):
        service.clock.now += seconds
        service.loop.probe()

    return move


def golden_plans(device):
    return [plan for plan in device.plans if plan.fingerprinted]


def test_golden_prompt_runs_when_due_and_idle():
    device, clock = Device(), Clock()
    service = Service(device, clock, script(later(9.0), later(2.0), later(1.0), later(11.0)))
    service.run()
    turns = [plan.new[0].prompt_tokens for plan in golden_plans(device) if plan.new]
    prompts = [len(prompt.ids) for prompt in service.watch.prompts]
    assert turns == prompts[:2], "one a turn, each in turn"
    assert len([plan for plan in device.plans if not plan.fingerprinted]) == 2, "and else a probe"
    assert service.watch.counts.runs == 3 + 2


def test_short_pause_does_not_start_a_golden_prompt():
    device, clock = Device(), Clock()

    def work(service):
        clock.now += 1000.0
        service.ask("a", range(7))

    service = Service(device, clock, script(work, later(1.0), later(0.5), later(1.0)))
    service.run()
    assert [plan.fingerprinted for plan in device.plans if plan.new] == [False, False, False, True]


def test_every_0_disables_golden_prompts():
    device, clock = Device(), Clock()
    Service(device, clock, script(*[later(1000.0)] * 5), every=0.0).run()
    assert golden_plans(device) == [] and len(device.plans) == 5


def test_busy_engine_runs_no_golden_prompt():
    """However often it is asked to, and though it is long overdue"""
    device, clock = Device(), Clock()

    def busy(service):
        clock.now += 1000.0
        for number in range(4):
            service.ask(str(number), range(1, 20 + number), 20)
        device.before_step = lambda plan: service.loop.probe()

    service = Service(device, clock, script(busy))
    service.run()
    assert len(device.plans) > 20 and golden_plans(device) == []
    assert all(len(service.reply(str(number))) == 20 for number in range(4))


def test_request_cancels_a_running_golden_prompt():
    device, clock = Device(), Clock()
    alone = Service(Device(), Clock(), script(lambda service: service.ask("a", range(7))))
    alone.run()

    def interrupt(service):
        later(100.0)(service)

        def before_step(plan):
            if plan.fingerprinted and plan.rows[0].first > 0:
                device.before_step = lambda plan: None
                service.ask("a", range(7))

        device.before_step = before_step

    service = Service(device, clock, script(interrupt, later(100.0)))
    service.run()
    kinds = [plan.fingerprinted for plan in device.plans]
    first_user = kinds.index(False)
    assert first_user == 2, "the step in flight ends, and no further one of the golden prompt begins"
    assert service.reply("a") == alone.reply("a") and len(service.reply("a")) == 5
    assert service.watch.counts.yields == 1 and service.watch.counts.runs == 3 + 1


def test_golden_prompts_do_not_affect_cache_and_counters():
    device, clock = Device(), Clock()
    prompt = list(range(1, 34))
    service = Service(
        device,
        clock,
        script(lambda s: s.ask("a", prompt, 3), *[later(100.0)] * 6, lambda s: s.ask("b", prompt, 3)),
    )
    service.run()
    assert service.reply("a") == service.reply("b")
    stats = [message for message in service.sent if isinstance(message, Stats)][-1]
    found = len(prompt) // device.layout.block_tokens * device.layout.block_tokens
    assert found > 0 and stats.cached_tokens == found and stats.prompt_tokens == 66 and stats.generated_tokens == 6
    assert stats.prefix_queries == 66 and stats.prefix_hits == found
    assert (stats.self_tests, stats.self_test_yields) == (9, 0)
    written = {block for plan in golden_plans(device) for row in plan.rows for blocks in row.blocks for block in blocks}
    assert written and min(written) >= BLOCKS, "no block of the pool"


def test_drift_stops_the_loop_before_the_next_request_step():
    device, clock = Device(), Clock()

    def drifted(service):
        device.weight = 0.001
        later(100.0)(service)

        def before_step(plan):
            if plan.fingerprinted and plan.rows[0].first + plan.rows[0].count >= 5 + REPLY_TOKENS - 1:
                service.ask("late", range(9))

        device.before_step = before_step

    service = Service(device, clock, script(drifted))
    with pytest.raises(Drift, match="golden prompt short .* with this engine's first result"):
        service.run()
    assert all(plan.fingerprinted for plan in device.plans), "the request that had just come was not computed"
    assert service.reply("late") == []


def test_first_idle_runs_become_the_reference():
    device, clock = Device(), Clock()

    def break_it(service):
        device.weight = 0.001
        later(100.0)(service)

    service = Service(device, clock, script(*[later(100.0)] * 6, break_it), at_start=False)
    with pytest.raises(Drift):
        service.run()
    assert service.watch.counts.runs == 7
    locked = recorded(Device())
    device.weight = 0.001
    service = Service(device, clock, script(later(100.0)), at_start=False, locked=locked)
    with pytest.raises(Drift, match="with the lock"):
        service.run()


def test_a_drained_or_stopped_loop_does_not_wait_for_a_golden_prompt():
    for end in (lambda loop: loop.stop(), lambda loop: loop.post([Control("drain")])):
        device, clock = Device(), Clock()

        moves = [later(100.0)]

        def begin(service, end=end, device=device, moves=moves):
            if moves:
                moves.pop()(service)
                device.before_step = lambda plan: end(service.loop)

        service = Service(device, clock, begin)
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        thread.join(100)
        assert not thread.is_alive()
