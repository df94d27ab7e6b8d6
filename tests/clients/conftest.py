"""Run unmodified, widely used clients against a running demo service: `make clients`.

Their packages conflict with the project's own, so they are installed in a separate environment
(requirements/clients.txt) and reach the service only by its URL. The results are written to docs/clients.md.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASK_WEATHER = "What is the weather in Oslo?"
SUM = "What is 17 + 25?"

_outcomes: dict[str, dict[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", required=True, help="the service, such as http://127.0.0.1:8000")
    parser.addoption("--brief-url", help="the same service with limits.max_output_tokens 4, for generated requests")
    parser.addoption("--table", type=Path, help="JSON file for what each client showed")


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--url"))


@pytest.fixture
def key() -> str:
    return "none"


@pytest.fixture
def service(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    marker = item.get_closest_marker("shows")
    if marker and (report.when == "call" or report.failed):
        client, feature = marker.args
        rows = _outcomes.setdefault(client, {})
        rows[feature] = "works" if report.passed and rows.get(feature) != "fails" else "fails"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    table = session.config.getoption("--table")
    if table:
        rows = [
            {"client": client, "version": version(client), "features": features}
            for client, features in sorted(_outcomes.items())
        ]
        table.write_text(json.dumps(rows, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows(client, feature): a line of docs/clients.md")
