"""Log lines: their shape, their ids, what never gets into them."""

import io
import json
import logging
import re
import subprocess
import sys

import pytest

from appliance.observability.log import RequestLog, Subject, set_up_logging
from tests.appliance.conftest import until

CANARY = "canary-3f9a"


@pytest.fixture
def logged(new_config, new_engine, caplog):
    """Set up logging as configured and return its output."""
    root = logging.getLogger()
    kept = (root.handlers, root.level)
    # The test's own client runs in the same process: its log lines do not belong to the gateway.
    for client in ("httpx", "httpcore"):
        caplog.set_level(logging.WARNING, client)

    def set_up(**values):
        out = io.StringIO()
        config = new_config(new_engine(), **values)
        set_up_logging(config, out)
        return RequestLog(config), out

    yield set_up
    root.handlers, level = kept
    root.setLevel(level)


def test_a_json_line_has_short_module_level_message_and_request_id(logged):
    """OBS-03 deep module path shortened"""
    _, out = logged(**{"observability.log_format": "json"})
    logging.getLogger("appliance.server.http.deep.module").warning("two\nlines", extra={"request_id": "r-1"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    said = {"level": "warning", "program": "gateway", "logger": "server.http.deep.module", "message": "two\nlines"}
    assert line == {**said, "request_id": "r-1"}


@pytest.mark.parametrize("text", ["two\nlines", "two\r\nlines", "two\u2028lines", "two\x85lines"])
def test_text_record_is_always_one_line(logged, text):
    """OBS-03 a message cannot forge a line"""
    _, out = logged()
    logging.getLogger("appliance.server.routing.router").warning("%s", text)
    assert len(out.getvalue().splitlines()) == 1
    assert " warning server.routing.router two" in out.getvalue()


NOT_PRINTABLE = [*map(chr, (*range(32), *range(0x7F, 0xA0))), *"\u200e\u202e\u2066\u2028\u2029\ufeff\ud800\udfff"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_line_has_printable_characters_only(logged, log_format):
    """OBS-03 a terminal that shows the log cannot be controlled by a client"""
    _, out = logged(**{"observability.log_format": log_format})
    hostile = "a" + "b".join(NOT_PRINTABLE) + "c"
    logging.getLogger("appliance.server.http").warning(
        "%s", hostile, extra={"path": hostile, "fields": {hostile: [hostile]}}
    )
    line = out.getvalue().removesuffix("\n")
    assert line.isprintable()
    if log_format == "json":
        found = json.loads(line)
        assert found["message"].replace("\n", "").isprintable() and found["path"].replace("\n", "").isprintable()
        ((key, (value,)),) = found["fields"].items()
        assert key == value == found["path"]
        line = found["path"]
    assert "\\x1b" in line and "\\x7f" in line and "\\x9b" in line and "\\u202e" in line and "\\ud800" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_control_characters_of_a_request_path_are_escaped_in_the_log(start_gateway, engine, logged, log_format):
    _, out = logged(**{"observability.log_format": log_format})
    assert start_gateway(engine).client.get("/x%1b[2J%7f%e2%80%ae").status_code == 404
    (line,) = [line for line in out.getvalue().splitlines() if "/x" in line]
    assert line.isprintable() and "x1b[2J" in line


def test_records_below_the_level_are_left_out(logged):
    _, out = logged(**{"observability.log_level": "warning"})
    logging.getLogger("appliance.server.routing.router").info("quiet")
    logging.getLogger("appliance.server.routing.router").error("loud")
    assert "quiet" not in out.getvalue() and "loud" in out.getvalue()


@pytest.mark.parametrize(
    ("mode", "lines"), [("off", []), ("final", ["final"]), ("deltas", ["delta", "delta", "final"])]
)
def test_outputs_are_logged_as_configured(logged, mode, lines):
    """OBS-03 off, one full-output line, or per delta plus final"""
    log, out = logged(**{"observability.log_outputs": mode})
    log.delta(Subject("r"), 0, "Hel")
    log.delta(Subject("r"), 0, "lo")
    log.final(Subject("r"), 0, "Hello", "stop")
    found = out.getvalue().splitlines()
    assert ["delta" if "delta of choice 0" in line else "final" for line in found] == lines
    assert [line for line in found if "Hello" in line] == [line for line in found if "choice 0 (stop): Hello" in line]


@pytest.mark.parametrize(("log_requests", "count"), [(False, 0), (True, 1)])
def test_parameters_are_logged_only_on_demand(logged, log_requests, count):
    """OBS-03 log_requests"""
    log, out = logged(**{"observability.log_requests": log_requests, "observability.log_format": "json"})
    log.request(Subject("r"), "/v1/completions", {"max_tokens": 7})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["fields"] for line in lines] == [{"max_tokens": 7}] * count


def test_unexpected_error_is_logged_with_its_traceback_but_not_its_message(logged):
    """OBS-03 an exception's message may quote a prompt"""
    log, out = logged(**{"observability.log_format": "json"})
    try:
        raise RuntimeError(CANARY)
    except RuntimeError as error:
        log.unexpected(Subject("r-9"), error)
    line = json.loads(out.getvalue())
    assert (line["message"], line["request_id"]) == ("unexpected RuntimeError", "r-9")
    assert "test_log.py" in line["traceback"][-1]
    assert CANARY not in out.getvalue()


def test_log_contains_neither_keys_nor_prompts(start_gateway, engine, logged):
    """OBS-03 canaries in keys, bodies, headers and exceptions"""
    _, out = logged(**{"observability.log_level": "debug", "observability.log_requests": True})
    gateway = start_gateway(
        engine, keys=[f"{CANARY}-key"], **{"observability.log_level": "debug", "observability.log_requests": True}
    )
    good = {"authorization": f"Bearer {CANARY}-key"}
    send = gateway.client.post
    assert send("/test/generate", json={}, headers=good).status_code == 200
    assert send("/test/generate", json={}, headers={"x-api-key": f"{CANARY}-wrong"}).status_code == 401
    assert send("/test/generate", json={"seed": CANARY}, headers=good).status_code == 400
    assert send("/test/generate", content=CANARY.encode(), headers=good).status_code == 400
    assert send("/invocations", json={"inputs": CANARY}, headers=good).status_code == 400
    assert send("/test/generate", json={"raises": "RuntimeError"}, headers=good).status_code == 500
    assert send(f"/test/generate?key={CANARY}", json={}, headers=good).status_code == 200
    said = out.getvalue()
    assert said.count(" request ") == 7
    assert CANARY not in said and "canary-of-an-exception" not in said


def test_access_log_omits_probes_and_has_the_request_id(start_gateway, engine, logged):
    """OBS-03 access log without probes"""
    _, out = logged(**{"observability.log_format": "json"})
    gateway = start_gateway(engine)
    for path in ("/live", "/ready", "/health", "/ping", "/metrics", "/load", "/version"):
        gateway.client.get(path)
    gateway.client.get("/v1/models", headers={"x-request-id": "r-77"})
    gateway.client.get("/absent")

    def logged_requests():
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        return [line for line in lines if line["logger"] == "requests"]

    until(
        "the last request is logged, after its reply",
        lambda: any(line["path"] == "/absent" for line in logged_requests()),
    )
    access = logged_requests()
    assert [(line["path"], line["status"], line["method"]) for line in access] == [
        ("/v1/models", 200, "GET"),
        ("/absent", 404, "GET"),
    ]
    assert access[0]["request_id"] == "r-77"
    assert access[0]["client"] == "127.0.0.1"


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_every_line_of_a_request_has_the_trace_of_the_caller(start_gateway, engine, logged, log_format):
    """RT-06 traceparent and tracestate"""
    _, out = logged(**{"observability.log_format": log_format})
    gateway = start_gateway(engine)
    headers = [("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a=1"), ("tracestate", "b=2 3 ,")]
    reply = gateway.client.post("/test/generate", json={"raises": "RuntimeError"}, headers=headers)
    assert reply.status_code == 500
    lines = [line for line in out.getvalue().splitlines() if "unexpected" in line or "/test/generate" in line]
    assert len(lines) == 2
    for line in lines:
        if log_format == "json":
            found = json.loads(line)
            assert (found["trace_id"], found["parent_id"], found["tracestate"]) == (TRACE, SPAN, "a=1,b=2 3")
        else:
            assert f' trace_id={TRACE} parent_id={SPAN} tracestate="a=1,b=2 3" ' in line


@pytest.mark.parametrize(
    "headers",
    [[], [("traceparent", "hello")], [("traceparent", f"00-{TRACE}-{SPAN}-01")] * 2, [("tracestate", "a=1")]],
)
def test_lines_have_no_trace_without_a_valid_one(start_gateway, engine, logged, headers):
    """RT-06 a damaged trace is no reason to refuse a request"""
    _, out = logged()
    assert start_gateway(engine).client.post("/test/generate", json={}, headers=headers).status_code == 200
    assert " path=/test/generate " in out.getvalue()
    assert "trace" not in out.getvalue() and "parent_id" not in out.getvalue()


def test_path_with_a_space_is_quoted(start_gateway, engine, logged):
    """OBS-03 a path cannot forge a field"""
    _, out = logged()
    start_gateway(engine).client.get('/x status=200 "y')
    assert ' status=404 method=GET path="/x status=200 \\"y" ' in out.getvalue()


def test_log_is_written_to_standard_error(tmp_path, new_config, new_engine):
    code = (
        "import sys, logging; from pathlib import Path; from appliance.config.gateway import read_config;"
        "from appliance.observability.log import set_up_logging; set_up_logging(read_config(Path(sys.argv[1])));"
        "logging.getLogger('appliance.server.process').info('hello')"
    )
    from appliance.config.gateway import write_config

    write_config(new_config(new_engine()), tmp_path / "config.json")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "config.json"], capture_output=True, text=True)
    assert done.stdout == ""
    assert " info server.process hello" in done.stderr
