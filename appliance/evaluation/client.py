"""Requests to an OpenAI-compatible endpoint: generated answers, and log probabilities of given texts.

Log probabilities of a prompt have two forms: `echo` with `logprobs` (OpenAI completions), or `prompt_logprobs` (vLLM,
for each token a map of ids with `logprob` and `decoded_token`). `find_scorer` tries them in this order.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from appliance.bench.client import PATHS
from appliance.bench.run import EndpointError

ATTEMPTS = 4
BACKOFF_S = 0.5  # before the second attempt, doubled for each further one
_BUSY = (408, 429, 502, 503, 504)
_PROBE = "The capital of France is Paris."


class RequestError(Exception):
    """Raised if a request failed. The message has the status or the cause."""


@dataclass(frozen=True)
class Endpoint:
    client: httpx.AsyncClient
    model: str
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to each body."""


@dataclass(frozen=True)
class Reply:
    text: str
    finish: str
    prompt_tokens: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True)
class Token:
    text: str
    logprob: float | None
    """In nats. The first token of a prompt has None, because it has no context."""


async def post(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request and return the reply. A busy or unreachable server is tried again. Raises RequestError."""
    wanted = {"model": endpoint.model, "temperature": 0.0, "seed": endpoint.seed, **body, **endpoint.extra}
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            reply = await endpoint.client.post(path, json=wanted)
        except httpx.TimeoutException as error:  # another attempt would take as long
            raise RequestError(f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code == 200:
            try:
                value = reply.json()
            except ValueError as error:
                raise RequestError(f"not JSON: {reply.text[:200]}") from error
            if not isinstance(value, dict):
                raise RequestError(f"not a JSON object: {reply.text[:200]}")
            return value
        problem = f"HTTP {reply.status_code}: {reply.text[:200]}"
        if reply.status_code not in _BUSY:
            break
    raise RequestError(problem)


async def generate(endpoint: Endpoint, api: str, body: Mapping[str, Any]) -> Reply:
    """Return the generated answer, without reasoning. Raises RequestError."""
    start_s = time.perf_counter()
    value = await post(endpoint, PATHS[api], body)
    try:
        (choice, *_), usage = value["choices"], value.get("usage") or {}
        text = choice["message"].get("content") if api == "chat" else choice["text"]
        return Reply(
            text or "",
            choice.get("finish_reason") or "",
            usage.get("prompt_tokens") or 0,
            usage.get("completion_tokens") or 0,
            time.perf_counter() - start_s,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"not an OpenAI reply: {type(error).__name__}: {error}") from error


def _echoed(choice: Mapping[str, Any]) -> list[Token]:
    found = choice["logprobs"]
    return [Token(text, value) for text, value in zip(found["tokens"], found["token_logprobs"], strict=True)]


def _prompted(choice: Mapping[str, Any]) -> list[Token]:
    """Return the tokens of `prompt_logprobs: 0`: one for each place. The server leaves out text and value of the
    first one."""
    tokens = []
    for place in choice["prompt_logprobs"]:
        if place is None:
            tokens.append(Token("", None))
        else:
            (found,) = place.values()
            tokens.append(Token(found["decoded_token"], found["logprob"]))
    return tokens


@dataclass(frozen=True)
class Scorer:
    """One of the two forms of prompt log probabilities."""

    name: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], list[Token]]


SCORERS = (
    Scorer("echo", {"echo": True, "logprobs": 0, "max_tokens": 0}, _echoed),
    Scorer("prompt_logprobs", {"prompt_logprobs": 0, "max_tokens": 1}, _prompted),
)


async def score(endpoint: Endpoint, scorer: Scorer, texts: Sequence[str]) -> list[list[Token]]:
    """Return the tokens of each text. Each text is a request of its own. Raises RequestError."""
    return [await _score(endpoint, scorer, text) for text in texts]


async def _score(endpoint: Endpoint, scorer: Scorer, text: str) -> list[Token]:
    value = await post(endpoint, PATHS["completions"], {"prompt": text, **scorer.body})
    try:
        tokens = scorer.read(value["choices"][0])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"no log probabilities of the prompt: {type(error).__name__}: {error}") from error
    if not any(token.logprob is not None for token in tokens) and len(tokens) > 1:
        raise RequestError("no log probabilities of the prompt")
    return tokens


async def find_scorer(endpoint: Endpoint) -> Scorer:
    """Return the first form that the endpoint serves. Raises EndpointError."""
    reasons = []
    for scorer in SCORERS:
        try:
            if len(await _score(endpoint, scorer, _PROBE)) > 1:
                return scorer
            reasons.append(f"{scorer.name}: no tokens")
        except RequestError as error:
            reasons.append(f"{scorer.name}: {error}")
    raise EndpointError(
        f"{endpoint.client.base_url} serves no log probabilities of prompts; use the kind multiple_choice instead. "
        + "; ".join(reasons)
    )


def last_tokens(tokens: Sequence[Token], text: str) -> list[Token]:
    """Return the last tokens, those that contain the end `text` of their prompt. A token across its beginning
    counts."""
    length = 0
    for place in range(len(tokens) - 1, -1, -1):
        length += len(tokens[place].text)
        if length >= len(text):
            return list(tokens[place:])
    return list(tokens)
