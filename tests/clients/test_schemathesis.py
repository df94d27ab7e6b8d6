"""schemathesis: generated requests, wrong ones among them, against the service's own OpenAPI description."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 10_000
CHECKS = (
    "not_a_server_error",
    "response_schema_conformance",
    "content_type_conformance",
    "status_code_conformance",
)


@pytest.mark.shows("schemathesis", "contract")
def test_no_server_error_and_no_reply_that_is_not_as_described(request):
    """At a service whose replies are short, so that ten thousand of them take minutes."""
    url = request.config.getoption("--brief-url")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--no-color"]
    command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "-n", "500", "--workers", "2"]
    done = subprocess.run(
        [*command, "--request-timeout", "60", "--continue-on-failure"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
    generated, passed = map(int, re.search(r"(\d+) generated, (\d+) passed", done.stdout).groups())
    assert passed == generated >= CASES
