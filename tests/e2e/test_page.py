"""Tests of the page in a real Chromium against the demo.

They need playwright and a Chromium; tests without a browser are in tests/appliance/server/http/test_page.py."""

import base64
import json
import os
import signal
import threading

import httpx
import pytest

from engine.media.audio import read_audio
from tests.appliance.server.http.image_models import data_url, picture, png, wav
from tests.e2e.browser import CHROMIUM, Chromium, Pages, StoodStill, in_browser, pids

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[browser]")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as session:
        browser = Chromium(session)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, demo):
    pages = Pages(chromium, demo.url)
    yield pages
    pages.forget()


def replied(page, count=1):
    page.locator(".turn.assistant .retry").nth(count - 1).wait_for()
    return page.locator(".turn.assistant .content").nth(count - 1).inner_text()


@in_browser
def test_a_question_is_answered_with_thinking_folded(open_page):
    page = open_page()
    page.select_option("select[name=thinking]", "on")
    page.fill("#prompt", "What is 17 + 25?")
    page.keyboard.press("Enter")
    assert "42" in replied(page)
    thought = page.locator(".thought")
    assert not thought.is_visible()
    page.locator(".thinking summary").click()
    assert thought.is_visible() and "7 + 5" in thought.inner_text()
    page.get_by_role("button", name="timeline").click()
    page.wait_for_selector(".timeline")
    assert "first token" in page.locator("#why-body").inner_text()


@in_browser
def test_a_call_is_shown_and_its_result_goes_on(open_page):
    page = open_page()
    page.get_by_role("button", name="What is the weather in Oslo?").click()
    page.wait_for_selector("form.results")
    assert page.locator(".call code").inner_text() == "get_weather"
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    page.locator("form.results button").click()
    assert "rain" in replied(page, 2)


@in_browser
def test_text_of_a_model_is_text(open_page):
    page = open_page()
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": hostile}, "finish_reason": "stop"}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"content-type": "text/event-stream"}, body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        ),
    )
    page.fill("#prompt", hostile)
    page.keyboard.press("Enter")
    assert replied(page) == hostile
    assert page.locator("#log img, #log script").count() == 0 and page.title() not in ("1", "2")


PICTURE = data_url(png(picture()))
PUT = """([kind, bytes, name]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: data })
    : new DragEvent(kind, { ...options, dataTransfer: data });
  document.querySelector("#prompt").dispatchEvent(event);
}"""


def reads(page, *modalities):
    """Let the page find a model with these modalities; returns the bodies that the page then sends."""
    cards = [{"id": "eyes", "max_model_len": 512, "input_modalities": list(modalities)}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.reload()
    page.wait_for_selector("#attach:visible")
    sent = []
    answer(page, "a cat", sent)
    return sent


@in_browser
def test_pictures_are_chosen_dropped_and_pasted(open_page):
    """Each is shown before and after sending; one is removed; the curl command does not have the complete data."""
    page = open_page()
    sent = reads(page, "text", "image")
    assert not page.locator("#record").is_visible()
    data = png(picture())
    page.set_input_files("#file", [{"name": "one.png", "mimeType": "image/png", "buffer": data}])
    page.wait_for_selector("#tray img")
    page.evaluate(PUT, ["drop", list(data), "two.png"])
    page.wait_for_selector("#tray img >> nth=1")
    page.evaluate(PUT, ["paste", list(data), "three.png"])
    page.wait_for_selector("#tray img >> nth=2")
    page.get_by_role("button", name="Remove two.png").click()
    assert page.locator("#tray img").count() == 2
    page.set_input_files("#file", [{"name": "b.wav", "mimeType": "audio/wav", "buffer": b"x"}])
    page.wait_for_selector("#attach-note:visible")
    assert page.locator("#attach-note").inner_text() == "b.wav is not added: the model reads text, image."
    page.fill("#prompt", "What is this?")
    curl = page.locator("#curl").text_content()
    assert "data:image/png;base64," in curl and len(curl) < 1500
    page.keyboard.press("Enter")
    assert replied(page) == "a cat"
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    assert sent[0]["messages"] == [{"role": "user", "content": [part, part, {"type": "text", "text": "What is this?"}]}]
    assert page.locator(".turn.user .sent img").count() == 2 and not page.locator("#tray").is_visible()
    assert not page.locator("#attach-note").is_visible()
    page.locator(".turn.user .edit").click()
    assert page.locator("#tray img").count() == 2 and page.input_value("#prompt") == "What is this?"


@in_browser
def test_a_recording_is_sent_with_the_message(open_page):
    page = open_page()
    sent = reads(page, "text", "audio")
    page.click("#record")
    page.wait_for_selector("#record.danger")
    page.wait_for_timeout(1500)  # the beeps are a second apart
    page.click("#record")
    page.wait_for_selector("#tray audio")
    page.click("#send")
    assert replied(page) == "a cat"
    (part,) = sent[0]["messages"][0]["content"]
    head, _, data = part["audio_url"]["url"].partition(",")
    assert part["type"] == "audio_url" and head == "data:audio/webm;base64"
    samples = read_audio(base64.b64decode(data), max_seconds=60)
    assert len(samples) > 1600 and abs(samples).max() > 0.01, "the microphone of the browser beeps"


@in_browser
def test_a_speech_model_transcribes_a_recording(open_page):
    page = open_page()
    reads(page, "audio")
    page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(json={"text": "hello there"}))
    page.set_input_files("#file", [{"name": "a.wav", "mimeType": "audio/wav", "buffer": wav()}])
    page.wait_for_selector("#tray audio")
    with page.expect_request("**/v1/audio/transcriptions") as request:
        page.click("#send")
    assert 'name="file"; filename="a.wav"' in request.value.post_data_buffer.decode("latin1")
    page.wait_for_selector(".turn.assistant .content")
    assert page.locator(".turn.assistant .content").inner_text() == "hello there"


