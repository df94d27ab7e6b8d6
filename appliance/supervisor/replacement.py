"""Replacement of engines, one after another, through Supervisor.

A program that Supervisor stops on request produces no exit event for the restart monitor, so no restart is counted.
"""

import asyncio
import xmlrpc.client
from pathlib import Path
from typing import Any, cast

import msgspec
from supervisor.xmlrpc import Faults, SupervisorTransport

from appliance.runtime.gateway_control import AwaitReplacement, BeginReplacement, send_message
from appliance.supervisor import monitor, supervise

REPLY_TIMEOUT_S = 10.0
_POLL_S = 0.05


class ReplacementFailed(Exception):
    """Raised if an engine could not be replaced. The message says which one, and why."""


class Supervisor:
    """Client of the supervisord of a run directory. Raises OSError and xmlrpc.client.Fault."""

    def __init__(self, directory: Path) -> None:
        config = msgspec.json.decode((directory / "monitor.json").read_bytes(), type=monitor.Config)
        transport = SupervisorTransport("slipway", config.password, f"unix://{config.supervisor}")
        self._rpc = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def stop(self, name: str) -> None:
        """Stop a program without waiting for its end. A program that is not running is not an error."""
        try:
            self._rpc.stopProcess(name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != Faults.NOT_RUNNING:
                raise

    def start(self, name: str) -> None:
        try:
            self._rpc.startProcess(name, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != Faults.ALREADY_STARTED:
                raise

    def state(self, name: str) -> str:
        return cast(str, cast(dict[str, Any], self._rpc.getProcessInfo(name))["statename"])


async def replace_engine(directory: Path, index: int, budget_s: float) -> float:
    """Stop an engine and wait until its replacement serves. Return the seconds in which this engine did not serve.
    Raise ReplacementFailed on failure."""
    loop = asyncio.get_running_loop()
    name, control = f"engine-{index}", str(directory / supervise.CONTROL)
    try:
        await send_message(control, BeginReplacement(index), REPLY_TIMEOUT_S)
        began = loop.time()
        supervisor = Supervisor(directory)
        full_name = f"engines:{name}"
        await asyncio.to_thread(supervisor.stop, full_name)
        # Each request wakes Supervisor, which otherwise looks for ended programs once a second.
        while await asyncio.to_thread(supervisor.state, full_name) in ("STOPPING", "RUNNING", "STARTING"):
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(supervisor.start, full_name)
        await send_message(control, AwaitReplacement(index), budget_s)
    except TimeoutError as error:
        raise ReplacementFailed(f"{name} is not ready after {budget_s:g} s (health.startup_budget)") from error
    except (OSError, xmlrpc.client.Error) as error:
        raise ReplacementFailed(f"{name} could not be replaced: {error}") from error
    return loop.time() - began
