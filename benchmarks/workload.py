"""Requests of offline runs, as token ids: seeded, and the same for every engine that is measured with them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from appliance.bench.workload import Lengths

CHAT_PROMPT, CHAT_REPLY = Lengths(110, 1.2, 1024), Lengths(140, 0.9, 1024)
TEXT = Lengths(110, 1.2, 512)


@dataclass(frozen=True)
class Request:
    """`tokens` are generated exactly; end tokens are ignored."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float = 1.0


def chat(count: int, vocab: int, seed: int = 0) -> list[Request]:
    """Draw lognormal lengths similar to ShareGPT conversations.

    Prompts: median 110, sigma 1.2, mean about 200. Replies: median 140, sigma 0.9, mean about 205. Both are limited to
    1,024 tokens.
    """
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        into, out = CHAT_PROMPT.draw(rng), CHAT_REPLY.draw(rng)
        made.append(Request(tuple(rng.randrange(vocab) for _ in range(into)), out))
    return made


def uniform(count: int, vocab: int, seed: int = 0) -> list[Request]:
    """The mix of nano-vllm's bench.py: 100 to 1,024 tokens in and out, ids below 10,000, temperature 0.6, drawn in the
    same order from the same generator. 256 of them give 142,827 tokens and want 133,966."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randint(0, 10000) % vocab for _ in range(rng.randint(100, 1024))) for _ in range(count)]
    return [Request(prompt, rng.randint(100, 1024), 0.6) for prompt in prompts]


MIXES: dict[str, Callable[[int, int], list[Request]]] = {"chat": chat, "uniform": uniform}


def texts(count: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Draw prompts for pooling with the lengths of the chat mix, limited to the 512 tokens that most encoders read."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab) for _ in range(TEXT.draw(rng))) for _ in range(count)]


def same(count: int, length: int, tokens: int, vocab: int) -> list[Request]:
    """Build `count` requests of one length with different first tokens."""
    prompts = (tuple((7919 * (row * length + at) + 13) % vocab for at in range(length)) for row in range(count))
    return [Request(prompt, tokens) for prompt in prompts]
