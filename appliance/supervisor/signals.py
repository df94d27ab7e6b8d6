"""Signal handling of the launcher from its start. This module imports nothing heavy: `appliance.cli.entry` installs the
handlers before anything else is imported.

Process 1 of a container receives only signals that it handles or blocks; the kernel drops the others. `entrypoint.sh`
therefore starts `slipway` with the stop signals blocked, and they are delivered once handlers are installed.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_STRAY = ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGSTKFLT")


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop the launcher, without SIGHUP under nohup, which ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP if number is not signal.SIGHUP or not ignored)


def stray_signals() -> tuple[int, ...]:
    """Return the signals that have no meaning for the launcher and would end a process that does not handle them."""
    named = (number for name in _STRAY if (number := getattr(signal, name, None)) is not None)
    return (*named, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1))


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal without a name
        return f"signal {number}"


def exit_at_once(code: int | None) -> None:
    """Let stop signals end this process at once, with `code`, or with 128 plus the signal's number if `code` is None.
    Used while nothing has been started; downloads and the launcher install their own handlers."""

    def exit_process(number: int, frame: FrameType | None) -> None:
        os.write(2, f"slipway: {name_of(number)} received before the service was started; exiting\n".encode())
        os._exit(128 + number if code is None else code)

    for number in stop_signals():
        signal.signal(number, exit_process)
    for stray in stray_signals():
        signal.signal(stray, _ignore)
    unblock()


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


@contextlib.contextmanager
def stop_signals_pending() -> Iterator[None]:
    """Keep stop signals pending in code that must not be interrupted until other handlers are installed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        unblock()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. SIG_IGN would be inherited by every program; a handler is not."""
