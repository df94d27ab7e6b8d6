"""The load benchmark against a tiny server that answers with known numbers."""

import json
import statistics
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.load import Shape, make_load, text
from benchmarks.serve import main, summarize, summary


class TinyServer(BaseHTTPRequestHandler):
    """Streams max_tokens words to each request; the n-th request of `broken` breaks in the way given there."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._reply(200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append((self.path, body, self.headers.get("Authorization")))
        how = self.server.broken.get(number)
        if how == "busy":
            return self._reply(503, b'{"error": {"message": "busy"}}')
        chat = self.path == "/v1/chat/completions"
        records = [self._chunk(chat, role=True)] if chat else []
        records += [self._chunk(chat) for _ in range(body["max_tokens"])]
        records.append(self._chunk(chat, last=True))
        records.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        if how == "error":
            records[1:] = [{"error": {"message": "engine died"}}]
        if how == "garbage":
            records = ["{"]
        lines = [f"data: {record if isinstance(record, str) else json.dumps(record)}\n\n" for record in records]
        end = "" if how == "cut" else "data: [DONE]\n\n"
        self._reply(200, ("".join(lines) + end).encode(), "text/event-stream")

    def _chunk(self, chat, role=False, last=False):
        finish = "length" if last else None
        if not chat:
            return {"choices": [{"index": 0, "text": "" if last else "w ", "finish_reason": finish}]}
        delta = {"role": "assistant", "content": ""} if role else ({} if last else {"content": "w "})
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def _reply(self, status, content, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), TinyServer)
    server.lock, server.bodies, server.broken = threading.Lock(), [], {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def load_of(seed, rate=None):
    shape = {"prompt": Shape(100, 1.2, 1024), "output": Shape(180, 0.9, 1024)}
    return list(make_load(requests=300, seed=seed, rate=rate, **shape))


def test_a_closed_loop_sends_every_request_once_and_counts_it(server, tmp_path, capsys):
    """BEN-01 throughput, TTFT, TPOT, failures; JSON"""
    out = tmp_path / "deep" / "result.json"
    arguments = [
        "--url",
        server.url,
        "--requests",
        "13",
        "--concurrency",
        "4",
        "--output-tokens",
        "5",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    assert (result["result"]["requests"], result["result"]["failures"]) == (13, 0)
    assert result["result"]["output_tokens"] == sum(body["max_tokens"] for _, body, _ in server.bodies)
    assert result["result"]["prompt_tokens"] == 7 * 13
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_ms"):
        numbers = result["result"][name]
        assert 0 < numbers["p50"] <= numbers["p90"] <= numbers["p99"] or name == "inter_token_latency_ms"
    assert {"cores", "python", "versions"} <= result["machine"].keys()
    assert len(server.bodies) == 13
    assert all(body["model"] == "tiny" and body["stream"] for _, body, _ in server.bodies)
    shown = capsys.readouterr().out
    assert "output_tokens_per_second" in shown and "p99" in shown


def test_the_same_seed_sends_the_same_requests(server, tmp_path):
    """BEN-01 reproducible with a seed"""

    def sent(seed):
        server.bodies.clear()
        assert main(["--url", server.url, "--requests", "7", "--output-tokens", "3", "--seed", str(seed)]) == 0
        return sorted(json.dumps(body, sort_keys=True) for _, body, _ in server.bodies)

    first = sent(3)
    assert first == sent(3)
    assert first != sent(4)


def test_open_loop_sends_requests_on_schedule(server, tmp_path):
    """BEN-01 open loop"""
    out = tmp_path / "result.json"
    arguments = ["--url", server.url, "--requests", "5", "--rate", "500", "--output-tokens", "2", "--out", str(out)]
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    assert (result["settings"]["rate"], result["settings"]["concurrency"]) == (500.0, None)
    assert len(server.bodies) == 5


def test_chat_route_is_used_on_request_and_the_key_is_not_written(server, tmp_path):
    out = tmp_path / "result.json"
    arguments = [
        "--url",
        server.url,
        "--requests",
        "3",
        "--chat",
        "--api-key",
        "k-1",
        "--model",
        "m",
        "--out",
        str(out),
    ]
    assert main([*arguments, "--output-tokens", "4"]) == 0
    assert {(path, key) for path, _, key in server.bodies} == {("/v1/chat/completions", "Bearer k-1")}
    assert all(body["messages"][0]["content"] and body["model"] == "m" for _, body, _ in server.bodies)
    assert "k-1" not in out.read_text()
    assert json.loads(out.read_text())["result"]["output_tokens"] == sum(b["max_tokens"] for _, b, _ in server.bodies)


@pytest.mark.parametrize(
    ("how", "error"),
    [("busy", "HTTP 503"), ("error", "engine died"), ("cut", "ended before"), ("garbage", "not an OpenAI stream")],
)
def test_failures_are_reported_and_excluded_from_throughput(server, tmp_path, capsys, how, error):
    """BEN-01 failures"""
    server.broken = {1: how}
    out = tmp_path / "result.json"
    arguments = [
        "--url",
        server.url,
        "--requests",
        "3",
        "--concurrency",
        "1",
        "--out",
        str(out),
        "--output-tokens",
        "3",
    ]
    assert main(arguments) == 1
    result = json.loads(out.read_text())["result"]
    assert (result["requests"], result["failures"]) == (3, 1)
    assert error in next(iter(result["errors"]))
    good = [body["max_tokens"] for number, (_, body, _) in enumerate(server.bodies) if number != 1]
    assert result["output_tokens"] == sum(good)
    assert error in capsys.readouterr().out


def test_missing_server_is_a_one_line_error(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "http://127.0.0.1:9: ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--concurrency", "0"], ["--rate", "0"]])
def test_invalid_load_parameters_are_rejected(wrong, capsys):
    assert main(["--url", "http://127.0.0.1:9", *wrong]) == 2


def test_lengths_have_the_given_median_and_a_long_tail():
    """BEN-01 ShareGPT-like mix"""
    lengths = sorted(ask.max_tokens for ask in load_of(seed=1))
    assert 130 < statistics.median(lengths) < 240
    assert lengths[0] >= 1 and lengths[-1] <= 1024
    assert statistics.fmean(lengths) > statistics.median(lengths)


def test_open_loop_arrivals_have_the_given_rate():
    """BEN-01 Poisson arrivals: mean gap 1/rate, and their standard deviation equals their mean."""
    starts = [ask.start_s for ask in load_of(seed=2, rate=20.0)]
    gaps = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert starts[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.2)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.3)


def test_prompts_share_no_long_prefix():
    """BEN-01 no prefix cache helps"""
    heads = {ask.prompt[:24] for ask in load_of(seed=5) if len(ask.prompt) >= 24}
    assert len(heads) == sum(len(ask.prompt) >= 24 for ask in load_of(seed=5))


@pytest.mark.parametrize(("tokens", "words"), [(1, 1), (2, 1), (7, 4), (100, 50)])
def test_prompt_has_enough_words_for_its_tokens(tokens, words):
    import random

    assert len(text(random.Random(0), tokens).split()) == words


def test_percentiles_are_nearest_ranks():
    assert summarize([]) == {}
    assert summarize([0.007]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0}
    hundred = summarize([number / 1000 for number in range(1, 101)])
    assert hundred == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


def test_run_without_success_has_a_summary():
    assert summary([], 1.0)["requests_per_second"] == 0.0
