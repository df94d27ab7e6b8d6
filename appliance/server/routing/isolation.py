"""Tests of requests that crash engines, run on the router's engines. See quarantine.py for the rules."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from appliance.observability.metrics import now
from appliance.runtime.crash_exemption import CrashKind
from appliance.server.routing.engine import Engine
from appliance.server.routing.generation import Generation
from appliance.server.routing.quarantine import Quarantine
from appliance.server.routing.refused import RefusedContents
from appliance.server.routing.timeline import Tested
from engine.api.errors import EngineError, RequestError
from engine.api.messages import Sampling, Submit

log = logging.getLogger(__name__)

CONTROL_TOKENS = 16


class Isolation:
    """Runs quarantine tests on the engines.

    `queued` maps keys to requests without an engine. `note(program, crashes, kind)` informs the restart monitor which
    crashes to count. `release` places queued requests on engines. `begins` are the first decoder tokens of an
    encoder-decoder model.
    """

    def __init__(
        self,
        engines: Sequence[Engine[Generation]],
        queued: Mapping[str, Generation],
        *,
        note: Callable[[str, int, CrashKind], None],
        release: Callable[[], None],
        decoder_start_ids: tuple[int, ...],
    ) -> None:
        self.quarantine = Quarantine()
        self.refused = RefusedContents()
        self._engines = engines
        self._queued = queued
        self._note = note
        self._release = release
        self._decoder_start_ids = decoder_start_ids
        self._engine: Engine[Generation] | None = None  # runs the test group
        self._expected = ""  # program name of that engine, after the monitor was informed of the test
        self._control: asyncio.Task[None] | None = None
        self._numbers = itertools.count()

    async def close(self) -> None:
        control = self._control
        if control is not None:
            control.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await control

    def is_candidate(self, key: str) -> bool:
        return self.quarantine.is_candidate(key)

    def engine_for(self, key: str) -> Engine[Generation] | None:
        """Return the engine on which a candidate can run now, or None."""
        engine = self._engine
        if engine is None or not engine.serves or self._control is not None:
            return None
        return engine if self.quarantine.is_tested(key) else None

    def start_next(self, hold_s: float) -> None:
        """Start the next test if none runs.

        A test waits for an engine that comes back within `hold_s` rather than sharing an engine with other requests.
        """
        self._free_engines()
        serving = sorted((each for each in self._engines if each.serves), key=lambda each: len(each.open))
        if not self.quarantine.on or not serving:
            return
        if serving[0].open and any(each.returns_within(hold_s) for each in self._engines):
            return
        for engine in serving:
            available = [key for key, each in self._queued.items() if each.where.allows(engine.index)]
            group = self.quarantine.next_group(available, idle=not engine.open)
            if group is None:
                continue
            self._engine = engine
            for key in group.keys:
                self._queued[key].record(Tested(group.alone))
            log.warning(
                "running %d of %d requests as an isolation test, because engines crashed while computing them",
                len(group.keys),
                len(available),
            )
            if group.alone:
                engine.reserved = True
                self._control = asyncio.create_task(self._run_control(engine, group.control_s))
            else:
                self._expect(engine)
            return

    def crashed(self, engine: Engine[Generation], generations: Sequence[Generation]) -> str:
        """Account for a crash. Return the key of the request that is isolated, or ""."""
        program = f"engine-{engine.label}"
        engine.reserved = False
        result = self.quarantine.crashed(program, [each.in_flight for each in generations])
        if result.exempt and program == self._expected:
            self._expected = ""
        for each in result.attributed:
            self._note(each, 1, "attributed")
        self._settle()
        return result.isolated

    def gained(self, key: str, tokens: int) -> None:
        if self.quarantine.gained(key, tokens):
            self._test_over()

    def ended(self, key: str) -> None:
        if self.quarantine.ended(key):
            self._test_over()
        else:
            self._settle()

    def _test_over(self) -> None:
        self._cancel()
        self._settle()
        self._free_engines()  # also if no request is queued: the next one would wait forever
        self._release()

    def _free_engines(self) -> None:
        """Let the engines take other requests, unless a request is tested alone."""
        if not self.quarantine.alone:
            for engine in self._engines:
                engine.reserved = False

    def _expect(self, engine: Engine[Generation]) -> None:
        self._cancel()
        self._expected = f"engine-{engine.label}"
        self._note(self._expected, 1, "expected")

    def _cancel(self) -> None:
        if self._expected:
            self._note(self._expected, 1, "cancelled")
            self._expected = ""

    def _settle(self) -> None:
        settlement = self.quarantine.settle()
        if settlement is None:
            return
        for program in settlement.restored:
            self._note(program, 1, "restored")
        for program in settlement.attributed:
            self._note(program, 1, "attributed")

    async def _run_control(self, engine: Engine[Generation], seconds: float) -> None:
        """Run a control: compute tokens that no client asked for.

        If the engine runs for `seconds`, a later crash can be attributed to the request that is tested next.
        """
        until = now() + seconds
        try:
            await self._one_control(engine, until)
            while now() < until:
                await self._one_control(engine, until)
        except EngineError:
            self._control = None
            engine.reserved = False
            if self.quarantine.alone:
                self.quarantine.withdraw()
        else:
            self._control = None
            if self.quarantine.alone:
                self._expect(engine)
        self._release()

    async def _one_control(self, engine: Engine[Generation], until: float) -> None:
        prompt = (0, *self._decoder_start_ids)
        source = 1 if self._decoder_start_ids else 0
        name = f"control#{next(self._numbers)}"
        sampling = Sampling(temperature=0)
        submit = Submit(name, prompt, sampling, max_tokens=CONTROL_TOKENS, source=source, ignore_eos=True)
        stream = engine.client.generate(submit)
        try:
            async for _ in stream:
                if now() >= until:
                    break
        except RequestError:  # a model without sampling: the engine has responded, which is enough
            await asyncio.sleep(max(0.0, until - now()))
        finally:
            await stream.aclose()