MARKDOWN = """# Result

Some **bold**, *slanted* and `inline <code>` text, a [link](https://example.org/x) and a [trap](javascript:alert(1)).

- [x] first
- second
  1. inner

| name | size |
|---|--:|
| a | 1 |

> quoted

```python
print("<b>")
```

<img src=x onerror="document.title=1">
"""


def answer(page, text, sent=None):
    """Reply to all requests with a text. sent: a list that gets their bodies."""
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}

    def reply(route):
        if sent is not None:
            sent.append(route.request.post_data_json)
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(headers={"content-type": "text/event-stream"}, body=body)

    page.route("**/v1/chat/completions", reply)


@in_browser
def test_markdown_of_a_model_is_shown_as_elements(open_page):
    page = open_page()
    answer(page, MARKDOWN)
    page.fill("#prompt", "Show me")
    page.keyboard.press("Enter")
    replied(page)
    content = page.locator(".turn.assistant .content")
    counts = {
        css: content.locator(css).count() for css in ("h3", "strong", "em", "ul > li", "ol > li", "td", "blockquote")
    }
    assert counts == {"h3": 1, "strong": 1, "em": 1, "ul > li": 2, "ol > li": 1, "td": 2, "blockquote": 1}
    assert content.locator("a").get_attribute("href") == "https://example.org/x" and content.locator("a").count() == 1
    assert content.locator("figure code").inner_text() == 'print("<b>")'
    assert content.locator("img").count() == 0 and "onerror" in content.inner_text() and page.title() != "1"


