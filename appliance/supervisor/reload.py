"""Reload of the manifest in a running appliance: read it again, validate all of it, and apply what needs no restart.

Options, overlays and environment are those that `slipway serve` was started with. A manifest that is refused changes
nothing. Keys that affect only the gateway are applied together. Other changed keys are listed with the cost of their
restart; with `restart` the engines are replaced one by one, while the journal keeps their requests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from appliance.config import exits
from appliance.config import gateway as gateway_config
from appliance.config.problems import Refused
from appliance.lockfile.verify import Guard
from appliance.planning.diff.config_snapshot import Side
from appliance.planning.diff.messages import in_words, refused, unswappable
from appliance.planning.diff.pending_changes import Step, step
from appliance.planning.validate import prove, settle
from appliance.runtime.gateway_control import Take, ask
from appliance.supervisor import supervise
from appliance.supervisor.supervise import Service
from appliance.supervisor.swap import ASK_S, Unswapped, swap

WAITS = 3  # exit code: some changes need a restart
Say = Callable[[str], None]


class Reloader:
    """Applies a changed manifest. `running` is the configuration that is in effect; `service` and `directory` are the
    running service and its run directory."""

    def __init__(self, running: Side, service: Service, directory: Path) -> None:
        self._running = running
        self._service = service
        self._directory = directory
        self._gateway = supervise.told_gateway(service, directory)
        self._one = asyncio.Lock()

    @property
    def manifest(self) -> Path:
        return self._running.given.manifest.absolute()

    async def reload(self, *, restart: bool, say: Say) -> int:
        """Reload the manifest; concurrent calls run one after another. Report the result line by line through `say` and
        return the exit code of `slipway reload`."""
        async with self._one:
            try:
                return await self._reload(restart, say)
            except Refused as error:
                say(refused(error, self.manifest))
                return error.cause.number
            except (OSError, TimeoutError) as error:
                say(f"the gateway does not answer, so nothing is changed: {error or 'no reply in time'}")
                return exits.INTERNAL.number

    async def _reload(self, restart: bool, say: Say) -> int:
        wanted = await asyncio.to_thread(self._read, restart)
        assert wanted.plan is not None, "what cannot be planned is refused"
        service = replace(self._service, gateway=wanted.plan.gateway, engines=wanted.plan.engines, job=wanted.plan.job)
        planned = replace(wanted, plan=replace(wanted.plan, gateway=supervise.told_gateway(service, self._directory)))
        found = step(self._running, self._gateway, planned)
        if restart and found.cost in ("gateway", "service"):
            say(unswappable(found))
            return exits.MANIFEST.number
        if restart:
            found = found.whole(planned)
        answer = await ask(self._gateway.control, Take(found.gateway), ASK_S)
        if answer.error:
            say(f"nothing is changed: {answer.error}")
            return exits.MANIFEST.number
        self._taken(found)
        for line in in_words(found, self.manifest, answer, restart=restart):
            say(line)
        if restart:
            return await self._swap(service, say)
        return WAITS if found.waiting else exits.OK.number

    def _read(self, hashed: bool) -> Side:
        """Return the current manifest, planned for the machine as it was before the engines allocated their memory."""
        given, now = self._running.given, self._running.plan
        settings, _ = settle(given, now.machine if now else None)
        same = settings.manifest.hardware.device == self._running.settings.manifest.hardware.device
        plan = prove(given, now.machine if now and same else None, verify=Guard(hashed=hashed))
        return Side.of(given, plan)

    def _taken(self, found: Step) -> None:
        """Record the configuration that the gateway has accepted, and write it for the next gateway that Supervisor
        starts."""
        self._running, self._gateway = found.running, found.gateway
        gateway_config.write_config(found.gateway, self._directory / supervise.GATEWAY)

    async def _swap(self, service: Service, say: Say) -> int:
        self._service = replace(self._service, engines=service.engines, job=service.job)
        for program in supervise.engine_programs(self._service, self._directory):
            supervise.rewrite_script(self._directory, program, self._service.memory)
        for index in range(len(service.engines)):
            try:
                took_s = await swap(self._directory, index, self._service.startup_s)
            except Unswapped as error:
                say(f"{error}; Supervisor and the sentinel go on with it")
                return exits.ENGINE.number
            say(f"engine-{index} is swapped after {took_s:.1f} s")
        return exits.OK.number
