"""What the scheduler counts since its start, for Stats."""

from dataclasses import dataclass, field

from engine.kv.cache import Hit


@dataclass(slots=True)
class Counters:
    """All in tokens, save `preemptions`. A prompt counts once, at its first scheduling: `prompt_tokens` = cached ones +
    computed ones. `recomputed_tokens` are those of the computed ones that lay in the cache: of a prompt that is cached
    as a whole, what is computed to have logits (one token, or up to a block where the last block is in use).
    `prefix_queries` are the prompt tokens that were looked for in the cache, `prefix_hits` those it gave.
    `steps` are the sizes of the steps since they were last reported."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: list[int] = field(default_factory=list)

    def prompt(self, tokens: int, hit: Hit, *, looked: bool) -> None:
        """A prompt runs for the first time. `looked`: the cache was asked."""
        cached = min(hit.tokens, tokens)
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.recomputed_tokens += min(hit.cached, tokens) - cached
        if looked:
            self.prefix_queries += tokens
            self.prefix_hits += cached
