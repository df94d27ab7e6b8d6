"""Reaper process between Supervisor and an engine: `python -m appliance.supervisor.reaper FILE`.

It starts the engine and, as a subreaper, adopts orphaned processes of the engine, whatever group or session they are
in. When the engine has ended, it kills the remaining processes, removes the engine's files and shared memory, records
the exit status, and exits with the same status. So Supervisor receives an exit only when nothing of that run is left,
and the next start finds the initial state. If a reaper itself was killed, the next one cleans up after it: all
processes of an engine carry a mark in their environment.
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

from appliance.runtime import inflight, processes
from appliance.supervisor.exit_status import ExitStatus, increments, read_counters, signal_name
from appliance.supervisor.shm_cleanup import FOLDER, SharedMemoryCleaner

MARK = "SLIPWAY_REAPER"
_CHECK_INTERVAL_S = 0.25  # interval between checks of /dev/shm
_KILL_TIMEOUT_S = 10.0  # for processes that SIGKILL does not end at once: a driver may have to free a lot of memory
_MAX_LISTED = 5
_SIGNALS = {
    *(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
}


class ReaperConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a reaper, written by the launcher."""

    program: str
    argv: tuple[str, ...]
    directory: str
    files: tuple[str, ...] = ()  # patterns, in `directory`, of files that the program may leave there
    memory: str = ""  # file in which the kernel counts out-of-memory kills
    shared: str = FOLDER

    @property
    def mark(self) -> str:
        """Return the value of MARK in the environment of the reaper and all its descendants."""
        return f"{self.directory}:{self.program}"

    @property
    def exit_status_path(self) -> Path:
        """Return the file with the last exit status, which exists until it has been read."""
        return Path(self.directory, f"{self.program}.exit")

    @property
    def inflight_path(self) -> Path:
        """Return the file with the requests that were open when the last run ended (inflight.py). The gateway often
        writes it before this process sees the exit, so it is deleted when the next run begins."""
        return inflight.inflight_path(Path(self.directory), self.program)

    @property
    def running_path(self) -> Path:
        """Return the file that exists while the reaper runs."""
        return Path(self.directory, f"{self.program}.running")


class Reaper:
    def __init__(self, config: ReaperConfig) -> None:
        self._config = config
        self._shared_memory = SharedMemoryCleaner(lambda: processes.descendants(os.getpid()), config.shared)
        self._killed: dict[int, str] = {}

    def run(self) -> int:
        """Run the program once. Return its wait status after everything that it left has been removed."""
        config = self._config
        processes.become_subreaper()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if config.running_path.exists():  # the previous reaper was killed
            self._kill_remaining()
        self._remove_files()
        config.inflight_path.unlink(missing_ok=True)
        config.exit_status_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # on a full disk; then nothing is cleaned up if this reaper is killed
            config.running_path.touch()
        counters, began_s = read_counters(Path(config.memory)), time.monotonic()
        self._pid = self._start({signal.Signals(number) for number in before})
        status, peak_bytes = self._wait()
        duration_s = time.monotonic() - began_s
        stuck = self._kill_remaining()
        removed = self._shared_memory.remove()
        self._remove_files()
        exit_status = ExitStatus(
            pid=self._pid,
            duration_s=round(duration_s, 3),
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0,
            signal=signal_name(status),
            core=os.WIFSIGNALED(status) and os.WCOREDUMP(status),
            peak_bytes=peak_bytes,
            memory=increments(counters, read_counters(Path(config.memory))),
            killed=_first_items(self._killed.values()),
            stuck=_first_items(processes.command(pid) for pid in stuck),
            removed=_first_items(removed),
        )
        self._write_exit_status(exit_status)
        config.running_path.unlink(missing_ok=True)
        return status

    def _write_exit_status(self, exit_status: ExitStatus) -> None:
        """Write the exit status atomically. If the disk is full, the program still ends with its own status."""
        # the gateway writes its file in the same folder at the same time
        new = self._config.exit_status_path.with_suffix(".exit-new")
        try:
            new.write_bytes(msgspec.json.encode(exit_status))
            new.rename(self._config.exit_status_path)
        except OSError as error:
            os.write(
                2, f"{self._config.exit_status_path}: {error.strerror}; the exit status is not recorded\n".encode()
            )

    def _start(self, mask: set[signal.Signals]) -> int:
        argv = self._config.argv
        pid = os.fork()
        if pid == 0:
            try:
                processes.exit_with_parent(signal.SIGKILL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.execvp(argv[0], argv)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        return pid

    def _wait(self) -> tuple[int, int]:
        """Wait until the program has ended and forward signals to it. Return its wait status and its largest resident
        memory in bytes."""
        while True:
            heard = signal.sigtimedwait(_SIGNALS, _CHECK_INTERVAL_S)
            if heard is not None and heard.si_signo != signal.SIGCHLD:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, heard.si_signo)
                continue
            ended = self._reap()
            if ended is not None:
                return ended
            self._shared_memory.scan()

    def _reap(self) -> tuple[int, int] | None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == self._pid:
                    return status, usage.ru_maxrss * 1024
                if pid == 0:
                    return None
        return None

    def _kill_remaining(self) -> list[int]:
        """Kill the remaining processes of the program: the descendants of this process, and those with its mark. Return
        the ids of those that could not be killed."""

        def remaining() -> list[int]:
            below = processes.descendants(os.getpid())
            return list(dict.fromkeys([*below, *processes.processes_with_variable(f"{MARK}={self._config.mark}")]))

        killed, stuck = processes.kill_all(remaining, _KILL_TIMEOUT_S)
        self._killed.update(killed)
        return stuck

    def _remove_files(self) -> None:
        directory = Path(self._config.directory)
        for path in [path for pattern in self._config.files for path in directory.glob(pattern)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _first_items(items: Iterable[str]) -> tuple[str, ...]:
    """Return the first items, and the number of omitted ones."""
    found = list(items)
    more = len(found) - _MAX_LISTED
    return (*found[:_MAX_LISTED], *([f"{more} more"] if more > 0 else []))


def take_exit_status(directory: Path, program: str) -> ExitStatus | None:
    """Read and delete the last exit status of a program. Return None if its reaper could not write one."""
    path = directory / f"{program}.exit"
    try:
        exit_status = msgspec.json.decode(path.read_bytes(), type=ExitStatus)
    except (OSError, msgspec.DecodeError):
        return None
    path.unlink(missing_ok=True)
    return exit_status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m appliance.supervisor.reaper", description="Subreaper of one engine."
    )
    parser.add_argument("file", type=Path, help="JSON file that the launcher wrote")
    processes.exit_like(Reaper(msgspec.json.decode(parser.parse_args().file.read_bytes(), type=ReaperConfig)).run())
