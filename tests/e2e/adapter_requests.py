"""Requests to a running service with adapters."""

import json
from collections.abc import Callable
from typing import Any

import torch

from tests.e2e.conftest import Appliance


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, -12:].tolist()


def completion(appliance: Appliance, model: str, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    body = {"model": model, "prompt": "The ship", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = appliance.client.post("/v1/completions", json={**body, "return_token_ids": True, **more}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens(appliance: Appliance, model: str, **more: Any) -> list[int]:
    return completion(appliance, model, **more)["choices"][0]["token_ids"]


def listed(appliance: Appliance) -> dict[str, str | None]:
    return {one["id"]: one["parent"] for one in appliance.client.get("/v1/models").json()["data"]}


def load(appliance: Appliance, name: str, path: str, **more: Any) -> tuple[int, str]:
    reply = appliance.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})
    return reply.status_code, reply.text


def stream_over_crash(appliance: Appliance, body: dict[str, Any], crash: Callable[[], None]) -> str:
    """Return the text of a stream during which an engine is killed."""
    text, crashed = "", False
    with appliance.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if not crashed and len(text) > 20:
                    crash()
                    crashed = True
    assert crashed
    return text
