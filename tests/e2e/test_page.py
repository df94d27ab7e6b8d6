"""The page in a real Chromium, against the demo: what a person sees and does. Runs where playwright and a Chromium are
installed; what needs no browser is in tests/appliance/http/test_page.py."""

import json
import shutil
import threading

import httpx
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[browser]")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, demo):
    """Opens the page, ready; what a browser complains of, and requests to elsewhere, fail the test."""
    contexts, faults = [], []

    def opened(width=1280, height=800, scheme="light", url=demo.url, **wanted):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or faults.append(request.url))
        page.on("console", lambda line: line.type == "error" and faults.append(line.text))
        page.goto(f"{url}/{wanted.get('view', '')}")
        page.wait_for_selector("#phase.good")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not [fault for fault in faults if "status of 40" not in fault]


def replied(page, count=1):
    page.locator(".turn.assistant .facts button").nth(count - 1).wait_for()
    return page.locator(".turn.assistant .content").nth(count - 1).inner_text()


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
    page.locator(".facts button").click()
    page.wait_for_selector(".story")
    assert "first token" in page.locator("#why-body").inner_text()


def test_a_call_is_shown_and_its_result_goes_on(open_page):
    page = open_page()
    page.get_by_role("button", name="What is the weather in Oslo?").click()
    page.wait_for_selector("form.results")
    assert page.locator(".call code").inner_text() == "get_weather"
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    page.locator("form.results button").click()
    assert "rain" in replied(page, 2)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(open_page, width, scheme):
    page = open_page(width=width, scheme=scheme)
    for tab in ("#tab-status", "#tab-playground"):
        page.click(tab)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].every((each) => each.labels.length)"
    )


def test_the_status_shows_what_runs(open_page, demo):
    page = open_page(view="#status")
    body = {"model": "demo", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
    asking = threading.Thread(target=lambda: httpx.post(f"{demo.url}/v1/completions", json=body, timeout=60))
    asking.start()
    page.locator(".badge.now").first.wait_for()
    assert "engine-0" in page.locator("#engines").inner_text()
    asking.join()
    page.locator("#recent .badge.done", has_text="length").first.wait_for()
    page.locator("#recent button").first.click()
    page.wait_for_selector(".story .events li")


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
