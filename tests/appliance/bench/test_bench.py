"""`slipway bench` against a tiny server that answers with known numbers."""

import base64
import io
import json
import re
import wave
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from appliance.bench.report import _number
from appliance.cli.main import main
from tests.appliance.bench.tiny_server import TinyServer, tiny_server


@pytest.fixture
def server():
    with tiny_server() as server:
        yield server


@pytest.fixture
def other():
    with tiny_server() as server:
        yield server


def bench(server: TinyServer, out: Path, *options: str, code: int = 0, others: Sequence[str] = ()) -> dict:
    command = [
        "bench",
        server.url,
        *others,
        "--output-tokens",
        "5",
        "--output",
        str(out / "deep" / "result.json"),
        *options,
    ]
    assert main(command) == code
    return json.loads((out / "deep" / "result.json").read_text())


def test_a_closed_loop_sends_every_request_once_and_counts_it(server, tmp_path, capsys):
    result = bench(server, tmp_path, "-n", "13", "-C", "4")
    (endpoint,) = result["endpoints"]
    numbers = endpoint["summary"]
    assert (numbers["requests"], numbers["failures"], len(server.bodies)) == (13, 0, 13)
    assert numbers["output_tokens"] == sum(body["max_tokens"] for body in server.sent())
    assert (numbers["prompt_tokens"], numbers["cached_tokens"]) == (7 * 13, 3 * 13)
    assert numbers["output_tokens_per_second"] == pytest.approx(numbers["output_tokens"] / numbers["seconds"], rel=0.02)
    for name in ("time_to_first_token_ms", "request_ms"):
        assert 0 < numbers[name]["p50"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    assert result["machine"]["cores"] >= 1
    assert {path for path, _, _ in server.bodies} == {"/v1/chat/completions"}
    assert all(body["model"] == "tiny" and body["stream"] and body["ignore_eos"] for body in server.sent())
    shown = capsys.readouterr().out
    assert "output_tokens_per_second" in shown and "p99" in shown


def test_tokens_are_counted_without_usage_too(server, tmp_path):
    server.usage = False
    for api in ("chat", "completions"):
        server.bodies.clear()
        (endpoint,) = bench(server, tmp_path, "-n", "3", "--api", api)["endpoints"]
        assert endpoint["summary"]["output_tokens"] == sum(body["max_tokens"] for body in server.sent())


def test_the_same_seed_sends_the_same_requests(server, tmp_path):
    def sent(seed):
        server.bodies.clear()
        digest = bench(server, tmp_path, "-n", "7", "--seed", seed)["workload"]["digest"]
        return digest, sorted(json.dumps(body, sort_keys=True) for body in server.sent())

    first = sent("3")
    assert first == sent("3")
    changed = sent("4")
    assert first[0] != changed[0] and first[1] != changed[1]


def test_runs_without_a_seed_share_no_prompt_and_print_their_seed(server, tmp_path, capsys):
    seeds = [bench(server, tmp_path, "-n", "9")["settings"]["workload"]["seed"] for _ in range(2)]
    texts = [body["messages"][0]["content"] for body in server.sent()]
    assert len(set(texts)) == 18 and seeds[0] != seeds[1]
    shown = capsys.readouterr().out
    assert all(f"\nseed {seed}\n" in shown for seed in seeds)
    server.bodies.clear()
    bench(server, tmp_path, "-n", "9", "--seed", str(seeds[0]))
    assert sorted(body["messages"][0]["content"] for body in server.sent()) == sorted(texts[:9])


def test_each_round_has_prompts_of_its_own_and_warmup_is_not_measured(server, tmp_path):
    result = bench(server, tmp_path, "-n", "5", "--rounds", "3", "--warmup", "2")
    texts = [body["messages"][0]["content"] for body in server.sent()]
    assert len(texts) == len(set(texts)) == 3 * (5 + 2)
    (endpoint,) = result["endpoints"]
    assert endpoint["summary"]["requests"] == 15 and [one["requests"] for one in endpoint["rounds"]] == [5, 5, 5]
    assert len(set(result["workload"]["digest"])) == 3


def test_two_endpoints_get_the_same_requests_in_alternation(server, other, tmp_path, capsys):
    order = []
    for name, one in (("A", server), ("B", other)):
        one.bodies = Noted(order, name)
    result = bench(server, tmp_path, "-n", "4", "--rounds", "2", "-m", "a", "-m", "b", others=[other.url])
    assert "".join(order) == "AAAABBBBBBBBAAAA"
    for one in (server, other):
        assert len(one.bodies) == 8
    texts = [[body["messages"] for body in one.sent()] for one in (server, other)]
    key = json.dumps
    assert sorted(texts[0][:4], key=key) == sorted(texts[1][:4], key=key)
    assert {body["model"] for body in server.sent()} == {"a"} and {body["model"] for body in other.sent()} == {"b"}
    (ratios,) = result["ratios"].values()
    first, second = (each["rounds"] for each in result["endpoints"])
    name = "output_tokens_per_second"
    found = sorted(two[name] / one[name] for one, two in zip(first, second, strict=True))
    assert (ratios[name]["min"], ratios[name]["max"]) == pytest.approx((found[0], found[-1]))
    assert "ratio of B to A" in capsys.readouterr().out


class Noted(list):
    """A list that also notes in `order` that something was appended."""

    def __init__(self, order, name):
        super().__init__()
        self.order, self.name = order, name

    def append(self, value):
        self.order.append(self.name)
        super().append(value)


def test_the_turns_of_a_conversation_follow_its_replies(server, tmp_path):
    options = ("-n", "3", "--dataset", "conversations", "--turns", "3", "--prefix-tokens", "20", "-C", "1")
    result = bench(server, tmp_path, *options)
    assert result["workload"]["requests"] == 9 and len(server.bodies) == 9
    system = {body["messages"][0]["content"] for body in server.sent()}
    assert len(system) == 1, "one system message for all conversations"
    for start in (0, 3, 6):
        first, second, third = server.sent()[start : start + 3]
        assert [each["role"] for each in third["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
        assert third["messages"][:3] == second["messages"][:3] and second["messages"][:2] == first["messages"]
        for turn, at in ((first, start), (second, start + 1)):
            reply = third["messages"][2 * (at - start) + 2]["content"]
            assert reply == f"r{at} " * turn["max_tokens"]


def test_a_failed_turn_ends_its_conversation_and_counts_the_turns_after_it(server, tmp_path):
    server.broken = {1: "busy"}
    result = bench(server, tmp_path, "-n", "1", "--dataset", "conversations", "--turns", "4", "-C", "1", code=1)
    numbers = result["endpoints"][0]["summary"]
    assert (numbers["requests"], numbers["failures"], len(server.bodies)) == (4, 3, 2)
    assert numbers["errors"]["an earlier turn failed"] == 2


def test_requests_of_a_prefix_group_share_their_beginning(server, tmp_path):
    bench(server, tmp_path, "-n", "9", "--dataset", "prefix", "--prefixes", "2", "--prefix-tokens", "60", "-C", "1")
    texts = [body["messages"][0]["content"] for body in server.sent()]
    heads = [" ".join(text.split()[:30]) for text in texts]
    assert len(set(heads)) == 2 and len(set(texts)) == 9
    assert heads[0] == heads[2] == heads[8] and heads[1] == heads[3]


def test_lengths_follow_the_tokenizer_of_the_endpoint(server, tmp_path):
    server.tokens_per_word = 4
    result = bench(server, tmp_path, "-n", "2", "--input-tokens", "100", "--input-spread", "0")
    assert [len(body["messages"][0]["content"].split()) for body in server.sent()] == [25, 25]
    assert result["settings"]["workload"]["tokens_per_word"] == 4


def test_open_loop_sends_all_requests_and_names_its_rate(server, tmp_path):
    result = bench(server, tmp_path, "-n", "5", "--rate", "200..900", "--burstiness", "inf")
    arrivals = result["settings"]["loop"]["arrivals"]
    assert (arrivals["rate"], arrivals["last_rate"], arrivals["burstiness"]) == (200.0, 900.0, "inf")
    assert len(server.bodies) == 5


def test_objectives_give_goodput_and_the_exit_code(server, tmp_path):
    met = bench(server, tmp_path, "-n", "6", "--slo", "ttft=60s", "--slo", "tpot=60s", "--min-attainment", "1")
    numbers = met["endpoints"][0]["summary"]
    assert numbers["attainment"] == 1.0
    assert numbers["goodput_requests_per_second"] == pytest.approx(numbers["requests_per_second"])
    missed = bench(server, tmp_path, "-n", "6", "--slo", "ttft=0.001ms", "--min-attainment", "0.5", code=1)
    assert missed["endpoints"][0]["summary"]["attainment"] == 0.0
    assert missed["endpoints"][0]["summary"]["goodput_requests_per_second"] == 0.0


def test_key_and_extra_fields_are_sent_and_the_key_is_not_written(server, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_KEY", "k-1")
    options = ("-n", "3", "--api-key-env", "BENCH_KEY", "--body", '{"temperature": 0.5, "top_k": 3}', "--details")
    bench(server, tmp_path, *options, "--html", str(tmp_path / "report.html"))
    assert {key for _, _, key in server.bodies} == {"Bearer k-1"}
    assert all((body["temperature"], body["top_k"]) == (0.5, 3) for body in server.sent())
    for file in (tmp_path / "deep" / "result.json", tmp_path / "report.html"):
        assert "k-1" not in file.read_text()
    details = json.loads((tmp_path / "deep" / "result.json").read_text())["outcomes"]["endpoint"]
    assert sorted(each["output_tokens"] for each in details) == sorted(body["max_tokens"] for body in server.sent())


@pytest.mark.parametrize(
    ("how", "error"),
    [("busy", "HTTP 503"), ("error", "engine died"), ("cut", "ended before"), ("garbage", "not an OpenAI stream")],
)
def test_failures_are_reported_and_excluded_from_throughput(server, tmp_path, capsys, how, error):
    server.broken = {1: how}
    numbers = bench(server, tmp_path, "-n", "3", "-C", "1", code=1)["endpoints"][0]["summary"]
    assert (numbers["requests"], numbers["failures"]) == (3, 1)
    assert error in next(iter(numbers["errors"]))
    good = [body["max_tokens"] for number, body in enumerate(server.sent()) if number != 1]
    assert numbers["output_tokens"] == sum(good)
    assert error in capsys.readouterr().out


def test_the_report_is_one_page_with_the_numbers_and_a_line_for_each_endpoint(server, other, tmp_path):
    page = tmp_path / "report.html"
    result = bench(server, tmp_path, "-n", "5", "--rounds", "2", "--html", str(page), others=[other.url])
    text = page.read_text()
    assert not re.search(r"""(src|href)=|url\(""", text), "the page loads nothing"
    assert text.count("<svg") == 4 and text.count("<polyline") == 8
    for endpoint in result["endpoints"]:
        assert f"<td>{_number(endpoint['summary']['output_tokens_per_second'])}</td>" in text
    latencies = re.findall(r"<tr><td>([^<]*)</td><td>([AB])</td>((?:<td>[^<]*</td>){5})</tr>", text)
    assert [label for _, label, _ in latencies] == ["A", "B"] * 4 and latencies[0][0] == "time to first token"
    assert "workload.input.median" in text and "NaN" not in text
    tags = re.findall(r"<(/?)(table|tr|td|th|figure|svg|h1|h2|div|body|html)\b", text)
    assert sum(1 for close, _ in tags if close) == sum(1 for close, _ in tags if not close)


def test_a_missing_server_is_a_one_line_error(capsys):
    assert main(["bench", "http://127.0.0.1:9", "-n", "1"]) == 2
    assert capsys.readouterr().err.startswith("slipway bench: http://127.0.0.1:9: ConnectError")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["-n", "0"], "--requests 0: use a number above 0"),
        (["-C", "0"], "--concurrency 0"),
        (["--rate", "0"], "--rate 0: use sessions per second"),
        (["--rate", "1..x"], "--rate 1..x"),
        (["--max-concurrency", "3"], "use --concurrency without --rate"),
        (["--slo", "ttft=5"], "--slo ttft=5: use ttft, tpot, request with a limit"),
        (["--slo", "speed=5s"], "--slo speed=5s"),
        (["--body", "[1]"], "--body: use a JSON object"),
        (["--body", "{"], "--body: not JSON"),
        (["-m", "a", "-m", "b"], "--model: 2 names for 1 URLs"),
        (["--seed", "-1"], "--seed: use 0 or more"),
        (["--pause", "-1"], "--pause: use 0 or more"),
        (
            ["--dataset", "pirates"],
            "--dataset pirates: use one of random, prefix, conversations, images, audio, sharegpt:FILE",
        ),
        (["--dataset", "conversations", "--api", "completions"], "need --api chat"),
        (["--dataset", "jsonl:/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options_are_one_line_errors(server, wrong, words, capsys):
    assert main(["bench", server.url, *wrong]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not server.bodies


def test_a_file_that_cannot_be_written_leaves_the_printed_result(server, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", server.url, "-n", "2", "--output", str(tmp_path / "file" / "result.json")]) == 2
    shown = capsys.readouterr()
    assert "output_tokens_per_second" in shown.out and "slipway bench: " in shown.err and shown.err.count("\n") == 1


def test_a_message_without_content_needs_the_chat_route(server, tmp_path, capsys):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"messages": [{"role": "assistant", "tool_calls": []}]}')
    assert main(["bench", server.url, "--dataset", f"jsonl:{file}", "--api", "completions"]) == 2
    assert "need --api chat" in capsys.readouterr().err


def test_images_are_pictures_of_the_size_that_no_other_request_has(server, tmp_path):
    bench(server, tmp_path, "-n", "3", "--dataset", "images", "--images", "2", "--image-size", "50x20", "--seed", "1")
    urls = [part["image_url"]["url"] for body in server.sent() for part in body["messages"][0]["content"][1:]]
    assert len(urls) == len(set(urls)) == 6
    image = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2])))
    assert (image.size, image.mode) == ((50, 20), "RGB") and len(image.getcolors()) > 4
    assert all(body["messages"][0]["content"][0]["text"] for body in server.sent())


def clips(folder: Path, *seconds: float) -> Path:
    folder.mkdir(parents=True)
    for number, duration in enumerate(seconds):
        with wave.open(str(folder / f"{number}.wav"), "wb") as writer:
            writer.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
            writer.writeframes(bytes(2 * round(8000 * duration)))
    return folder


@pytest.mark.parametrize(("bounds", "seconds"), [("1..40", [1, 10, 40]), ("1..39.9", [1, 10]), ("1.1..10", [10])])
def test_recordings_within_the_range_are_transcribed_and_rtfx_is_their_rate(server, tmp_path, bounds, seconds):
    folder = clips(tmp_path / "clips", 1, 10, 40)
    result = bench(server, tmp_path, "--dataset", f"audio:{folder}", "--audio-range", bounds)
    numbers = result["endpoints"][0]["summary"]
    assert numbers["audio_seconds"] == sum(seconds) and numbers["requests"] == len(seconds)
    assert numbers["rtfx"] == pytest.approx(sum(seconds) / numbers["seconds"], rel=0.02)
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (9 * len(seconds), 2 * len(seconds))
    assert {path for path, _, _ in server.bodies} == {"/v1/audio/transcriptions"}
    assert {fields["file"] for fields in server.sent()} == {
        file.read_bytes() for file, at in zip(sorted(folder.iterdir()), (1, 10, 40), strict=True) if at in seconds
    }


def test_generated_recordings_have_durations_and_other_workloads_no_rtfx(server, tmp_path):
    server.usage = False
    result = bench(server, tmp_path, "-n", "4", "--dataset", "audio", "--audio-seconds", "2", "--warmup", "1")
    sizes = [len(fields["file"]) for fields in server.sent()[1:]]
    assert result["endpoints"][0]["summary"]["audio_seconds"] == sum(size - 44 for size in sizes) / 32_000
    assert "rtfx" not in bench(server, tmp_path, "-n", "2")["endpoints"][0]["summary"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dataset", "audio:absent"), "not a folder"),
        (("--dataset", "images", "--image-size", "448"), "--image-size 448"),
        (("--dataset", "audio", "--audio-range", "9..1"), "--audio-range 9..1"),
        (("--dataset", "images", "--images", "0"), "--images 0"),
    ],
)
def test_wrong_options_of_media_are_named(server, capsys, options, message):
    assert main(["bench", server.url, *options]) == 2
    assert message in capsys.readouterr().err
