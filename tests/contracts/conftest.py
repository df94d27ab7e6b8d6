"""One service for the folder: the URL in SLIPWAY_CONTRACTS_URL, or the demo, started as Vertex AI starts a container.

A service at a URL needs the API key, routes and sessions of ENVIRONMENT.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.runtime.processes import exit_with_parent
from tests.e2e.conftest import PATIENCE_S, ROOT, free_port, until
from tests.e2e.shared import use_shared

KEY = "sk-contract"
HEALTH, PREDICT = "/platform/health", "/platform/predict"
ENVIRONMENT = {
    "AIP_MODE": "PREDICTION",
    "AIP_HEALTH_ROUTE": HEALTH,
    "AIP_PREDICT_ROUTE": PREDICT,
    "SLIPWAY__ENDPOINTS__HOST": "127.0.0.1",
    "SLIPWAY__ENDPOINTS__API_KEYS": "clients",
    "SLIPWAY__SECRETS": "{clients: {env: CONTRACT_KEYS}}",
    "SLIPWAY__ENDPOINTS__SESSIONS__KEEP": "20m",
    "SLIPWAY__HARDWARE__THREADS": "1",  # see tests/e2e/conftest.py
    "CONTRACT_KEYS": KEY,
}


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The URL of the service without a final slash, and its port of gRPC."""
    if given := os.environ.get("SLIPWAY_CONTRACTS_URL"):
        port = int(os.environ.get("SLIPWAY_CONTRACTS_GRPC_PORT") or free_port())
        return {"url": given.rstrip("/"), "grpc_port": port}
    log = tmp_path_factory.mktemp("contracts") / "log"
    return use_shared(request.config, "contracts", lambda: started(log), tmp_path_factory)


@contextmanager
def started(log: Path) -> Iterator[dict[str, Any]]:
    port, grpc_port = free_port(), free_port()
    environ = {**os.environ, **ENVIRONMENT, "AIP_HTTP_PORT": str(port)}
    environ["SLIPWAY__ENDPOINTS__GRPC_PORT"] = str(grpc_port)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve"], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environ,
            preexec_fn=exit_with_parent,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{address}{HEALTH}", verify=False).status_code == 200
            except httpx.TransportError:
                return False

        until(f"{HEALTH} of {address}", healthy)
        yield {"url": address, "grpc_port": grpc_port}
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def grpc_port(service: dict[str, Any]) -> int:
    """The port of gRPC, also of a service at a URL."""
    return int(service["grpc_port"])


@pytest.fixture(scope="session")
def url(service: dict[str, Any]) -> str:
    return str(service["url"])


@pytest.fixture(scope="session")
def anyone(url: str) -> Iterator[httpx.Client]:
    """A client without an API key."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name
