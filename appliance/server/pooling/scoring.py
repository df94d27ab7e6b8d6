"""POST /score and /rerank, under all of their paths (docs/pooling.md)."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.server.http.body import json_body, read_body
from appliance.server.http.media import with_media
from appliance.server.http.pipeline import as_json
from appliance.server.http.service import Service, service_of
from appliance.server.pooling.contents import Content
from appliance.server.pooling.pairs import compared_media
from appliance.server.pooling.pooled import Outcome, numbered, pool, receive_pooling
from appliance.server.pooling.scores import ScorePlan, plan_scores
from appliance.server.schema.scoring import RerankRequest, ScoreRequest

router = APIRouter()


async def _scores(service: Service, outcome: Outcome[ScorePlan]) -> list[float]:
    """Compute the scores in a thread, since there may be a thousand long texts of token vectors."""
    return await asyncio.to_thread(outcome.plan.scores, outcome.results, service.config)


async def create_scores(service: Service, request: Request, body: ScoreRequest) -> Response:
    call = receive_pooling(service, request, body, "score")
    call = await with_media(call, compared_media(body, call.context))
    plan = await asyncio.to_thread(plan_scores, body, call.context)
    outcome = await pool(call, body, plan)
    scores = await _scores(service, outcome)
    data = numbered("score", "score", scores)
    return as_json(call, {**outcome.head("score", service), "data": data, "usage": outcome.usage_fields()})


@router.post("/score", openapi_extra=json_body(ScoreRequest), summary="Score pairs of texts")
@router.post("/v1/score", openapi_extra=json_body(ScoreRequest), summary="Score pairs of texts")
async def score(request: Request) -> Response:
    return await create_scores(service_of(request), request, await read_body(request, ScoreRequest))


def _ranked(scores: Sequence[float], contents: Sequence[Content], body: RerankRequest) -> list[dict[str, Any]]:
    """Return the documents by descending score. Equal ones keep their order. Images are not repeated."""
    texts = [one if isinstance(one, str) else None for one in contents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        {"index": index}
        | ({"document": {"text": texts[index], "multi_modal": None}} if body.return_documents else {})
        | {"relevance_score": scores[index]}
        for index in order[: body.top_n or None]
    ]


async def create_ranking(service: Service, request: Request, body: RerankRequest) -> Response:
    call = receive_pooling(service, request, body, "rerank")
    call = await with_media(call, compared_media(body, call.context))
    plan = await asyncio.to_thread(plan_scores, body, call.context)
    outcome = await pool(call, body, plan)
    head, scores = outcome.head("score", service), await _scores(service, outcome)
    version = "2" if request.url.path.startswith("/v2/") else "1"
    return as_json(
        call,
        {
            "id": head["id"],
            "model": head["model"],
            "usage": {"prompt_tokens": outcome.plan.tokens, "total_tokens": outcome.plan.tokens},
            "results": _ranked(scores, outcome.plan.compared.second, body),
            "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": outcome.plan.tokens}},
        },
    )


@router.post("/rerank", openapi_extra=json_body(RerankRequest), summary="Rank documents by relevance to a query")
@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest), summary="Rank documents by relevance to a query")
@router.post("/v2/rerank", openapi_extra=json_body(RerankRequest), summary="Rank documents by relevance to a query")
async def rerank(request: Request) -> Response:
    return await create_ranking(service_of(request), request, await read_body(request, RerankRequest))
