"""One task against one endpoint: a `Record` for each sample, in the order of the file."""

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from appliance.bench.run import Progress, run_closed
from appliance.config.sections.evaluation import EvaluationTask, Kind
from appliance.evaluation.answers import LETTERS, chosen_letter, extracted, final_number, normalized
from appliance.evaluation.client import (
    Endpoint,
    RequestError,
    Scorer,
    Token,
    find_scorer,
    generate,
    last_tokens,
    score,
)
from appliance.evaluation.prompts import STOPS, continuations, messages, text_prompt
from appliance.evaluation.samples import Sample, Samples


@dataclass
class Record:
    """Result of one sample."""

    number: int
    """Line of the file, or number of the window, from 1."""
    id: str
    category: str
    prompt: Any
    """Messages or text that was sent."""
    expected: list[str]
    reply: str = ""
    answer: str | None = None
    """Answer in the reply. It is None if the reply has no answer."""
    correct: bool = False
    error: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    """Sum for each choice, or of the text (perplexity), in nats."""
    scored_tokens: int = 0
    """Tokens of the text with a log probability (perplexity)."""
    text_bytes: int = 0
    """Length of the text in UTF-8 (perplexity)."""


@dataclass(frozen=True)
class Measured:
    task: EvaluationTask
    records: list[Record]
    seconds: float


@dataclass(frozen=True)
class _Context:
    endpoint: Endpoint
    task: EvaluationTask
    examples: tuple[Sample, ...]
    scorer: Scorer | None


async def run_task(
    endpoint: Endpoint, name: str, task: EvaluationTask, samples: Samples, concurrency: int, report: Progress
) -> Measured:
    """Measure all samples. Failed requests do not end the run. Raises EndpointError if the endpoint lacks log
    probabilities that the kind needs."""
    scorer = await find_scorer(endpoint) if task.kind in SCORED else None
    context, start_s, done = _Context(endpoint, task, samples.examples, scorer), time.perf_counter(), 0
    records = [Record(each.number, each.id, each.category, "", _expected(each)) for each in samples.measured]

    async def run_one(pair: tuple[Sample, Record]) -> None:
        nonlocal done
        sample, record = pair
        began_s = time.perf_counter()
        try:
            await _MEASURES[task.kind](context, sample, record)
        except RequestError as error:
            record.error = str(error)
        record.seconds = round(time.perf_counter() - began_s, 4)
        done += 1
        report(f"{name}: {done} of {len(records)} samples")

    await run_closed(run_one, list(zip(samples.measured, records, strict=True)), concurrency)
    return Measured(task, records, time.perf_counter() - start_s)


def _expected(sample: Sample) -> list[str]:
    return [sample.regex] if sample.regex else list(sample.answers)


async def _generated(context: _Context, sample: Sample, record: Record) -> None:
    """Let the model write its answer and decide about it."""
    task, body = context.task, dict[str, Any]()
    if task.api == "chat":
        record.prompt = messages(task, context.examples, sample)
        body["messages"] = record.prompt
    else:
        record.prompt = text_prompt(task, context.examples, sample)
        body |= {"prompt": record.prompt, "stop": STOPS[task.kind]}
    reply = await generate(context.endpoint, task.api, {**body, "max_tokens": task.max_tokens})
    record.reply, record.finish = reply.text, reply.finish
    record.prompt_tokens, record.output_tokens = reply.prompt_tokens, reply.output_tokens
    record.answer, record.correct = _DECISIONS[task.kind](task, sample, reply.text)


Decision = tuple[str | None, bool]


def _number(task: EvaluationTask, sample: Sample, text: str) -> Decision:
    found = final_number(text)
    return (None, False) if found is None else (str(found), found == Decimal(sample.answers[0]))


def _letter(task: EvaluationTask, sample: Sample, text: str) -> Decision:
    found = chosen_letter(text, len(sample.choices))
    return found, found in sample.answers


def _match(task: EvaluationTask, sample: Sample, text: str) -> Decision:
    found: str | None = text.strip() or None
    if task.extract is not None:
        found = extracted(text, re.compile(task.extract))
    if found is None:
        return None, False
    if sample.regex:
        return found, re.search(sample.regex, found) is not None
    return found, normalized(found) in map(normalized, sample.answers)


async def _chosen(context: _Context, sample: Sample, record: Record) -> None:
    """Compare the log probabilities of the choices. `continuation_logprobs` divides them by the bytes of the choice,
    so that short choices have no advantage."""
    assert context.scorer is not None
    record.prompt = text_prompt(context.task, context.examples, sample)
    texts = continuations(context.task, sample)
    scored = await score(context.endpoint, context.scorer, [record.prompt + text for text in texts])
    record.prompt_tokens = sum(map(len, scored))
    record.logprobs = [total(last_tokens(tokens, text)) for tokens, text in zip(scored, texts, strict=True)]
    values = record.logprobs
    if context.task.kind == "continuation_logprobs":
        values = [value / len(text.encode()) for value, text in zip(values, texts, strict=True)]
    record.answer = LETTERS[values.index(max(values))]
    record.correct = record.answer in sample.answers


def total(tokens: list[Token]) -> float:
    """Return the sum of the log probabilities."""
    return sum(token.logprob for token in tokens if token.logprob is not None)


async def _perplexity(context: _Context, sample: Sample, record: Record) -> None:
    assert context.scorer is not None
    record.prompt = sample.question
    (tokens,) = await score(context.endpoint, context.scorer, [sample.question])
    record.prompt_tokens = len(tokens)
    record.scored_tokens = sum(token.logprob is not None for token in tokens)
    record.logprobs, record.text_bytes = [total(tokens)], len(sample.question.encode())


_DECISIONS: dict[Kind, Callable[[EvaluationTask, Sample, str], Decision]] = {
    "gsm8k": _number,
    "multiple_choice": _letter,
    "exact_match": _match,
}
_MEASURES: dict[Kind, Callable[[_Context, Sample, Record], Awaitable[None]]] = {
    "gsm8k": _generated,
    "multiple_choice": _generated,
    "exact_match": _generated,
    "multiple_choice_logprobs": _chosen,
    "continuation_logprobs": _chosen,
    "perplexity": _perplexity,
}
SCORED = tuple(kind for kind, measure in _MEASURES.items() if measure is not _generated)
"""Kinds that need log probabilities of prompts."""
