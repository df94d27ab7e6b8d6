"""The Ray Serve application of `slipway render ray` with the demo; Ray itself is replaced by its decorator.

`make test` runs the application with a process that forwards to the shared demo instead of `slipway serve`."""

import json
import sys
import types

import httpx
import pytest

from appliance.deployment.ray import APPLICATION
from tests.e2e.conftest import DEMO, ROOT, SLIPWAY
from tests.tiers import thinned

RELAY, SERVE = "relay", "slipway serve"


@pytest.fixture(params=thinned([RELAY, SERVE], kept=[RELAY]))
def replica(monkeypatch, demo, request):
    """An instance of the deployment's class, as Ray creates it in a worker."""
    relay = [sys.executable, str(ROOT / "tests" / "e2e" / "relay.py"), demo.url.rpartition(":")[2]]
    command = json.dumps(relay if request.param == RELAY else [*SLIPWAY, "serve", str(DEMO)])
    serve = types.SimpleNamespace(deployment=lambda cls: type(cls.__name__, (cls,), {"bind": classmethod(lambda c: c)}))
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(serve=serve))
    source = APPLICATION.format(command=command, scheme="http", startup=120, grace=30)
    space: dict = {"__name__": "slipway_ray"}
    exec(compile(source, "slipway_ray.py", "exec"), space)
    made = space["app"]()
    yield made
    made.__del__()
    assert made._process.poll() == 0


def test_a_replica_forwards_requests_streams_and_errors_and_notices_a_crash(replica):
    from starlette.requests import Request

    async def app(scope, receive, send):
        reply = await replica(Request(scope, receive))
        await reply(scope, receive, send)

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ray", timeout=60) as client:
            body = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
            whole = await client.post("/v1/chat/completions", json=body)
            stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
            models = await client.get("/v1/models?x=1")
            wrong = await client.post("/v1/chat/completions", json={**body, "model": "none"})
        await replica._client.aclose()
        return whole, stream, models, wrong

    import asyncio

    whole, stream, models, wrong = asyncio.run(ask())
    assert "42" in whole.json()["choices"][0]["message"]["content"]
    assert stream.headers["content-type"].startswith("text/event-stream") and "data: [DONE]" in stream.text
    assert models.json()["data"][0]["id"] == "demo" and wrong.status_code == 404
    replica.check_health()
    replica._url = "http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match="/live"):
        replica.check_health()
