"""Grammar compilation in separate processes: results, limits, sharing, shutdown."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from appliance.server.routing import grammars as module
from appliance.server.routing.grammars import Bounds, Grammars
from engine.api.errors import RequestError
from engine.api.messages import Grammar

pytestmark = pytest.mark.slow

BOUNDS = Bounds(256 << 10, 60.0, 512 << 20)
PATIENT = Bounds(256 << 10, 3600.0, 512 << 20)
ENDLESS = Grammar("lark", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "a"')


class Heard(list[str]):
    def __call__(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.append(outcome)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def grammars(heard: Heard) -> Iterator[Grammars]:
    made = Grammars(heard)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Grammars]:
    made = Grammars(Heard())
    yield made
    made.close()


def check(grammars: Grammars, grammar: Grammar, bounds: Bounds = BOUNDS) -> str:
    """Return the error of a grammar, "" if it is valid."""
    try:
        asyncio.run(grammars.check(grammar, bounds, "response_format"))
    except RequestError as error:
        assert error.param == "response_format"
        return str(error).removeprefix("response_format: ")
    return ""


def test_a_verdict_is_kept(grammars: Grammars, heard: Heard) -> None:
    good, bad = Grammar("regex", "a+"), Grammar("regex", "a(")
    assert [check(grammars, each) for each in (good, good)] == ["", ""]
    first = check(grammars, bad)
    assert first.startswith("invalid regular expression") and check(grammars, bad) == first
    assert heard == ["valid", "kept", "invalid", "kept"]


def test_the_grammar_cache_is_bounded(grammars: Grammars, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    for text in ("a", "b", "c", "a"):
        assert not check(grammars, Grammar("regex", text))
    assert heard == ["valid"] * 4
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 10)
    for text in ("d" * 6, "e" * 6, "d" * 6):
        assert not check(grammars, Grammar("regex", text))
    assert heard == ["valid"] * 7


def test_a_grammar_over_a_limit_names_the_key(grammars: Grammars, heard: Heard) -> None:
    assert "limits.grammar_size allows 3" in check(grammars, Grammar("regex", "éé"), Bounds(3, 60.0, 512 << 20))
    assert "limits.grammar_time of 0.2 s" in check(grammars, ENDLESS, Bounds(256 << 10, 0.2, 512 << 20))
    many = schema(nested(16, {"type": "string"}, lambda each: {"anyOf": [each, each]}))
    assert "limits.grammar_memory of 33554432 bytes" in check(grammars, many, Bounds(1 << 24, 60.0, 32 << 20))
    assert "limits.grammar_memory of 1 bytes" in check(grammars, ENDLESS, Bounds(256 << 10, 60.0, 1))
    assert heard == ["limit"] * 4


def test_a_grammar_that_kills_its_compiler_is_refused_and_the_next_one_compiles(grammars: Grammars) -> None:
    chain = "start: r0\n" + "\n".join(f"r{number}: r{number + 1}" for number in range(12_000)) + '\nr12000: "a"'
    assert "nested too deeply" in check(grammars, Grammar("lark", chain))
    assert not check(grammars, Grammar("regex", "b"))


def test_requests_with_the_same_grammar_wait_for_one_compilation(grammars: Grammars, heard: Heard) -> None:
    async def both() -> None:
        await asyncio.gather(*(grammars.check(Grammar("regex", "x+"), BOUNDS, "p") for _ in range(5)))

    asyncio.run(both())
    assert heard == ["valid"] * 5
    assert len(grammars._idle) == 1
    assert grammars.running == 0


def test_a_compilation_ends_when_the_last_who_waits_has_left(grammars: Grammars) -> None:
    async def run() -> None:
        waiting = [asyncio.create_task(grammars.check(ENDLESS, PATIENT, "p")) for _ in range(2)]
        begun: Any = None
        while begun is None:  # until a process is at it
            await asyncio.sleep(0.01)
            begun = next((each.process for each in grammars._running.values()), None)
        waiting[0].cancel()
        await asyncio.sleep(0.05)
        assert grammars.running == 1 and begun._child.poll() is None
        waiting[1].cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*waiting, return_exceptions=True)
        )
        assert grammars.running == 0
        while begun._child.poll() is None:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 100))


def test_a_long_compilation_keeps_no_other_waiting(grammars: Grammars) -> None:
    """SO-06 at the gateway"""

    async def run() -> list[str]:
        order = []
        long = asyncio.create_task(grammars.check(ENDLESS, BOUNDS, "p"))
        await asyncio.sleep(0)
        for text in ("a", "b", "c"):
            await grammars.check(Grammar("regex", text), BOUNDS, "p")
            order.append(text)
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        return order

    assert asyncio.run(asyncio.wait_for(run(), 100)) == ["a", "b", "c"]


def nested(depth: int, inside: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inside = wrap(inside)
    return inside


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def doubled(number: int) -> Any:
    below = {"$ref": f"#/$defs/{number + 1}"}
    return {"anyOf": [below, {"items": below}]}


DOUBLED = {"60": {"type": "null"}, **{str(number): doubled(number) for number in range(60)}}
HOSTILE: dict[str, Grammar] = {
    "parentheses": Grammar("regex", "(" * 100_000 + "a" + ")" * 100_000),
    "groups in Lark": Grammar("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "repetitions": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "a huge count": Grammar("regex", "a{4000000000}"),
    "a count beyond": Grammar("regex", "a{99999999999999999999}"),
    "a rule that never ends": Grammar("lark", "start: start"),
    "terminals in a circle": Grammar("lark", "start: A\nA: B\nB: A"),
    "all of all of": schema(nested(12, {"type": "string"}, lambda x: {"allOf": [x, x]})),
    "references that double": schema({"$ref": "#/$defs/0", "$defs": DOUBLED}),
    "a reference to itself": schema({"$ref": "#"}),
    "a large enum": schema({"enum": [f"value {number}" for number in range(12_000)]}),
    "many items": schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    "a long text": schema({"type": "string", "minLength": 10**9}),
    "exclusion": Grammar("lark", "start: A\nA: /(a|b)*a(a|b){40}/ & ~/(a|b)*b(a|b){38}c/"),
    "intersections": Grammar("lark", "start: A\nA: " + " & ".join(f"/.*{number}.*/" for number in range(300))),
    "no tokens": Grammar("lark", "start: <[4000000000]>"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_other_requests_are_served(shared: Grammars, name: str) -> None:
    """SO-02"""
    bounds = Bounds(256 << 10, 1.0, 512 << 20)
    assert len(check(shared, HOSTILE[name], bounds)) < 1500
    assert not check(shared, Grammar("regex", f"fine{len(name)}"), bounds)


def test_random_grammars_get_an_answer(shared: Grammars) -> None:
    """SO-02: pieces of all three languages, thrown together"""
    rng = random.Random(11)
    pieces = ["start: ", "a", "b*", "/", '"', "{3,}", "(", ")", "|", "[", "^", "]", "\n", "A", ": ", "%json ", "{", "}"]
    pieces += ["&", "~", "<[3]>"]
    words = ["type", "object", "properties", "anyOf", "$ref", "#", "minimum", "pattern", "items", "required", "enum"]

    def value(depth: int) -> Any:
        choice = rng.randrange(5 if depth else 3)
        if choice < 3:
            return rng.choice([rng.choice(words), rng.randrange(-9, 99), True, None, 1e300])
        inside = [value(depth - 1) for _ in range(rng.randrange(4))]
        return inside if choice == 3 else {rng.choice(words): each for each in inside}

    for _ in range(150):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 25)))
        check(shared, Grammar(rng.choice(["regex", "lark"]), text))
        check(shared, schema(value(4)))
    assert not check(shared, Grammar("regex", "fine"))
