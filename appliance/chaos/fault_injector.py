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

from appliance.chaos.rollback import Confined, Continued, Hampered, Limited, Replaced, Step, Undo
from appliance.chaos.target import Target
from appliance.runtime.gateway_control import Hamper, ask
from appliance.supervisor import programs
from appliance.supervisor.control_protocol import SOCKET, Line, Order
from appliance.supervisor.supervise import CONTROL

ASK_S = 5.0
POLL_S = 0.02
KEPT = ".{name}.before-chaos"


class NotMade(Exception):
    """Raised if the fault could not be made. The message gives the reason; no part of the fault is left."""


@dataclass
class Stage:
    """Context of one fault."""

    target: Target
    client: httpx.AsyncClient
    undo: Undo
    rng: random.Random
    duration_s: float
    seen: dict[str, str] = field(default_factory=dict)  # observations of the fault itself, compared with the promise
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)  # closed when the fault ends

    def will(self, step: Step) -> None:
        self.undo.will(step)

    def pid(self, program: str) -> int:
        """Return the process ID of a program. Raise NotMade without one."""
        pid = self.target.pid(program)
        if not pid:
            raise NotMade(f"{program} has no process at the moment")
        return pid

    def signal(self, program: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(program), number)

    def stop_process(self, program: str) -> None:
        """Stop a process, so that it hangs and ignores all signals except SIGKILL."""
        pid = self.pid(program)
        self.will(Continued(pid, programs.began(pid)))
        os.kill(pid, signal.SIGSTOP)

    def forbid_writing(self, *names: str) -> None:
        """Make every file write of these processes fail.

        The kernel rejects them like on a full disk, but with EFBIG.
        """
        for name in names:
            for pid in self.target.pids(name) if name != "launcher" else [self.target.address.pid]:
                with contextlib.suppress(ProcessLookupError):
                    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                    self.will(Limited(pid, programs.began(pid), soft))
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    async def hamper(self, pause_s: float, for_s: float) -> None:
        control = str(self.target.directory / CONTROL)
        self.will(Hampered(control))
        answer = await ask(control, Hamper(pause_s, for_s), ASK_S)
        if answer.error:
            raise NotMade(answer.error)

    def replace(self, path: Path, change: Callable[[Path], None]) -> None:
        """Replace a file by a modified copy.

        The file itself is never written, so a process that has it open keeps its content.
        """
        kept = path.with_name(KEPT.format(name=path.name))
        new = path.with_name(f".{path.name}.chaos")
        try:
            shutil.copyfile(path, new)
            shutil.copymode(path, new)
            change(new)
            self.will(Replaced(str(path), str(kept)))
            os.link(path, kept, follow_symlinks=False)
            os.replace(new, path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise NotMade(f"{path}: {error.strerror}") from error

    def confine(self, pid: int, folder: Path) -> None:
        self.will(Confined(str(folder)))
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))

    async def reload(self, *, restart: bool) -> tuple[int, str]:
        """Run `slipway reload` and return its exit code and output."""
        reader, writer = await asyncio.open_unix_connection(self.target.directory / SOCKET)
        said: list[str] = []
        try:
            writer.write(msgspec.json.encode(Order(restart)) + b"\n")
            while line := await reader.readline():
                told = msgspec.json.decode(line, type=Line)
                if told.exit is not None:
                    return told.exit, "\n".join(said)
                said.append(told.text)
        finally:
            writer.close()
        raise NotMade("the launcher ended")
