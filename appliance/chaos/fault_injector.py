"""Fault injector: the target, observations of the fault, and disturbances that can be rolled back."""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from appliance.chaos.rollback import (
    RemoveCgroup,
    RemoveThrottle,
    RestoreFile,
    RestoreFileLimit,
    ResumeProcess,
    Rollback,
    Step,
)
from appliance.chaos.target import Target
from appliance.runtime.gateway_control import ThrottleJournal, send_message
from appliance.supervisor import programs
from appliance.supervisor.control_protocol import SOCKET, ReloadOutput, ReloadRequest
from appliance.supervisor.supervise import CONTROL

REPLY_TIMEOUT_S = 5.0
POLL_S = 0.02
ORIGINAL_NAME = ".{name}.before-chaos"


class FaultNotInjected(Exception):
    """Raised if the fault could not be injected. The message gives the reason; no part of the fault is left."""


@dataclass
class FaultInjector:
    """Context of one fault."""

    target: Target
    client: httpx.AsyncClient
    rollback: Rollback
    rng: random.Random
    duration_s: float
    observations: dict[str, str] = field(
        default_factory=dict
    )  # observations of the fault itself, compared with the promise
    exit_stack: AsyncExitStack = field(default_factory=AsyncExitStack)  # closed when the fault ends

    def register(self, step: Step) -> None:
        self.rollback.register(step)

    def pid(self, program: str) -> int:
        """Return the process ID of a program. Raise FaultNotInjected without one."""
        pid = self.target.pid(program)
        if not pid:
            raise FaultNotInjected(f"{program} is not running")
        return pid

    def signal(self, program: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(program), number)

    def stop_process(self, program: str) -> None:
        """Stop a process, so that it hangs and ignores all signals except SIGKILL."""
        pid = self.pid(program)
        self.register(ResumeProcess(pid, programs.start_ticks(pid)))
        os.kill(pid, signal.SIGSTOP)

    def block_writes(self, *names: str) -> None:
        """Make every file write of these processes fail.

        The kernel rejects them like on a full disk, but with EFBIG.
        """
        for name in names:
            for pid in self.target.pids(name) if name != "launcher" else [self.target.address.pid]:
                with contextlib.suppress(ProcessLookupError):
                    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                    self.register(RestoreFileLimit(pid, programs.start_ticks(pid), soft))
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    async def throttle_journal(self, pause_s: float, for_s: float) -> None:
        control = str(self.target.directory / CONTROL)
        self.register(RemoveThrottle(control))
        answer = await send_message(control, ThrottleJournal(pause_s, for_s), REPLY_TIMEOUT_S)
        if answer.error:
            raise FaultNotInjected(answer.error)

    def replace_file(self, path: Path, change: Callable[[Path], None]) -> None:
        """Replace a file by a modified copy.

        The file itself is never written, so a process that has it open keeps its content.
        """
        original = path.with_name(ORIGINAL_NAME.format(name=path.name))
        new = path.with_name(f".{path.name}.chaos")
        try:
            shutil.copyfile(path, new)
            shutil.copymode(path, new)
            change(new)
            self.register(RestoreFile(str(path), str(original)))
            os.link(path, original, follow_symlinks=False)
            os.replace(new, path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise FaultNotInjected(f"{path}: {error.strerror}") from error

    def move_to_cgroup(self, pid: int, folder: Path) -> None:
        self.register(RemoveCgroup(str(folder)))
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))

    async def reload(self, *, restart: bool) -> tuple[int, str]:
        """Run `slipway reload` and return its exit code and output."""
        reader, writer = await asyncio.open_unix_connection(self.target.directory / SOCKET)
        lines: list[str] = []
        try:
            writer.write(msgspec.json.encode(ReloadRequest(restart)) + b"\n")
            while line := await reader.readline():
                output = msgspec.json.decode(line, type=ReloadOutput)
                if output.exit is not None:
                    return output.exit, "\n".join(lines)
                lines.append(output.text)
        finally:
            writer.close()
        raise FaultNotInjected("the launcher exited")
