"""The example request shown when the service is ready is a request that the model can answer."""

import json
import shlex
from typing import Any

import pytest

from appliance.config.gateway import GatewayConfig
from appliance.server.platforms.invocations import SHAPES
from appliance.supervisor.startup import curl_line


def config(**fields: Any) -> GatewayConfig:
    defaults = {"names": ("demo",), "model": "", "engines": (), "max_context": 9}
    return GatewayConfig(**{**defaults, "vocab_size": 9, **fields})


@pytest.mark.parametrize(
    ("tasks", "path"),
    [
        (("generate",), "/v1/chat/completions"),
        (("embed", "token_embed"), "/v1/embeddings"),
        (("classify",), "/classify"),
        (("score",), "/score"),
        (("token_embed",), "/pooling"),
        (("token_classify",), "/pooling"),
    ],
)
def test_curl_line_uses_a_route_that_the_model_supports(tasks: Any, path: str) -> None:
    words = shlex.split(curl_line("http://host:1", config(tasks=tasks)))
    assert words[:3] == ["curl", "-N", f"http://host:1{path}"]
    body = json.loads(words[-1])
    assert body["model"] == "demo"
    fitting = [shape for shape in SHAPES if body.keys() >= set(shape.keys) and set(shape.tasks) & set(tasks)]
    assert fitting[0].schema.model_validate(body)
