"""Templates that take too much memory or time cost a request and nothing else."""

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.chat_templates.renderers import Renderers
from appliance.chat_templates.template import ChatTemplate, TemplateError
from engine.api.errors import RequestError

MESSAGES = [{"role": "user", "content": "hello"}]
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
SIZE = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = GROW %}{% endfor %}{{ ns.x | length }}"
)
HUNGRY = {
    "width": "{{ '%9999999999d' % 1 }}",
    "width of a format filter": "{{ '%9999999999d' | format(1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "power": "{{ 2 ** (10 ** 9) % 7 }}",
    "power in a dead branch": "{% if false %}{{ 3 ** (10 ** 9) % 7 }}{% endif %}{{ 3 ** (10 ** 9) % 7 }}",
    "product": "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "repetition": "{{ ('a' * 10 ** 10) | length }}",
    "list": "{{ ([1] * 10 ** 10) | length }}",
    "addition": SIZE.replace("GROW", "ns.x + ns.x"),
    "concatenation": SIZE.replace("GROW", "ns.x ~ ns.x"),
    "join": SIZE.replace("GROW", "[ns.x, ns.x] | join('-')"),
    "replace": SIZE.replace("GROW", "ns.x | replace('a', 'aaaa')"),
    "replace method": SIZE.replace("GROW", "ns.x.replace('a', 'aaaa')"),
    "center": "{{ ('a' | center(10 ** 10)) | length }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) | length }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) | length }}",
    "batch": "{{ [1] | batch(10 ** 10, 0) | list | length }}",
    "slice": "{{ [1] | slice(10 ** 10, 0) | list | length }}",
    "xmlattr": SIZE.replace("GROW", "{'k': ns.x ~ ns.x} | xmlattr"),
    "lipsum": "{{ lipsum(10 ** 9) | length }}",
    "lists": "{% set ns = namespace(x=[0]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "loops": LONG.replace("BODY", "{% set x = a %}"),
    "loops that skip": LONG.replace("BODY", "{% continue %}"),
    "a block": "{% set all %}" + LONG.replace("BODY", "x") + "{% endset %}",
    "a text": LONG.replace("BODY", "x" * 1000),
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "tojson": "{{ 'a' | tojson(indent=10 ** 10) }}{{ [[1]] | tojson(indent=10 ** 10) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    found = Renderers(memory=128 << 20, cpu_s=0.5)
    yield found
    found.close()


def render(source: str, renderers: Renderers, **options: Any) -> str:
    return ChatTemplate(source, {}, renderers).render([dict(message) for message in MESSAGES], **options)


@pytest.mark.parametrize("source", HUNGRY.values(), ids=HUNGRY)
@pytest.mark.sampled(2)
def test_a_template_that_exceeds_its_limits_is_stopped(source: str, renderers: Renderers) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(TemplateError) as raised:
        render(source, renderers)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert raised.value.place
    assert after.ru_utime - before.ru_utime < 20, "the work is another process's"
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10, "so is the memory"
    assert render("{{ messages[0].content }}", renderers) == "hello"


@pytest.mark.parametrize("source", ["{{ '%9999999999d' % 1 }}", "{{ 2 ** (10 ** 9) % 7 }}", LONG])
def test_a_request_template_that_exceeds_its_limits_is_a_client_error(source: str, renderers: Renderers) -> None:
    with pytest.raises(RequestError) as raised:
        render("own", renderers, template=source)
    assert raised.value.param == "chat_template"
    assert "exceeds a limit" in str(raised.value)


def test_a_conversation_that_renders_too_slowly_is_a_client_error(renderers: Renderers) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.content %}{% for i in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        {},
        renderers,
    )
    with pytest.raises(RequestError) as raised:
        template.render([{"role": "user", "content": "x" * (2 << 20)}])
    assert raised.value.param == "messages" and "too large" in str(raised.value)


def test_work_of_a_hostile_template_does_not_stop_other_threads(renderers: Renderers) -> None:
    told: list[Exception] = []

    def hostile() -> None:
        try:
            render("{{ 3 ** (10 ** 9) % 7 }}", renderers)
        except TemplateError as error:
            told.append(error)

    thread = threading.Thread(target=hostile)
    thread.start()
    count = 0
    while thread.is_alive() or not count:
        assert render("{% for m in messages %}{{ m.content }}{% endfor %}", renderers) == "hello"
        count += 1
    thread.join()
    assert len(told) == 1


def test_processor_time_is_counted_for_each_template(renderers: Renderers) -> None:
    work = "{% for i in range(3) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    for _ in range(20):
        assert render(work, renderers) == "hello"


def test_a_renderer_that_was_killed_is_replaced() -> None:
    before = set(children())
    renderers = Renderers()
    assert render("{{ messages[0].content }}", renderers) == "hello"
    (child,) = set(children()) - before
    os.kill(child, 9)
    assert render("{{ messages[0].content }}", renderers) == "hello"
    renderers.close()
    assert not set(children()) - before


def children() -> list[int]:
    """Process ids of renderers that this process started and did not reap."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"appliance.chat_templates.render_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_a_renderer_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_TEST_SECRET", "canary")
    before = set(children())
    renderers = Renderers()
    render("x", renderers)
    (child,) = set(children()) - before
    assert b"canary" not in Path(f"/proc/{child}/environ").read_bytes()
    renderers.close()


def test_small_operations_have_expected_results(renderers: Renderers) -> None:
    source = "{{ 'ab' * 3 }}{{ 3 * 'c' }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ [1] * 2 }}{{ '%3d' % 7 }}"
    assert render(source, renderers) == "abababccc610240.53.0[1, 1]  7"


def test_texts_of_any_characters_come_through(renderers: Renderers) -> None:
    text = "\0\x01\x7f\u2028\ud800 \U0001f389" + "x" * 300_000
    template = ChatTemplate("{{ messages[0].content }}", {}, renderers)
    assert template.render([{"role": "user", "content": text}]) == text
