"""Recordings as input: the state in one is complete, and a malicious file has no effect but a line of text."""

import os
import pickle
import random
import re
from collections import OrderedDict, deque
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scheduler_simulation import WINDOWS, Load, make_layout, simulate

from engine.api.config import SpeculationConfig
from engine.api.errors import ConfigError
from engine.api.messages import Sampling, Submit
from engine.core.config import EncoderLimits, PooledTasks, SchedulerConfig
from engine.core.plan import StepResult
from engine.core.recorder import FLUSH_S, Recorder
from engine.core.records import FORMAT, LENGTH, Record, Started, decode_config, encode_config, read_records
from engine.core.replay import main as replay_main
from engine.core.replay import replay
from engine.core.scheduler import Planned, Scheduler
from engine.core.snapshot import SchedulerState, restore, snapshot
from engine.core.whatif.__main__ import main as whatif_main
from engine.models.parts import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoRotation,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from tests.tiers import paired

CONFIG = SchedulerConfig(layout=make_layout((None, 9)), blocks=30, max_context=100, max_step_tokens=16, max_running=4)


def content(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Everything an object holds, as lists and dictionaries of numbers and texts."""
    if id(value) in seen or value is None or isinstance(value, (bool, int, float, str, bytes)):
        return None if id(value) in seen else value
    if isinstance(value, Enum):
        return value.value
    inside = seen | {id(value)}
    if isinstance(value, (list, tuple, deque)):
        return [content(each, inside) for each in value]
    if isinstance(value, dict):
        pairs = [(content(key, inside), content(each, inside)) for key, each in value.items()]
        return pairs if isinstance(value, OrderedDict) else sorted(pairs, key=repr)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    names = [
        *getattr(value, "__dict__", ()),
        *(n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())),
    ]
    return {name: content(getattr(value, name), inside) for name in sorted(names) if name not in ("config", "_tell")}


class Restored(Scheduler):
    """Scheduler that compares itself with its state restored from a recording, before and after each step."""

    compared = 0

    def compare(self) -> None:
        other = Scheduler(self.config)
        restore(other, msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot(self)), type=SchedulerState))
        assert content(other) == content(self)
        assert list(other._by_id) == list(self._by_id)
        type(self).compared += 1

    def plan(self, now: float) -> Planned | None:
        self.compare()
        planned = super().plan(now)
        self.compare()
        return planned


@pytest.mark.parametrize(
    ("policy", "windows"), paired(["fcfs", "priority", "fair"], ["narrow and wide windows", "full"])
)
def test_a_restored_scheduler_has_the_whole_state_at_every_step(policy: str, windows: str) -> None:
    Restored.compared = 0
    snapshots = 5 if policy == "fcfs" else None
    load = Load(3, WINDOWS[windows], requests=20, blocks=30, policy=policy, scheduler=Restored, snapshots=snapshots)
    simulate(load)
    assert Restored.compared > 40


class PlansTwice(Scheduler):
    """Scheduler that compares each plan with the plan of its state restored from a recording."""

    drafts = 0

    def plan(self, now: float) -> Planned | None:
        other = Scheduler(self.config)
        restore(other, msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot(self)), type=SchedulerState))
        planned, again = super().plan(now), other.plan(now)
        assert (planned and planned.plan) == (again and again.plan)
        if planned is not None:
            type(self).drafts += sum(len(row.drafts) for row in planned.plan.rows)
        return planned


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(method="suffix", ngram_min=1),
        SpeculationConfig(method="suffix", ngram_min=1, adaptive=True),
        SpeculationConfig(method="mtp"),
    ],
    ids=("suffix", "auto", "mtp"),
)
@pytest.mark.parametrize("snapshots", [None, 5], ids=("attention", "stale states"))
def test_a_restored_scheduler_plans_the_same_drafts(speculation: SpeculationConfig, snapshots: int | None) -> None:
    PlansTwice.drafts = 0
    load = Load(3, (None,), requests=16, replies=(30,), scheduler=PlansTwice, speculation=speculation)
    simulate(replace(load, snapshots=snapshots))
    assert PlansTwice.drafts > 60


def test_every_configuration_is_recorded_whole() -> None:
    scalings = (
        NoRotation(),
        ProportionalScaling(pairs=3, factor=2.0),
        LinearScaling(factor=2.0),
        DynamicScaling(factor=2.0, original=100),
        Llama3Scaling(factor=2.0, low_freq=1.0, high_freq=4.0, original=8),
        YarnScaling(factor=4.0, original=64, attention=0.5, truncate=False),
        LongScaling(short=(1.0, 2.0), long=(3.0, 4.0), original=50, attention=1.5),
        None,
    )
    config = SchedulerConfig(
        layout=make_layout((None, 5)),
        blocks=9,
        max_context=77,
        policy="fair",
        ropes=tuple(Rope(dim=8, theta=1e4, interleaved=True, scaling=scaling) for scaling in scalings),
        pooled=PooledTasks(tasks=("embed",), width=4, last=True, dimensions=(2,)),
        sources=EncoderLimits(longest=7, reply=8),
        snapshots=3,
    )
    started = msgspec.msgpack.decode(msgspec.msgpack.encode(Started(FORMAT, encode_config(config))), type=Record)
    assert isinstance(started, Started) and decode_config(started) == config


def recording(path: Path) -> bytes:
    """A file whose first record has the state of a scheduler with requests in flight."""
    recorder, now = Recorder(CONFIG, str(path), 40_000), 0.0
    for number in range(80):
        recorder.submit(Submit(f"r{number}", tuple(range(5, 12)), Sampling(), 6), now)
        planned = recorder.plan(now)
        if planned is not None:
            now += FLUSH_S
            drawn = tuple(7 if row.sample else -1 for row in planned.plan.rows)
            recorder.apply(StepResult(planned.plan.step, drawn), now)
    recorder.on_idle()
    path.with_name(f"{path.name}.1").unlink(missing_ok=True)
    assert next(read_records(path)).state.sequences  # type: ignore[union-attr]
    return path.read_bytes()


def frame(*bodies: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


def encoded(**changes: Any) -> bytes:
    fields = {"type": "started", "format": FORMAT, "config": encode_config(CONFIG)}
    return msgspec.msgpack.encode({**fields, **changes})


def config_with(**changes: Any) -> dict[str, Any]:
    return {**encode_config(CONFIG), **changes}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


NAN_PLAN = msgspec.msgpack.encode({"type": "plan", "now": float("nan"), "plan": None})
ROPE = {"dim": 1, "theta": 1, "interleaved": False}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "pickle as state": (frame(encoded(state=pickle.dumps(Evil()))), "Expected `object | null`, got `bytes`"),
    "pickle as file": (pickle.dumps(Evil()), "holds no record"),
    "pickle as record": (frame(pickle.dumps(Evil())), "record 1 is damaged"),
    "recorder by name": (frame(encoded(state=b"cengine.core.recorder\nRecorder\n.")), "record 1 is damaged"),
    "earlier format": (
        frame(msgspec.msgpack.encode({"type": "started", "config": {}, "scalings": [], "state": b""})),
        "of another version",
    ),
    "later format": (frame(encoded(format=7)), "has format 7; this version of Slipway reads format 6"),
    "no start": (frame(NAN_PLAN), "does not begin a recording"),
    "time that is no number": (frame(encoded(), NAN_PLAN), "record 2 has no finite time"),
    "unknown field": (frame(encoded(config=config_with(evil=1))), "unknown field 'evil'"),
    "missing field": (frame(encoded(config={})), "configuration cannot be read"),
    "wrong type": (frame(encoded(config=config_with(blocks="x"))), "configuration cannot be read"),
    "type by name": (
        frame(
            encoded(config=config_with(ropes=[{"dim": 1, "theta": 1, "interleaved": False, "scaling": ["Model", {}]}]))
        ),
        "configuration cannot be read: 'Model'",
    ),
    "a trillion blocks": (frame(encoded(config=config_with(blocks=10**12))), "blocks is 1000000000000; it must be"),
    "a trillion requests": (frame(encoded(config=config_with(max_running=10**12))), "max_running is"),
    "no tokens in a block": (
        frame(encoded(config=config_with(layout={**msgspec.to_builtins(CONFIG.layout), "block_tokens": 0}))),
        "block_tokens is 0",
    ),
    "deep nesting": (frame(b"\x91" * 200_000), "record 1 is damaged"),
    "deep nesting in the configuration": (frame(encoded(config={"blocks": None})[:-1] + b"\x91" * 200_000), "damaged"),
    "huge array": (frame(b"\xdd\xff\xff\xff\xff"), "record 1 is damaged"),
    "escape sequence": (frame(encoded(config=config_with(policy="\x1b[2J"))), r"\\x1b\[2J|cannot be read"),
    "result of no step": (
        frame(encoded(), msgspec.msgpack.encode({"type": "applied", "now": 1, "step": 9, "sampled": [], "failed": {}})),
        "IndexError",
    ),
}


@pytest.mark.parametrize(("data", "words"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("program", [replay_main, whatif_main], ids=["replay", "whatif"])
def test_a_malicious_recording_gives_one_line_and_no_side_effect(
    program: Any,
    data: bytes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").write_bytes(data)
    assert program([str(tmp_path / "r")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.isascii() and err[:-1].isprintable()
    assert re.search(words, err), err
    assert [path.name for path in tmp_path.iterdir()] == ["r"] and (tmp_path / "r").read_bytes() == data


def test_a_damaged_recording_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, draw = recording(tmp_path / "r"), random.Random(1)
    for round in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 3))):
            data[draw.randrange(4, len(data))] = draw.choice((draw.randrange(256), 0xFF, 0))
        (tmp_path / "r").write_bytes(data)
        for program in (replay_main, whatif_main):
            code = program([str(tmp_path / "r")])
            err = capsys.readouterr().err
            assert code in (0, 1) and err.count("\n") <= 2 and "Traceback" not in err, f"round {round}"


def test_a_recording_that_lacks_records_is_refused_or_differs(tmp_path: Path) -> None:
    recording(tmp_path / "r")
    started, *events = read_records(tmp_path / "r")
    found = set()
    for at in range(0, len(events), 7):
        for lacking in (1, 3):
            try:
                outcome = replay(iter((started, *events[:at], *events[at + lacking :])))
            except ConfigError as error:
                found.add(str(error).partition(":")[0])
            else:
                found.add("differs" if outcome.difference is not None else "equal")
    assert "the recording is damaged, or of another version of Slipway" in found


def test_ids_of_requests_do_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;x\x07"
    recorder = Recorder(CONFIG, str(tmp_path / "r"), 2**20)
    recorder.submit(Submit(evil, (1, 2), Sampling(), 1), 0.0)
    recorder.plan(0.0)
    recorder.apply(StepResult(1, (7,)), 1.0)
    recorder.on_idle()
    assert replay_main([str(tmp_path / "r"), "--explain", evil]) == 0
    assert replay_main([str(tmp_path / "r"), "--explain", "nobody"]) == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err


@pytest.mark.parametrize("program", [replay_main, whatif_main], ids=["replay", "whatif"])
def test_a_recording_is_a_regular_file(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, words in (
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "not a regular file|directory"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "nothing", "No such file"),
    ):
        assert program([str(path)]) == 1
        err = capsys.readouterr().err
        assert re.search(words, err) and err.count("\n") == 1


def test_a_state_of_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="different scheduling policies"):
        restore(Scheduler(replace(CONFIG, policy="fair")), snapshot(Scheduler(CONFIG)))
