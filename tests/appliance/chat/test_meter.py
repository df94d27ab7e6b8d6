"""Templates that do not end, or make too much, cost a request and nothing else."""

import threading
import time
from typing import Any

import pytest

from appliance.chat import meter
from appliance.chat.template import ChatTemplate
from engine.api.errors import RequestError

MESSAGES = [{"role": "user", "content": "hello"}]
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


def render(source: str) -> str:
    return ChatTemplate(source, {}).render([dict(message) for message in MESSAGES])


def refusal(source: str) -> str:
    with pytest.raises(RequestError) as raised:
        render(source)
    assert raised.value.param == "messages"
    return str(raised.value)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "CPU_S", 0.2)


@pytest.mark.parametrize(
    "source",
    [
        LONG.replace("BODY", "{% set x = a %}"),
        LONG.replace("BODY", "{% continue %}"),
        "{% set all %}" + LONG.replace("BODY", "") + "{% endset %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set ns = namespace(x=[0]) %}{% for a in range(99999) %}{% set ns.x = ns.x + ns.x[:1] %}{% endfor %}" * 50,
    ],
    ids=["loops", "loops that skip", "a block", "a macro", "lists"],
)
def test_what_does_not_end_is_ended(source: str, short: None) -> None:
    began = time.thread_time()
    assert refusal(source).startswith("The chat template does not end on this conversation: it computes for more than")
    assert time.thread_time() - began < 30


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ 'a' * 10**9 }}", "a product has more than"),
        ("{{ 10**9 * [1] }}", "a product has more than"),
        ("{% set x = 7 ** 10000000 %}{{ x }}", "a power has more than"),
        ("{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}", "its text has more than"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "does not end"),
    ],
)
def test_what_is_too_much_is_refused(source: str, told: str) -> None:
    assert told in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 // 0 }}",
        "{{ [][3].content }}",
        "{{ 'x' + 3 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now(3) }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_whatever_a_template_comes_to_is_an_error_of_the_request(source: str) -> None:
    assert refusal(source).startswith("The chat template refuses the conversation: ")


def test_small_products_and_powers_are_what_they_are() -> None:
    assert render("{{ 'ab' * 3 }}{{ 3 * 'c' }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ [1] * 2 }}") == (
        "abababccc610240.53.0[1, 1]"
    )


def test_a_template_counts_in_its_own_thread_alone(short: None) -> None:
    """One that does not end takes no time from another."""
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(refusal(LONG.replace("BODY", ""))))
    thread.start()
    while thread.is_alive():
        assert render("{% for m in messages %}{{ m.content }}{% endfor %}") == "hello"
    thread.join()
    assert len(told) == 1


def test_the_clock_is_set_back_after_each_template(short: None) -> None:
    refusal(LONG.replace("BODY", ""))
    assert render("{% for i in range(3000) %}{{ i }}{% endfor %}").endswith("2999")
