"""A service whose engine is two processes: the same answers; the engine restarts completely after one was killed, and
the service halts after one crash too many."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from appliance.config import exits
from tests.e2e.conftest import DEMO, Appliance

ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
LONG = {"model": "demo", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": 0}


def rank_of(appliance):
    """The process id of rank 1."""
    found = [pid for pid, line in appliance.processes().items() if "engine.rank" in line]
    return found[0] if len(found) == 1 else None


@pytest.mark.nightly(
    "tests/e2e/test_ranks.py::test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on"
)
def test_two_ranks_answer_as_one_does_and_leave_no_process(demo, launch):
    appliance = launch(DEMO, "-tp", "2", "--quantization.kv_cache", "float32")  # as the demo
    appliance.wait_ready()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", LONG | {"max_tokens": 40})):
        one, two = (each.client.post(path, json=body).json() for each in (demo, appliance))
        assert one["choices"][0].get("text") == two["choices"][0].get("text")
        assert one["choices"][0].get("message") == two["choices"][0].get("message")
        for usage in (one["usage"], two["usage"]):
            usage.pop("prompt_tokens_details")  # what others have left in the cache
        assert one["usage"] == two["usage"]
    assert rank_of(appliance) is not None
    ranks = appliance.client.get("/ready").json()["engines"][0]["memory"]
    assert len(ranks) == 2 and all(rank["measured"]["loading"]["kept"] > 0 for rank in ranks)
    for rank in ranks:
        assert all(part["planned"] == part["real"] for part in rank["parts"].values()) and rank["parts"]["kv"]["real"]
    assert "please report it" not in appliance.output()
    assert appliance.stop() == 0
    assert not appliance.processes()


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of crash bundles."""
    return tmp_path_factory.mktemp("ranks") / "crashes"


@pytest.fixture(scope="module")
def appliance(launch: Callable[..., Appliance], crashes: Path) -> Appliance:
    """A service that may restart its engine once, and halts after that."""
    keys = ("lifecycle.restart.exhausted=halt", "lifecycle.restart.max=1", f"lifecycle.crash_bundles.folder={crashes}")
    termination = crashes.with_name("message")
    termination.touch()
    settings = (word for each in keys for word in ("--set", each))
    return launch(DEMO, "-tp", "2", *settings, SLIPWAY_TERMINATION_LOG=str(termination))


def test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on(appliance, eventually):
    appliance.wait_ready()
    whole = appliance.client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
    before, engine = rank_of(appliance), appliance.pids()["engine-0"]
    pieces, errors, far = [], [], threading.Event()

    def read():
        with (
            httpx.Client(base_url=appliance.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    record = json.loads(line[6:])
                    errors.extend([record["error"]["message"]] if "error" in record else [])
                    pieces.extend(choice["text"] for choice in record.get("choices", ()))
                if len(pieces) == 5:
                    far.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert far.wait(100)
    os.kill(before, signal.SIGKILL)
    reader.join(120)
    assert not reader.is_alive()
    eventually("another engine", lambda: appliance.pids().get("engine-0") not in (None, engine))
    eventually("another rank", lambda: rank_of(appliance) not in (None, before))
    assert not errors and "".join(pieces) == whole
    assert f"rank 1 (process {before}) was killed by SIGKILL" in appliance.output(), appliance.output()
    appliance.wait_ready()
    again = appliance.client.post("/v1/completions", json=LONG | {"max_tokens": 20}).json()["choices"][0]["text"]
    assert again and whole.startswith(again)


# The last test of this service: it stops it.
def test_halted_appliance_reports_the_reason_and_never_becomes_ready(appliance, crashes, eventually):
    appliance.wait_ready()
    body = ASK | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    with appliance.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        alone, killed = appliance.metric("slipway_engine_restarts_total") == 0, appliance.pids()["engine-0"]
        os.kill(killed, signal.SIGSEGV)
        if alone:  # the restart that the test above needs
            eventually("another engine", lambda: appliance.pids().get("engine-0", killed) != killed)
            os.kill(appliance.pids()["engine-0"], signal.SIGSEGV)
        rest = "".join(lines)
    assert "The service has halted" in rest and "error" in rest
    eventually("failed", lambda: appliance.client.get("/ready").json()["status"] == "failed")
    seen = appliance.client.get("/ready")
    assert seen.status_code == 503 and seen.json()["reason"]["exit"] == "restarts"
    assert "killed by SIGSEGV" in seen.json()["reason"]["message"]
    assert [appliance.status(path) for path in ("/live", "/health", "/ping")] == [200, 503, 503]
    refused = appliance.client.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and "needs an operator" in refused.json()["error"]["message"]
    assert "engine-0" not in appliance.pids() and "gateway" in appliance.pids()
    bundle = max(crashes.iterdir())  # their names begin with the time
    told = json.loads((bundle / "death.json").read_text())
    assert (told["cause"], told["follows"], told["death"]["signal"]) == ("signal", "halt", "SIGSEGV")
    (open_one,) = told["open_requests"]
    assert open_one["emitted"] >= 1 and open_one["prompt"] >= 1
    assert "max_step_tokens" in (bundle / "engine-0.json").read_text() and (bundle / "gateway.json").exists()
    assert json.loads(crashes.with_name("message").read_text())["bundle"] == str(bundle)
    assert appliance.stop() == exits.RESTARTS.number
    assert not appliance.processes()


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_an_exhausted_policy_ends_the_tree(launch, tmp_path):
    appliance = launch(
        DEMO, "-tp", "2", "--set", "lifecycle.restart.max=0",
        "--set", f"lifecycle.crash_bundles.folder={tmp_path / 'crashes'}",
    )  # fmt: skip
    appliance.wait_ready()
    os.kill(appliance.pids()["engine-0"], signal.SIGKILL)
    assert appliance.process.wait(100) == exits.RESTARTS.number
    assert not appliance.processes()
    assert "killed by SIGKILL" in appliance.output() and len(list((tmp_path / "crashes").iterdir())) == 1
