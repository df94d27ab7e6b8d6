"""The process between Supervisor and an engine: `python -m appliance.supervisor.reaper FILE`.

It starts the engine, adopts what the engine's processes leave behind, whatever group or session they went to (it is
their subreaper), and when the engine has ended it kills the rest, removes its files and shared memory, writes down how
it ended, and ends in the same way. So Supervisor hears of a death when nothing is left of that life, and the next start
finds what the first one found. A keeper that was killed itself is cleaned up after by the next one: all processes of an
engine carry its mark in their environment.
"""

import argparse
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from appliance.runtime import processes
from appliance.runtime.inflight import open_file
from appliance.supervisor.death import Death, counted, read_counters, signal_name
from appliance.supervisor.shm_cleanup import FOLDER, Segments

MARK = "SLIPWAY_KEPT"
_LOOK_S = 0.25  # between two looks at /dev/shm
_PATIENCE_S = 10.0  # for processes that SIGKILL does not end at once: a driver may have to give back a lot of memory
_MOST_TOLD = 5
_HEARD = {
    *(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
}


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper is told. `files`: patterns, in `directory`, of what the program may leave there. `memory`: where
    the kernel counts what it kills for memory."""

    program: str
    argv: tuple[str, ...]
    directory: str
    files: tuple[str, ...] = ()
    memory: str = ""
    shared: str = FOLDER

    @property
    def mark(self) -> str:
        """The value of MARK in the environment of the keeper, and so of all that comes from it."""
        return f"{self.directory}:{self.program}"

    @property
    def death(self) -> Path:
        """Where its last death is told, until somebody took note of it."""
        return Path(self.directory, f"{self.program}.death")

    @property
    def open(self) -> Path:
        """What the gateway says was open when the last life ended (interrupted.py), often before this process knows of
        the end: so it goes when the next one begins."""
        return open_file(Path(self.directory), self.program)

    @property
    def lives(self) -> Path:
        """Is there as long as its keeper is."""
        return Path(self.directory, f"{self.program}.lives")


class Keeper:
    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._segments = Segments(lambda: processes.descendants(os.getpid()), kept.shared)
        self._killed: dict[int, str] = {}

    def run(self) -> int:
        """One life of the program: its wait status, when all that it left is gone."""
        kept = self._kept
        processes.become_subreaper()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        if kept.lives.exists():  # the keeper before this one was killed
            self._clear()
        self._remove_files()
        kept.open.unlink(missing_ok=True)
        kept.death.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk; then nothing is cleared after a keeper that is killed
            kept.lives.touch()
        counters, began_s = read_counters(Path(kept.memory)), time.monotonic()
        self._pid = self._start({signal.Signals(number) for number in before})
        status, peak_bytes = self._wait()
        lived_s = time.monotonic() - began_s
        stuck = self._clear()
        removed = self._segments.remove()
        self._remove_files()
        death = Death(
            pid=self._pid,
            lived_s=round(lived_s, 3),
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0,
            signal=signal_name(status),
            core=os.WIFSIGNALED(status) and os.WCOREDUMP(status),
            peak_bytes=peak_bytes,
            memory=counted(counters, read_counters(Path(kept.memory))),
            killed=_few(self._killed.values()),
            stuck=_few(processes.command(pid) for pid in stuck),
            removed=_few(removed),
        )
        self._tell(death)
        kept.lives.unlink(missing_ok=True)
        return status

    def _tell(self, death: Death) -> None:
        """Whoever reads it sees all of it or nothing; where the disk is full, the program ends as it would."""
        new = self._kept.death.with_suffix(".death-new")  # the gateway writes beside it, at the same moment
        try:
            new.write_bytes(msgspec.json.encode(death))
            new.rename(self._kept.death)
        except OSError as error:
            os.write(2, f"{self._kept.death}: {error.strerror}; how the program ended is not told\n".encode())

    def _start(self, mask: set[signal.Signals]) -> int:
        argv = self._kept.argv
        pid = os.fork()
        if pid == 0:
            try:
                processes.end_with_parent(signal.SIGKILL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.execvp(argv[0], argv)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        return pid

    def _wait(self) -> tuple[int, int]:
        """Until the program has ended: its wait status and its largest resident memory in bytes. Passes signals on."""
        while True:
            heard = signal.sigtimedwait(_HEARD, _LOOK_S)
            if heard is not None and heard.si_signo != signal.SIGCHLD:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, heard.si_signo)
                continue
            ended = self._reap()
            if ended is not None:
                return ended
            self._segments.look()

    def _reap(self) -> tuple[int, int] | None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == self._pid:
                    return status, usage.ru_maxrss * 1024
                if pid == 0:
                    return None
        return None

    def _clear(self) -> list[int]:
        """Kills all that is left of the program: below this process, or with its mark. What would not go."""

        def left() -> list[int]:
            below = processes.descendants(os.getpid())
            return list(dict.fromkeys([*below, *processes.marked(f"{MARK}={self._kept.mark}")]))

        killed, stuck = processes.kill_all(left, _PATIENCE_S)
        self._killed.update(killed)
        return stuck

    def _remove_files(self) -> None:
        directory = Path(self._kept.directory)
        for path in [path for pattern in self._kept.files for path in directory.glob(pattern)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _few(told: Iterable[str]) -> tuple[str, ...]:
    """The first ones, and how many more."""
    found = list(told)
    more = len(found) - _MOST_TOLD
    return (*found[:_MOST_TOLD], *([f"{more} more"] if more > 0 else []))


def take_death(directory: Path, program: str) -> Death | None:
    """How a program ended last, told once; None where its keeper could not say."""
    path = directory / f"{program}.death"
    try:
        death = msgspec.json.decode(path.read_bytes(), type=Death)
    except (OSError, msgspec.DecodeError):
        return None
    path.unlink(missing_ok=True)
    return death


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m appliance.supervisor.reaper", description="Keeper of one engine.")
    parser.add_argument("file", type=Path, help="JSON file that the launcher wrote")
    processes.end_as(Keeper(msgspec.json.decode(parser.parse_args().file.read_bytes(), type=Kept)).run())
