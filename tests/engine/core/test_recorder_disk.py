"""Tests of a recording when the disk fails: steps continue, and the part on disk can be replayed."""

import errno
from pathlib import Path

import pytest
from scheduler_simulation import make_layout

from engine.api.messages import Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepResult
from engine.core.recorder import FLUSH_S, Recorder
from engine.core.records import read_records
from engine.core.replay import replay

CONFIG = SchedulerConfig(
    layout=make_layout((None,)), blocks=50, max_context=100, max_step_tokens=16, max_running=4, prefix_cache=True
)


class Drive:
    """Requests of ten tokens each, one after the other, a step each FLUSH_S, so that each is flushed."""

    def __init__(self, path: Path) -> None:
        self.recorder = Recorder(CONFIG, str(path), 2**20)
        self.now, self.asked = 0.0, 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.recorder.running and not self.recorder.waiting:
                self.asked += 1
                self.recorder.submit(Submit(f"r{self.asked}", (1, 2, 3, self.asked), Sampling(), 10), self.now)
            planned = self.recorder.plan(self.now)
            assert planned is not None
            self.now += FLUSH_S
            sampled = tuple(7 if row.sample else -1 for row in planned.plan.rows)
            self.recorder.apply(StepResult(planned.plan.step, sampled), self.now)


def test_a_full_disk_pauses_the_recording_and_what_is_kept_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, full, real = tmp_path / "flight", [False], Path.open

    def opened(self: Path, mode: str = "r", *rest: object, **named: object) -> object:
        if full[0] and mode == "ab":
            with real(self, "ab") as file:
                file.write(b"\x99\x00\x00")  # a part of a record
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *rest, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    drive = Drive(path)
    drive.steps(25)
    full[0] = True
    drive.steps(25)
    assert capsys.readouterr().err.count("No space left on device; recording pauses") == 1
    before = replay(read_records(path))
    assert before.difference is None and before.steps >= 20
    full[0] = False
    drive.steps(25)
    drive.recorder.on_idle()
    after = replay(read_records(path))
    assert after.difference is None and before.steps + 20 <= after.steps < 75


def test_unwritable_recording_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="set it to a writable file"):
        Recorder(CONFIG, str(tmp_path / "nowhere" / "flight"), 2**20)
