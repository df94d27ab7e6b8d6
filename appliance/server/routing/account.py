"""Accounting of a sequence: metrics, timeline, drain rate, latencies, and the tokens of its API key."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from appliance.observability.log import MediaLoad
from appliance.observability.metrics import Metrics, now
from appliance.observability.spans import RequestSpan, SequenceTimes, SpanEvent, Value
from appliance.observability.usage import Tokens
from appliance.server.routing.admission import DrainRate, LatencyEstimate
from appliance.server.routing.placement import ANYWHERE, Placement
from appliance.server.routing.timeline import (
    Arrived,
    Finished,
    FirstToken,
    Interrupted,
    MediaLoaded,
    Pending,
    Placed,
    Tested,
    TimelineEvent,
    Timelines,
)
from engine.api.messages import Delta, Finish, Submit, Timing
from engine.metrics.sequence import SequenceMetrics


@dataclass(frozen=True)
class EarlierOutput:
    """Output of a resumed sequence so far, from engines of this gateway or of an earlier gateway process."""

    emitted: tuple[int, ...] = ()
    timing: Timing | None = None


@dataclass(frozen=True)
class Counters:
    """Counters that all sequences of a router share."""

    metrics: Metrics
    timelines: Timelines
    drain: DrainRate
    latency: LatencyEstimate
    spend: Callable[[str, int], None]
    """Called with (owner, tokens) when tokens were computed for an owner."""
    used: Callable[[Submit, Tokens], None]
    """Called with a sequence that has ended and its tokens."""


def media_event(load: MediaLoad) -> MediaLoaded:
    """Return the event for the loading of media."""
    fetch_s, process_s = max(load.stages, key=sum)
    cached = sum(not process_s for _, process_s in load.stages)
    return MediaLoaded(len(load.stages), cached, round(1000 * fetch_s, 1), round(1000 * process_s, 1))


class Account:
    """Counts one sequence.

    Calls nothing but the shared counters.
    """

    def __init__(
        self,
        counters: Counters,
        submit: Submit,
        key: str,
        earlier: EarlierOutput | None,
        where: Placement = ANYWHERE,
    ) -> None:
        self.emitted: list[int] = [] if earlier is None else list(earlier.emitted)
        self.timing: Timing | None = None if earlier is None else earlier.timing
        self.started = False
        self._counters = counters
        self._submit = submit
        self._key = key
        self._earlier_timing = self.timing  # timing of the engines before this one
        self._is_resumed = bool(self.emitted)  # so its prompt was already counted
        self._uncounted = 0 if self._is_resumed else len(submit.prompt)  # prompt tokens that no step has counted yet
        span = self._span = where.span
        self._media = where.media
        self._span_events: list[SpanEvent] = []
        self._num_earlier = len(self.emitted)
        trace = None if span is None else (span.trace_id, span.span_id)
        self._metrics = SequenceMetrics(counters.metrics, now(), trace)

    @property
    def label(self) -> str:
        return self._metrics.label

    def arrive(self, num_open: int) -> None:
        """Count the sequence as queued, while `num_open` other sequences run."""
        self._counters.drain.enter(now())
        self._counters.timelines.begin(self._key)
        if self._media is not None and self._media.stages:
            self._counters.timelines.add(self._key, self._media.start_s, media_event(self._media))
        self.record(Arrived(len(self._submit.prompt), len(self.emitted), num_open, self._submit.adapter))

    def record(self, event: TimelineEvent) -> None:
        self._counters.timelines.add(self._key, now(), event)
        if self._span is not None and type(event) in SPAN_EVENTS:
            self._span_events.append(SpanEvent(now(), SPAN_EVENTS[type(event)], _event_attributes(event)))

    def place(self, label: str, tokens: int) -> None:
        """Record the engine that computes the sequence after `tokens` tokens."""
        self._metrics.label = label
        self.record(Placed(label, tokens))

    def resume(self, pause_s: float) -> None:
        """Record that the sequence continues after `pause_s` seconds without an engine."""
        self._metrics.observe("interruption_seconds", pause_s)

    def interrupt(self) -> None:
        """Keep the times of the engine that is gone."""
        self._earlier_timing = self.timing

    def count_step(self, tokens: int) -> int:
        """Return how many tokens a step counts: those that it sampled, and the whole prompt with the first of them."""
        uncounted, self._uncounted = self._uncounted, 0
        return tokens + uncounted

    def take(self, delta: Delta) -> None:
        """Count a delta that the route reads now."""
        moment = now()
        if delta.timing is not None:
            self.timing = _joined(self._earlier_timing, delta.timing)
        if not self.started:
            self._start(moment)
        if delta.ids:
            self._gain(delta.ids, moment)
        if delta.pooled is not None:
            self._metrics.pooled(moment)

    def _start(self, moment: float) -> None:
        self.started = True
        prompt = len(self._submit.prompt)
        self._counters.drain.start(moment, prompt)
        if not self._is_resumed:
            cached = self.timing.cached_tokens if self.timing else 0
            self._metrics.prompt(prompt, cached)
            self._counters.spend(self._submit.owner, prompt - cached)

    def _gain(self, ids: tuple[int, ...], moment: float) -> None:
        if self._submit.owner:
            self._counters.spend(self._submit.owner, len(ids))
        if not self.emitted:
            self.record(FirstToken())
        self._metrics.gain(len(ids), moment, is_first=not self.emitted)
        self.emitted += ids

    def end(self, reason: Finish) -> None:
        """Record the end of the sequence in this process."""
        counters = self._counters
        if not self.started:
            counters.drain.leave(now())
        if self.timing is not None:
            counters.latency.record(len(self._submit.prompt), self.timing, len(self.emitted))
        self.record(Finished(reason, len(self.emitted)))
        if self._span is not None:
            self._trace(self._span, reason)

    def _trace(self, span: RequestSpan, reason: Finish) -> None:
        """Export the spans of the sequence."""
        timing, submit = self.timing or Timing(), self._submit
        _trace_request(span, submit)
        # Times of an earlier gateway process precede this request.
        scheduled = max(timing.scheduled, self._metrics.arrived_s) if timing.scheduled else 0.0
        first = max(timing.first_token, scheduled) if timing.first_token else 0.0
        sequence: dict[str, Value] = {"slipway.sequence.id": submit.id, "slipway.engine": self.label}
        phases: dict[str, dict[str, Value]] = {
            "queue": {**sequence, "slipway.priority": submit.priority},
            "prefill": {
                **sequence,
                "gen_ai.usage.input_tokens": len(submit.prompt),
                "gen_ai.usage.cache_read.input_tokens": timing.cached_tokens,
            },
            "decode": {
                **sequence,
                "gen_ai.usage.output_tokens": len(self.emitted) - self._num_earlier,
                "gen_ai.response.finish_reasons": [reason],
                "slipway.preemptions": timing.preemptions,
            },
        }
        error = reason if reason in ("error", "deadline") else ""
        times = SequenceTimes(self._metrics.arrived_s, scheduled, first, timing.last_token or now())
        span.add_sequence(times, phases, self._span_events, error)

    def count_end(self, reason: Finish) -> None:
        """Count a sequence that no other one will resume."""
        submit = self._submit
        if self.started:
            cached = self.timing.cached_tokens if self.timing else 0
            self._counters.used(submit, Tokens(len(submit.prompt), cached, len(self.emitted)))
        self._metrics.end(reason, len(self.emitted), submit.max_tokens, adapter=submit.adapter, timing=self.timing)


SPAN_EVENTS: dict[type, str] = {
    Pending: "slipway.engine.wait",
    Placed: "slipway.engine.assigned",
    Interrupted: "slipway.engine.lost",
    Tested: "slipway.quarantine.test",
}
"""Names of timeline events in spans. The others are the bounds of spans."""


def _event_attributes(event: TimelineEvent) -> dict[str, Value]:
    match event:
        case Placed():
            return {"slipway.engine": event.engine, "slipway.tokens": event.emitted}
        case Interrupted():
            return {"slipway.engine": event.engine, "slipway.reason": event.why, "slipway.tokens": event.emitted}
    return {}


def _trace_request(span: RequestSpan, submit: Submit) -> None:
    """Record the parameters that the sequences of a request share."""
    if submit.pooling is not None:
        return
    sampling = submit.sampling
    span.update(
        {
            "gen_ai.request.max_tokens": submit.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
            "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
        }
    )


def _joined(before: Timing | None, after: Timing) -> Timing:
    """Return the times over all engines, which share the machine's monotonic clock.

    Arrival, first token and cached tokens come from the first engine that reported them, the end from the last.
    """
    if before is None or not before.first_token:
        return after
    return msgspec.structs.replace(
        before,
        last_token=after.last_token,
        preemptions=before.preemptions + after.preemptions,
        accepted_tokens=before.accepted_tokens + after.accepted_tokens,
        rejected_tokens=before.rejected_tokens + after.rejected_tokens,
    )
