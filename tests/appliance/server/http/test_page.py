"""The page at /: contents of its files and access to them; its pure modules in V8, against the real gateway."""

import asyncio
import json
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from py_mini_racer import MiniRacer

from appliance.security.keys import parse_keys
from appliance.server.admin import page
from appliance.server.app import routers
from appliance.server.process import load_text
from appliance.server.speech.routes import router as speech
from engine.metrics.families import counters
from tests.appliance.conftest import FakeEngine, until
from tests.appliance.conftest import Gateway as LiveGateway

LOAD_TEXT = load_text  # before `start_gateway` puts another in its place
FOLDER = Path(page.__file__).parent / "static"
TEXTS = {path.name: path.read_text() for path in FOLDER.iterdir()}
LIBRARIES = {"marked.js"}  # as published; only its lexer is used, which returns data
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js") and name not in LIBRARIES}
SETTINGS = {
    **{"system": "", "temperature": "", "top_p": "", "top_k": "", "max_tokens": "", "seed": "", "thinking": "auto"},
    **{"format": "text", "schema": "", "regex": "", "tools": "", "choice": "auto"},
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def live(
    start_gateway: Callable[..., LiveGateway], engine: FakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> LiveGateway:
    """A gateway with text over a fake engine, on a port."""
    monkeypatch.setattr("appliance.server.process.load_text", LOAD_TEXT)
    return start_gateway(engine, model=str(checkpoint), vocab_size=420)


def module(name: str) -> MiniRacer:
    """A module without imports, its exports as globals."""
    assert not re.search(r"^import ", SCRIPTS[name], re.MULTILINE)
    engine = MiniRacer()
    engine.eval(re.sub(r"^export (?=async|function|const|class)", "", SCRIPTS[name], flags=re.MULTILINE))
    return engine


def get(gateway: Any, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with gateway.client() as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(call())


# Files


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_script_reads_text_as_html_or_code(name: str) -> None:
    forbidden = (
        *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment", "DOMParser"),
        *("eval(", "new Function", "setHTML", "srcdoc", "localStorage", "document.cookie", "javascript:", "import("),
    )
    assert not [each for each in forbidden if each in SCRIPTS[name]]


def test_nothing_is_fetched_from_elsewhere_and_nothing_is_inline() -> None:
    own = [text for name, text in TEXTS.items() if name not in LIBRARIES]
    addresses = {found for text in own for found in re.findall(r"(?:https?:)?//[\w.]+\.[\w./]+", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}
    html = TEXTS["index.html"]
    assert not re.search(r"\s(?:on\w+|style)=|<style|<script(?![^>]* src=)", html)
    assert "url(" not in TEXTS["style.css"] and "@import" not in TEXTS["style.css"]


def test_every_page_file_is_served_and_used() -> None:
    assert {*page.FILES, page.INDEX} == set(TEXTS)
    used = set(re.findall(r'(?:src|href)="page/([^"]+)"', TEXTS["index.html"]))
    used |= {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert used == set(page.FILES)


def test_only_the_lexer_of_the_markdown_library_is_used() -> None:
    imports = [line for text in SCRIPTS.values() for line in text.splitlines() if "marked.js" in line]
    assert imports[0].startswith("// ") and imports[1:] == ['import { Lexer } from "./marked.js";']


def test_elements_that_scripts_name_are_on_the_page() -> None:
    ids = re.findall(r'\bid="([^"]+)"', TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    named = {name for text in SCRIPTS.values() for name in re.findall(r'\$\("([^"]+)"\)', text)}
    assert len(named) > 25 and not named - set(ids)
    labelled = set(re.findall(r'(?:aria-labelledby|for)="([^"]+)"', TEXTS["index.html"]))
    assert not labelled - set(ids)


def test_the_key_is_never_part_of_an_address() -> None:
    assert [name for name, text in SCRIPTS.items() if "sessionStorage" in text] == ["api.js"]
    for text in SCRIPTS.values():
        assert not re.search(r"\$\{key\(\)\}(?!` \})|location\.\w+ = |pushState|replaceState", text)
    assert SCRIPTS["api.js"].count("key()}") == 1 and "authorization: `Bearer ${key()}`" in SCRIPTS["api.js"]


def test_routes_called_by_the_page_exist(live: LiveGateway) -> None:
    """Every path of its table is a route, every metric that it reads a family."""
    block = re.search(r"export const ROUTES = \{(.*?)\n\};", SCRIPTS["api.js"], re.DOTALL)
    assert block is not None
    paths = {
        "/" + re.sub(r"\$\{.*?\}", "x", path) for path in re.findall(r'["`]([\w/${}().]+)(?:\?[\w=]+)?["`]', block[1])
    }
    assert len(paths) == 9
    speech_routes = speech.routes  # which a model without speech does not have
    served = [route.path_regex for router in routers(live.service) for route in router.routes]
    served += [route.path_regex for route in speech_routes]
    assert not [path for path in paths if not any(regex.match(path) for regex in served)]
    assert not [name for name, text in SCRIPTS.items() if name != "api.js" and "fetch(" in text]
    metrics = set(re.findall(r'"(slipway_\w+)"', SCRIPTS["status.js"]))
    families = text_string_to_metric_families(live.client.get("/metrics").text)
    told = {name for family in families for name in (family.name, *(sample.name for sample in family.samples))}
    told |= {f"slipway_{one.name}_total" for one in counters() if one.speculative}  # shown with speculation alone
    assert not metrics - told
    assert len(metrics) > 12


# Access to the files


def test_files_are_served_as_they_are_under_a_strict_policy(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway()
    gateway.service.set_keys(parse_keys(["secret"], "keys"))
    for path in sorted(page.PATHS):
        reply = get(gateway, path)
        assert reply.status_code == 200
        assert reply.content == (FOLDER / (path.rpartition("/")[2] or page.INDEX)).read_bytes()
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = get(gateway, path, **{"if-none-match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content


def test_only_files_of_the_page_need_no_key(make_gateway: Callable[..., Any]) -> None:
    """RT-02: only GET requests for exact names are open; any other path is guarded. A trailing slash is ignored."""
    gateway = make_gateway()
    gateway.service.set_keys(parse_keys(["secret"], "keys"))
    guarded = [
        *("/page", "/page/", "/page/other.js", "/page/index.html", "/page//main.js", "/index.html"),
        *("/page/../v1/models", "/page/%2e%2e/page.py", "/page/main.js%00", "/PAGE/main.js", "/page/Main.js"),
        *("/v1/models", "/v1/requests", "/v1/requests/x/why", "/load", "/docs/LICENSE", "/openapi.json"),
    ]  # fmt: skip
    assert {path: get(gateway, path).status_code for path in guarded} == dict.fromkeys(guarded, 401)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(gateway, "/", method).status_code == get(gateway, "/page/main.js", method).status_code == 401
    assert get(gateway, "/", "HEAD").status_code == get(gateway, "/page/main.js/").status_code == 200
    keyless = make_gateway()
    for name in ("other.js", "page.py", "%2e%2e%2fpage.py", "main.js%00", ""):
        assert get(keyless, f"/page/{name}").status_code == 404, name
    off = make_gateway(**{"endpoints.page": False})
    assert {get(off, path).status_code for path in page.PATHS} == {404}
    off.service.set_keys(parse_keys(["secret"], "keys"))
    assert {get(off, path).status_code for path in page.PATHS} == {401}


# Its modules


def test_a_body_of_the_knobs_is_served_and_its_stream_read(gateway: Any) -> None:
    """The page's request runs through the application, and its stream adds up to the complete reply."""
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    cases: list[dict[str, str]] = [
        {},
        {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "60", "seed": "5"},
        {"thinking": "on"},
        {"thinking": "off"},
        {"tools": tools},
        {"format": "json_object"},
        {"format": "json_schema", "schema": '{"type": "object"}'},
        {"format": "regex", "regex": "[a-z]+"},
    ]
    reader = module("reply.js")
    for case in cases:
        call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        text = call if "tools" in case else "hello \u4e2d"
        gateway.says(f"<think>\nso\n</think>\n\n{text}" if case.get("thinking") == "on" else text, each=2)
        body = module("request.js").call("bodyOf", {**SETTINGS, **case}, HELLO, "qwen")
        records = gateway.stream("/v1/chat/completions", body)
        reader.eval("r = newReply()")
        for record in records:
            reader.eval(f"take(r, {json.dumps(record)})")
        reply = json.loads(reader.eval("JSON.stringify(r)"))
        whole = {key: value for key, value in body.items() if not key.startswith("stream")}
        status, answer = gateway.post("/v1/chat/completions", whole)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert (reply["content"] or None) == (choice["message"]["content"] or None)
        assert (reply["reasoning"] or None) == choice["message"]["reasoning"]
        assert reply["finish"] == choice["finish_reason"] and reply["usage"] == answer["usage"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"].get("tool_calls", [])
        ]
        assert [(call["name"], call["arguments"]) for call in reply["calls"]] == calls
        message = json.loads(reader.eval("JSON.stringify(messageOf(r))"))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in reply["calls"]]
        assert gateway.post("/v1/chat/completions", {"messages": [*HELLO, message, *results, *HELLO]})[0] == 200
    assert gateway.submits[3].sampling.top_k == 7 and gateway.submits[3].max_tokens == 60


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ({"tools": "[nope"}, "tools"),
        ({"tools": "{}"}, "tools"),
        ({"format": "json_schema", "schema": "{"}, "schema"),
        ({"format": "regex"}, "regex"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_a_mistake_names_its_knob(case: dict[str, str], field: str) -> None:
    engine = module("request.js")
    given = json.dumps({**SETTINGS, **case})
    found = engine.eval(f"try {{ bodyOf({given}, [], 'm'); '' }} catch (error) {{ error.field }}")
    assert found == field


@pytest.mark.parametrize("text", ["it's", "a\nb", '$HOME `x` \\ "q"', "'''", "\u2028 \u4e2d"])
def test_the_command_is_the_same_request(text: str) -> None:
    engine = module("request.js")
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    command = engine.call("curlOf", body, "http://h/v1/chat/completions", True)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", "http://h/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1]) == body
    assert "authorization: Bearer $SLIPWAY_KEY" in words
    assert "authorization" not in engine.call("curlOf", body, "http://h/", False)


def test_records_are_read_however_the_stream_is_cut(gateway: Any) -> None:
    lines = gateway.says("hello \u4e2d world").lines("/v1/chat/completions", {"messages": HELLO})
    text = ": keep-alive\n\n" + "\n\n".join(lines) + "\n\n"
    engine = MiniRacer()
    source = SCRIPTS["api.js"]
    part = source[source.index("export function cut") : source.index("// Streams a chat")]
    engine.eval(re.sub(r"^export ", "", part, flags=re.MULTILINE))
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    wanted = [json.loads(line[6:]) for line in lines[:-1]] + [None]
    for _ in range(20):
        buffer, found, at = "", [], 0
        while at < len(text):
            size = chance.choice((1, 2, 7, 50, 400))
            result = json.loads(engine.eval(f"JSON.stringify(cut({json.dumps(buffer + text[at : at + size])}))"))
            found, buffer, at = found + result["records"], result["rest"], at + size
        assert found == wanted and buffer == ""


def test_metrics_are_read_as_prometheus_client_reads_them(live: LiveGateway) -> None:
    live.service.metrics.observe("time_to_first_token_seconds", 0.3, "0")
    text = live.client.get("/metrics").text
    engine = module("numbers.js")
    engine.eval(f"m = read({json.dumps(text)})")
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    assert len(sums) > 60
    ours = json.loads(engine.eval(f"JSON.stringify({json.dumps(list(sums))}.map((name) => sum(m, name)))"))
    assert dict(zip(sums, ours, strict=True)) == pytest.approx(sums)
    labels = 'a{x="1",y="q\\"}, z"} 2\na{x="2",y=""} 3\n'
    assert engine.eval(f"sum(read({json.dumps(labels)}), 'a', {{x: '1'}})") == 2


def test_quantiles_are_those_of_the_values_within_a_bucket() -> None:
    """The exact quantile of the sorted values is in the same bucket as the estimate."""
    engine, chance = module("numbers.js"), random.Random(3)
    bounds = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0]
    for size in (1, 2, 7, 100):
        values = sorted(chance.uniform(0.0, 4.9) ** 2 / 5 for _ in range(size))
        cumulative = [[bound, sum(value <= bound for value in values)] for bound in bounds]
        engine.eval(f"c = {json.dumps(cumulative)}; c.push([Infinity, {size}])")
        for share in (0.5, 0.9, 0.99):
            told = engine.eval(f"quantile(c, {share})")
            true = values[max(0, -(-int(share * size * 1000) // 1000) - 1)]
            upper = next(bound for bound in bounds if true <= bound)
            lower = max([0.0, *(bound for bound in bounds if bound < true)])
            assert lower <= told <= upper, (size, share)
    assert (
        engine.eval("quantile([], 0.5)") is None and engine.eval("quantileText([[0.3, 4], [1, 4]], 0.5)") == "< 300 ms"
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [([[1, 2], [2, 5]], [[1, 3], [2, 9]], [[1, 1], [2, 4]]), ([[1, 9], [2, 9]], [[1, 1], [2, 2]], [[1, 1], [2, 2]])],
)
def test_a_service_that_began_anew_is_counted_from_nothing(before: Any, after: Any, expected: Any) -> None:
    engine = module("numbers.js")
    assert json.loads(engine.eval(f"JSON.stringify(between({before}, {after}))")) == expected
    assert engine.eval("rate(100, 40, 2)") == 20 and engine.eval("rate(40, 100, 2)") == 30


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    engine = module("reply.js")
    assert engine.call("pretty", '{"a":') == '{"a":'


# The list of requests


def test_requests_of_late_are_listed_newest_first(live: LiveGateway) -> None:
    live.service.set_keys(parse_keys(["secret"], "keys"))
    client, key = live.client, {"authorization": "Bearer secret"}
    assert client.get("/v1/requests").status_code == 401
    assert client.get("/v1/requests", headers=key).json() == {"data": []}
    for limit in (0, 201, "x"):
        assert client.get("/v1/requests", params={"limit": limit}, headers=key).status_code == 400
    for name in ("one", "two", "three"):
        body = {"prompt": [5, 6, 7], "max_tokens": 4}
        reply = client.post("/v1/completions", json=body, headers={**key, "x-request-id": name})
        assert reply.status_code == 200

    def listed(**params: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.get("/v1/requests", params=params, headers=key).json()["data"]
        return found

    until("all are over", lambda: [one["state"] for one in listed()] == ["over"] * 3)
    assert [one["id"] for one in listed()] == ["three-0", "two-0", "one-0"]
    assert [one["id"] for one in listed(limit=1)] == ["three-0"]
    assert {(one["prompt_tokens"], one["tokens"], one["finish"]) for one in listed()} == {(3, 4, "length")}


def test_a_summary_has_state_tokens_and_times() -> None:
    from appliance.server.routing.timeline import Arrived, Finished, FirstToken, Placed, Timelines

    timelines = Timelines(3)
    for name, at in (("a", 10.0), ("b", 11.0), ("c", 12.0), ("d", 13.0)):
        timelines.begin(f"{name}-0#1")
        timelines.add(f"{name}-0#1", at, Arrived(7, 0, 0))
    timelines.add("c-0#1", 12.5, Placed("0", 0))
    timelines.add("d-0#1", 13.25, FirstToken())
    timelines.add("b-0#1", 11.5, FirstToken())
    timelines.add("b-0#1", 12.0, Finished("length", 9))
    told = {one["id"]: one for one in (timeline.summary(14.0) for timeline in timelines.newest())}
    assert list(told) == ["d-0", "c-0", "b-0"]
    assert told["b-0"] == {
        **{"id": "b-0", "state": "over", "prompt_tokens": 7, "tokens": 9, "finish": "length"},
        **{"ttft_ms": 500.0, "age_ms": 3000.0, "duration_ms": 1000.0},
    }
    assert (told["c-0"]["state"], told["c-0"]["ttft_ms"], told["c-0"]["duration_ms"]) == ("gateway", None, None)
    assert (told["d-0"]["state"], told["d-0"]["ttft_ms"]) == ("decode", 250.0)
