"""Similarity of pooled prompts, and parsing of score and rerank requests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul

from appliance.config.gateway import GatewayConfig
from appliance.server.chat.parsed import Served
from appliance.server.pooling.contents import Content, reads_alone
from appliance.server.pooling.instructions import side_lead
from appliance.server.pooling.late import SIDES, Side, late_ids
from appliance.server.pooling.late import compared as late_compared
from appliance.server.pooling.pairs import Comparison, comparison, joined, most_tokens, shortened
from appliance.server.pooling.plan import Pooled as Prompt
from appliance.server.pooling.plan import (
    PoolPlan,
    Terms,
    alone_prompt,
    facts,
    naming,
    rendered_media,
    submits,
    terms,
    text_ids,
    whole,
)
from appliance.server.pooling.vectors import floats
from appliance.server.schema.scoring import RerankRequest, ScoreRequest, ScoringFields
from engine.api.errors import RequestError
from engine.api.messages import Pooled, Pooling

Vector = Sequence[float]


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine of the angle between two vectors, or 0 for a zero vector."""
    size = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / size if size else 0.0


def _dot(first: Vector, second: Vector) -> float:
    return float(sum(map(mul, first, second)))


def _euclidean(first: Vector, second: Vector) -> float:
    return -math.dist(first, second)


def _manhattan(first: Vector, second: Vector) -> float:
    return -math.fsum(abs(one - other) for one, other in zip(first, second, strict=True))


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": cosine,
    "dot": _dot,
    "euclidean": _euclidean,  # negative, so that larger values mean closer for all of them
    "manhattan": _manhattan,
}


def max_similarity(query: Pooled, document: Pooled) -> float:
    """Return the late interaction score: for each query token the maximum product with a document token, summed up."""
    import numpy as np

    left, right = (np.frombuffer(each.values, "<f4").reshape(each.shape) for each in (query, document))
    return float((left @ right.T).max(axis=1).sum(dtype=np.float64))


@dataclass(frozen=True)
class ScorePlan(PoolPlan):
    """A parsed score or rerank request."""

    compared: Comparison  # the texts and pairs
    vectors: bool  # each text is one sequence (first side first), else each pair is one
    late: Callable[[Pooled, Sequence[int]], Pooled] | None = None  # selects the document vectors that are compared

    def scores(self, results: Sequence[Pooled], config: GatewayConfig) -> list[float]:
        """Return the score of each pair, in order."""
        if not self.vectors:
            return [floats(result)[0] for result in results]
        count = len(self.compared.first)
        if self.late is not None:
            documents = zip(results[count:], self.submits[count:], strict=True)
            results = [*results[:count], *(self.late(each, one.prompt) for each, one in documents)]
        if len(results[0].shape) == 2:
            return [max_similarity(results[left], results[count + right]) for left, right in self.compared.pairs]
        vectors = [floats(result) for result in results]
        alike = SIMILARITIES[facts(config).similarity]
        return [alike(vectors[left], vectors[count + right]) for left, right in self.compared.pairs]


def plan_scores(body: ScoreRequest | RerankRequest, served: Served) -> ScorePlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    conditions = terms(body, served)
    compared = comparison(body, served)
    vectors = facts(served.config).pairs == "none"
    if not vectors:
        prompts = joined(compared, body, conditions, served)
        tokens = sum(len(prompt.ids) for prompt in prompts)
        task = Pooling("classify", activate=body.use_activation)
        return ScorePlan(submits(prompts, task, conditions, served), tokens, compared, vectors)
    if body.instruction is not None:
        raise RequestError(
            "instruction is not supported, because the model compares text vectors. Put it at the start of the query.",
            "instruction",
        )
    prompts = _sides(compared, body, conditions, served)
    count = len(compared.first)
    lengths = [(len(prompts[left].ids), len(prompts[count + right].ids)) for left, right in compared.pairs]
    task = Pooling("embed" if "embed" in served.config.tasks else "token_embed", activate=body.use_activation)
    late, keeps = facts(served.config).late, None
    if late is not None and not late.reads_images:
        keeps = partial(late_compared, late=late, tokenizer=served.text.tokenizer)
    return ScorePlan(submits(prompts, task, conditions, served), sum(map(sum, lengths)), compared, vectors, keeps)


def _alone(
    content: Content, kind: Side, name: str, prefix: str, most: int | None, conditions: Terms, served: Served
) -> Prompt:
    """Return the prompt of a side for a model that reads one text or one image."""
    model = facts(served.config)
    if model.late is not None and (kind == "query") != isinstance(content, str):
        wanted = "a text" if kind == "query" else "an image"
        raise RequestError(f"{name}: a {kind} of this model is {wanted}.", name)
    cut = shortened(content, most, conditions, served) if isinstance(content, str) else content
    return alone_prompt(cut, prefix, conditions, served, name)


def _sides(compared: Comparison, body: ScoringFields, conditions: Terms, served: Served) -> list[Prompt]:
    """Return a prompt for each text of both sides, with the model's prefix for a query or a document."""
    prompts = []
    names, model = compared.names, facts(served.config)
    sides = ((names.first, compared.first, SIDES[0]), (names.second, compared.second, SIDES[1]))
    for (name, texts, kind), most in zip(sides, most_tokens(body, served), strict=True):
        prefix = side_lead(model, kind)
        for at, text in enumerate(texts):
            with naming(name, at, len(texts)):
                if reads_alone(model):
                    prompts.append(_alone(text, kind, name, prefix, most, conditions, served))
                    continue
                if not isinstance(text, str):
                    prompts.append(rendered_media(text, conditions, served))
                    continue
                cut = shortened(text, most, conditions, served)
                if model.late is not None:
                    ids = late_ids(cut, kind, model.late, served, keep=conditions.keep, cut=conditions.side)
                else:
                    ids = text_ids(prefix + cut, conditions, served)
                prompts.append(whole(ids, name, served))
    return prompts
