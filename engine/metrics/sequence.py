"""Metrics of one sequence: its tokens, and its times on the clock of the process that reads them."""

from engine.api.messages import Finish, Timing
from engine.metrics.store import MetricStore, TraceIds


class SequenceMetrics:
    """Records one sequence in a store. `label` is the sequence's current or last engine."""

    def __init__(self, store: MetricStore, arrived_s: float, trace: TraceIds | None = None) -> None:
        self.label = "0"
        self.arrived_s = arrived_s
        self._store, self._trace = store, trace
        self._last_s = self._first_s = arrived_s
        self._is_pooled = False  # it has its pooled vector instead of tokens

    def observe(self, name: str, seconds: float, times: int = 1) -> None:
        self._store.observe(name, seconds, self.label, times=times, trace=self._trace)

    def prompt(self, tokens: int, cached: int) -> None:
        """Record the prompt once its first token is known."""
        self._store.prompt(self.label, tokens, cached)

    def gain(self, count: int, moment: float, *, is_first: bool) -> None:
        """Record `count` new tokens."""
        self._store.add("generation_tokens", count, self.label)
        pauses, share_s = count, 0.0
        if is_first:
            pauses, self._first_s = count - 1, moment
            self.observe("time_to_first_token_seconds", moment - self.arrived_s)
        else:
            # Deltas that were merged for a slow client share the pause among their tokens.
            share_s = (moment - self._last_s) / count
        if pauses:
            self.observe("inter_token_latency_seconds", share_s, times=pauses)
        self._last_s = moment

    def pooled(self, moment: float) -> None:
        """Record the vectors of a pooled prompt."""
        self._is_pooled, self._last_s = True, moment

    def end(
        self, reason: Finish, emitted: int, max_tokens: int, *, adapter: str = "", timing: Timing | None = None
    ) -> None:
        """Record the end of the sequence, with `emitted` tokens."""
        self._store.finished(self.label, reason, emitted, max_tokens, adapter)
        if reason != "error" and (emitted or self._is_pooled):
            self._observe_times(emitted, timing)

    def _observe_times(self, emitted: int, timing: Timing | None) -> None:
        self.observe("request_duration_seconds", self._last_s - self.arrived_s)
        decode_s = self._last_s - self._first_s if emitted else 0.0
        if timing is not None and timing.first_token:
            # A reply that was cut at a stop string has no last delta from the engine, so use this process's clock.
            decode_s = (timing.last_token - timing.first_token) or decode_s
            prefill_s = timing.first_token - timing.scheduled
            self.observe("request_queue_time_seconds", timing.scheduled - timing.arrived)
            self.observe("request_prefill_time_seconds", prefill_s)
            self.observe("request_inference_time_seconds", prefill_s + decode_s)
            if emitted:
                self.observe("request_decode_time_seconds", decode_s)
            self.observe("request_preemptions", timing.preemptions)
        if emitted > 1:
            self.observe("request_time_per_output_token_seconds", decode_s / (emitted - 1))
