"""Probabilities of labels as the next token, computed by a text completion of one token per item."""

import math
from collections.abc import Sequence

from appliance.server.chat.completion_prompt import plan_completion
from appliance.server.chat.parsed import Plan, Served
from appliance.server.chat.window import check_text
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.label_scores import LabelScoresRequest
from engine.api.errors import RequestError

Side = str | list[int]


def plan_label_scores(body: LabelScoresRequest, served: Served) -> Plan:
    """Return the parsed request with one prompt per item. Raise RequestError with the field names of this route."""
    most = served.config.limits.max_prompts
    if len(body.items) > most:
        raise RequestError(
            f"items has {len(body.items)} entries; the server's limits.max_prompts allows {most}.", "items"
        )
    completion = CompletionRequest(
        prompt=[_prompt(body, item, served) for item in body.items],
        max_tokens=1,
        ignore_eos=True,
        logprobs=0,
        logprob_token_ids=body.label_token_ids,
        priority=body.priority,
        cache_salt=body.cache_salt,
        ttft_deadline_ms=body.ttft_deadline_ms,
        deadline_ms=body.deadline_ms,
        # the service's default sampling parameters must not change the probabilities
        temperature=0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
    try:
        return plan_completion(completion, served)
    except RequestError as error:
        if error.param == "logprob_token_ids":
            raise RequestError(str(error).replace(error.param, "label_token_ids"), "label_token_ids") from error
        raise RequestError(str(error), "items" if error.param == "prompt" else error.param) from error


def _prompt(body: LabelScoresRequest, item: Side, served: Served) -> list[int]:
    first, second = (item, body.query) if body.item_first else (body.query, item)
    tokenizer = served.text.tokenizer
    if isinstance(first, str) and isinstance(second, str):
        check_text(first + second, tokenizer, served.config)
        ids = tokenizer.encode(first + second, add_special_tokens=body.add_special_tokens)
    else:
        for side in (first, second):
            if isinstance(side, str):
                check_text(side, tokenizer, served.config)
        begun = body.add_special_tokens
        ids = [
            *(tokenizer.encode(first, add_special_tokens=begun) if isinstance(first, str) else first),
            *(tokenizer.encode(second, add_special_tokens=False) if isinstance(second, str) else second),
        ]
    if not ids:
        raise RequestError("query and item must not both be empty.", "items")
    return ids


def probabilities(logprobs: Sequence[float], *, among_labels: bool) -> list[float]:
    """Return probabilities from log probabilities, relative to the other labels or to all tokens."""
    if not among_labels:
        return [math.exp(value) for value in logprobs]
    most = max(logprobs)
    if most == -math.inf:  # the model excludes all of them
        return [1 / len(logprobs)] * len(logprobs)
    shares = [math.exp(value - most) for value in logprobs]
    total = sum(shares)
    return [share / total for share in shares]