@in_browser
def test_code_and_replies_are_copied(open_page):
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer(page, MARKDOWN)
    page.fill("#prompt", "Show me")
    page.keyboard.press("Enter")
    replied(page)
    for name, copied in (("Copy code", 'print("<b>")'), ("Copy reply", MARKDOWN)):
        page.get_by_role("button", name=name).click()
        page.get_by_role("button", name=name).filter(has_text="copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == copied


@in_browser
def test_a_reply_is_retried_and_a_question_edited(open_page):
    page = open_page()
    page.fill("input[name=temperature]", "0")
    page.fill("#prompt", "What is 17 + 25?")
    page.keyboard.press("Enter")
    first = replied(page)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator(".retry").click()
    assert [each["role"] for each in json.loads(asked.value.post_data)["messages"]] == ["user"]
    assert replied(page) == first
    page.locator(".turn.user .edit").click()
    assert page.locator(".turn").count() == 0 and page.input_value("#prompt") == "What is 17 + 25?"
    page.fill("#prompt", "What is 20 + 22?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert json.loads(asked.value.post_data)["messages"] == [{"role": "user", "content": "What is 20 + 22?"}]
    replied(page)


@in_browser
def test_the_page_of_the_api_shows_operations_and_sends_one(open_page, demo):
    page = open_page()
    faults = []
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.goto(f"{demo.url}/docs")
    page.locator("#operations-Operation-load_load_get").click()
    page.get_by_role("button", name="Execute").click()
    page.locator(".live-responses-table .response .highlight-code", has_text="server_load").wait_for()
    assert page.locator(".opblock").count() > 20 and faults == []


@in_browser
def test_load_before_the_page_was_opened_is_drawn(open_page, eventually, demo):
    eventually("two samples", lambda: len(httpx.get(f"{demo.url}/load/history").json()["running"]) > 2)
    page = open_page(view="#status")
    page.locator("#tiles .spark polyline").first.wait_for(state="attached")
    points = page.locator("#tiles .spark polyline").first.get_attribute("points")
    assert len(points.split()) > 2


@in_browser
def test_a_stream_is_stopped_and_a_mistake_told(open_page, demo, eventually):
    page = open_page()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({**json.loads(route.request.post_data), "ignore_eos": True, "temperature": 1.5})
        ),
    )
    page.fill("#prompt", "Tell me of the sea")
    page.keyboard.press("Enter")
    page.locator(".live .content p").first.wait_for()
    page.click("#stop")
    replied(page)
    eventually("the request is gone", lambda: demo.metric("slipway_requests_running") == 0)
    page.fill("input[name=max_tokens]", "99999")
    page.fill("#prompt", "Again")
    page.keyboard.press("Enter")
    assert "max_model_len" in page.locator("#log .fault").inner_text()
    assert page.input_value("#prompt") == "Again"


@in_browser
def test_nothing_is_wider_than_the_window(open_page):
    page = open_page()
    for width, scheme in ((360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.reload()
        page.wait_for_selector("#phase.good")
        for tab in ("#tab-status", "#tab-playground"):
            page.click(tab)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme, tab)
    assert page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].every((each) => each.labels.length)"
    )


@in_browser
def test_the_status_shows_what_runs(open_page, demo):
    page = open_page(view="#status")
    body = {"model": "demo", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
    asking = threading.Thread(target=lambda: httpx.post(f"{demo.url}/v1/completions", json=body, timeout=250))
    asking.start()
    page.locator(".badge.now").first.wait_for()
    assert "engine-0" in page.locator("#engines").inner_text()
    asking.join()
    page.locator("#recent .badge.done", has_text="length").first.wait_for()
    page.locator("#recent button").first.click()
    page.wait_for_selector(".timeline .events li")


@in_browser
def test_the_key_stays_in_the_tab(open_page):
    page = open_page()
    page.click("#key-open")
    page.fill("#key", "top-secret")
    with page.expect_request("**/v1/models") as asked:
        page.keyboard.press("Enter")
    assert asked.value.headers["authorization"] == "Bearer top-secret"
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [["top-secret"], 0]
    page.locator("#curl-box summary").click()
    assert "top-secret" not in page.content() + page.url and "$SLIPWAY_KEY" in page.locator("#curl").inner_text()


def stand_still():
    for pid in pids():
        os.kill(pid, signal.SIGSTOP)


def test_a_browser_that_stands_still_is_replaced_and_its_test_tried_once_more(open_page):
    tried = []

    def test(open_page):
        page = open_page()
        tried.append(page)
        if len(tried) == 1:
            stand_still()
        assert page.evaluate("1 + 1") == 2

    in_browser(test, limit_s=25.0)(open_page)
    assert len(tried) == 2


def test_what_the_page_does_wrong_is_not_tried_again_and_one_that_stands_still_is_named(open_page):
    tried = []

    def wrong(open_page):
        tried.append(open_page())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_browser(wrong)(open_page)
    assert len(tried) == 1

    with pytest.raises(StoodStill), open_page.chromium.watched(3.0):
        stand_still()
        tried[0].evaluate("1 + 1")
