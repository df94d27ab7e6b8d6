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
from appliance.lockfile.verify import LockVerifier
from appliance.planning.diff.config_snapshot import ConfigSnapshot
from appliance.planning.diff.messages import describe, refused, unswappable
from appliance.planning.diff.pending_changes import Step, step
from appliance.planning.validate import resolve, validate
from appliance.runtime.gateway_control import ApplyConfig, send_message
from appliance.supervisor import supervise
from appliance.supervisor.replacement import REPLY_TIMEOUT_S, ReplacementFailed, replace_engine
from appliance.supervisor.supervise import Service

PENDING = 3  # exit code: some changes need a restart
Report = Callable[[str], None]


class Reloader:
    """Applies a changed manifest. `running` is the configuration that is in effect; `service` and `directory` are the
    running service and its run directory."""

    def __init__(self, running: ConfigSnapshot, service: Service, directory: Path) -> None:
        self._running = running
        self._service = service
        self._directory = directory
        self._gateway = supervise.gateway_with_paths(service, directory)
        self._lock = asyncio.Lock()

    @property
    def manifest(self) -> Path:
        return self._running.given.manifest.absolute()

    async def reload(self, *, restart: bool, report: Report) -> int:
        """Reload the manifest; concurrent calls run one after another. Call `report` with each line of the result and
        return the exit code of `slipway reload`."""
        async with self._lock:
            try:
                return await self._reload(restart, report)
            except Refused as error:
                report(refused(error, self.manifest))
                return error.cause.number
            except (OSError, TimeoutError) as error:
                report(f"nothing was changed, because the gateway does not reply: {error or 'timeout'}")
                return exits.INTERNAL.number

    async def _reload(self, restart: bool, report: Report) -> int:
        wanted = await asyncio.to_thread(self._read, restart)
        assert wanted.plan is not None, "a configuration without a plan raises Refused"
        service = replace(self._service, gateway=wanted.plan.gateway, engines=wanted.plan.engines, job=wanted.plan.job)
        planned = replace(
            wanted, plan=replace(wanted.plan, gateway=supervise.gateway_with_paths(service, self._directory))
        )
        found = step(self._running, self._gateway, planned)
        if restart and found.cost in ("gateway", "service"):
            report(unswappable(found))
            return exits.MANIFEST.number
        if restart:
            found = found.whole(planned)
        answer = await send_message(self._gateway.control, ApplyConfig(found.gateway), REPLY_TIMEOUT_S)
        if answer.error:
            report(f"nothing was changed: {answer.error}")
            return exits.MANIFEST.number
        self._record(found)
        for line in describe(found, self.manifest, answer, restart=restart):
            report(line)
        if restart:
            return await self._replace_engines(service, report)
        return PENDING if found.waiting else exits.OK.number

    def _read(self, hash_contents: bool) -> ConfigSnapshot:
        """Return the current manifest, planned for the machine as it was before the engines allocated their memory."""
        given, now = self._running.given, self._running.plan
        settings, _ = resolve(given, now.machine if now else None)
        same = settings.manifest.hardware.device == self._running.settings.manifest.hardware.device
        plan = validate(given, now.machine if now and same else None, verify=LockVerifier(hash_contents=hash_contents))
        return ConfigSnapshot.of(given, plan)

    def _record(self, found: Step) -> None:
        """Record the configuration that the gateway has accepted, and write it for the next gateway that Supervisor
        starts."""
        self._running, self._gateway = found.running, found.gateway
        gateway_config.write_config(found.gateway, self._directory / supervise.GATEWAY)

    async def _replace_engines(self, service: Service, report: Report) -> int:
        self._service = replace(self._service, engines=service.engines, job=service.job)
        for program in supervise.engine_programs(self._service, self._directory):
            supervise.rewrite_script(self._directory, program, self._service.memory)
        for index in range(len(service.engines)):
            try:
                took_s = await replace_engine(self._directory, index, self._service.startup_s)
            except ReplacementFailed as error:
                report(f"{error}; Supervisor and the restart monitor continue to run it")
                return exits.ENGINE.number
            report(f"engine-{index} was replaced after {took_s:.1f} s")
        return exits.OK.number
