"""POST /v1/capitals: a completion in capital letters. The smallest generating route (CONTRIBUTING.md, Add a route)."""

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Subject
from appliance.server.chat.completion_prompt import plan_completion
from appliance.server.chat.parsed import Plan
from appliance.server.chat.stream import Choice
from appliance.server.http.body import json_body, read_body
from appliance.server.http.pipeline import admit, log_request, receive_durable, respond, route_durable
from appliance.server.http.reply import Reply
from appliance.server.http.service import Service, service_of
from appliance.server.http.sse import record
from appliance.server.schema.completions import CompletionRequest
from engine.api.messages import Delta

router = APIRouter()


class CapitalsReply(Reply[dict[str, Any]]):
    def __init__(self, service: Service, subject: Subject, body: CompletionRequest, plan: Plan) -> None:
        self.body, self.plan = body, plan
        prompts = [prompt for prompt in plan.prompts for _ in prompt.submits]
        choices = [Choice(service.text.tokenizer, prompt.before, plan.reading) for prompt in prompts]
        super().__init__(service, subject, body, sum(prompt.tokens for prompt in plan.prompts), choices)
        self.texts: list[list[str]] = [[] for _ in choices]

    def fresh(self) -> "CapitalsReply":
        return CapitalsReply(self.service, self.subject, self.body, self.plan)

    def take(self, index: int, delta: Delta) -> dict[str, Any]:
        self.texts[index].append(self.choices[index].take(delta).text.upper())
        return {"index": index, "text": self.texts[index][-1]}

    def record(self, piece: dict[str, Any], event_id: str) -> bytes:
        return record(piece, event_id)

    def whole(self) -> dict[str, Any]:
        return {"texts": ["".join(parts) for parts in self.texts]}

    def logged(self, index: int) -> Iterable[tuple[str, str | None]]:
        return ((self.texts[index][-1], self.choices[index].finish),)


@router.post("/v1/capitals", openapi_extra=json_body(CompletionRequest))
async def capitals(request: Request) -> Response:
    service, body = service_of(request), await read_body(request, CompletionRequest)
    call = receive_durable(service, request, body, body.model, "capitals")
    plan = await asyncio.to_thread(plan_completion, body, call.context)
    await admit(call, plan)
    routed = await route_durable(call, plan.submits)
    log_request(call, body, {"prompt"})
    return await respond(call, body, routed, CapitalsReply(service, call.subject, body, plan))
