"""Counters of the scheduler since its start, for Stats."""

from dataclasses import dataclass, field

from engine.core.plan import MediaCounts
from engine.kv.cache import Hit


@dataclass(slots=True)
class Counters:
    """Counters in tokens, except `preemptions` and those of media. A prompt is counted once, when it is first scheduled."""

    prompt_tokens: int = 0  # cached and computed tokens
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    """Cached tokens that were computed nevertheless. A prompt that is completely cached needs logits, which takes one
    token, or up to a block if its last block is in use."""
    prefix_queries: int = 0  # prompt tokens looked up in the cache
    prefix_hits: int = 0  # prompt tokens found in it
    preemptions: int = 0
    drafts: int = 0  # rows with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that were accepted
    accepted_at: list[int] = field(default_factory=list)  # accepted tokens by position in their draft
    steps: list[int] = field(default_factory=list)  # sizes of the steps since the last report
    media_encoded: int = 0
    media_cached: int = 0
    media_seconds: float = 0.0

    def media(self, counts: MediaCounts) -> None:
        self.media_encoded += counts.encoded
        self.media_cached += counts.cached
        self.media_seconds += counts.seconds

    def draft(self, drafted: int, accepted: int) -> None:
        """Count a verified draft."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def prompt(self, tokens: int, hit: Hit, *, looked: bool) -> None:
        """Count a prompt that is scheduled for the first time. `looked`: it was looked up in the cache."""
        cached = min(hit.tokens, tokens)
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.recomputed_tokens += min(hit.cached, tokens) - cached
        if looked:
            self.prefix_queries += tokens
            self.prefix_hits += cached
