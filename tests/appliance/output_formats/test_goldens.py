"""Every format on its golden outputs: complete, at every split, and with surrounding text, truncation and faults."""

import json
from typing import Any

import pytest

from appliance.output_formats.declaration import Function, OutputFormat
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, joined
from appliance.output_formats.formats import CALLS, HARMONY, THINK
from appliance.output_formats.reader import reader_of
from tests.appliance.output_formats.goldens import FUNCTIONS, GOLDENS, HARD, VARIANTS, WEATHER

FORMATS = {calls.name: OutputFormat(THINK, calls) for calls in CALLS} | {"harmony": HARMONY}
Call = tuple[str, Any]


def read(form: OutputFormat, pieces: list[str], **options: Any) -> list[Event]:
    reader = reader_of(form, functions=FUNCTIONS, **options)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined([*events, *reader.finish()])


def calls_of(events: list[Event]) -> list[Call]:
    """Return names and arguments, which must be JSON and in order."""
    assert not any(isinstance(event, CallBroken) for event in events), events
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    arguments = {event.index: json.loads(event.text) for event in events if isinstance(event, CallArguments)}
    return [(start.name, arguments[start.index]) for start in starts]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def test_every_format_has_goldens() -> None:
    assert FORMATS.keys() == GOLDENS.keys()


@pytest.mark.parametrize("name", GOLDENS)
def test_calls_are_read(name: str) -> None:
    """TC-01 TC-02 TC-03 TC-04: one, none but a name, hard ones, two."""
    golden, form = GOLDENS[name], FORMATS[name]
    hard = {**HARD, "text": golden.text}
    for text, calls in (
        (golden.one, [("weather", WEATHER)]),
        (golden.none, [("now", {})]),
        (golden.hard, [("note", hard)]),
        (golden.two, [("weather", WEATHER), ("now", {})]),
    ):
        events = read(form, [text])
        assert calls_of(events) == calls
        assert content_of(events) == ""


@pytest.mark.parametrize(("name", "text"), VARIANTS)
def test_other_spellings_are_read(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        events = read(FORMATS[name], pieces)
        assert calls_of(events) == [("weather", WEATHER)]
        assert content_of(events) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_every_split_of_every_golden_reads_the_same(name: str) -> None:
    """TC-01: every split in two, and single characters."""
    golden, form = GOLDENS[name], FORMATS[name]
    for text in (golden.hard, golden.two):
        whole = read(form, [text])
        assert read(form, list(text)) == whole
        for cut in range(len(text) + 1):
            assert read(form, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])


@pytest.mark.parametrize("name", [name for name in GOLDENS if name != "harmony"])
def test_text_around_calls_is_content(name: str) -> None:
    """TC-02; bare calls only begin a reply."""
    golden, form = GOLDENS[name], FORMATS[name]
    calls = form.calls
    assert calls is not None
    behind = read(form, [f"\n\n{golden.one}\nDone."])
    assert calls_of(behind) == [("weather", WEATHER)]
    assert content_of(behind).strip() == "Done."
    if not calls.bare:
        before = read(form, [f"Let me see.\n\n{golden.two}"])
        assert calls_of(before) == [("weather", WEATHER), ("now", {})]
        assert content_of(before).strip() == "Let me see."
    thought = read(form, [f"<think>\nhm\n</think>\n\n{golden.one}"])
    assert calls_of(thought) == [("weather", WEATHER)]
    assert content_of(thought) == ""


@pytest.mark.parametrize("name", GOLDENS)
def test_a_call_that_is_cut_off_leaks_no_marker(name: str) -> None:
    """D.1: an unfinished call is flushed or dropped. Text that resembles a call without markers is content."""
    golden, form = GOLDENS[name], FORMATS[name]
    calls = form.calls
    assert calls is not None
    for text in (golden.one, golden.hard):
        for cut in range(len(text)):
            events = read(form, [text[:cut]])
            assert not any(isinstance(event, CallBroken) for event in events), text[:cut]
            content = content_of(events)
            marked = [mark for mark in calls.openings if mark.strip("<[").startswith(("tool", "TOOL"))]
            assert not any(mark in content for mark in marked), text[:cut]
            if any(isinstance(event, CallStart) for event in events):
                assert content == ""


@pytest.mark.parametrize("name", [name for name in GOLDENS if name != "harmony"])
def test_an_unknown_function_is_still_called(name: str) -> None:
    """TC-06"""
    text = GOLDENS[name].none.replace("now", "nobody.knows_1")
    assert calls_of(read(FORMATS[name], [text])) == [("nobody.knows_1", {})]


MALFORMED = {
    "hermes": "<tool_call>\nweather(city)\n</tool_call>",
    "qwen3_coder": "<tool_call>\n{nothing}\n</tool_call>",
    "glm45": "<tool_call>what is it</tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>",
    "deepseek_v32": "<｜DSML｜function_calls>\nnothing</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>",
    "mistral": "[TOOL_CALLS] is a marker with {} behind it",
    "mistral_list": "[TOOL_CALLS] [1, 2]",
    "minimax_m2": "<minimax:tool_call>\n<parameter>x</parameter></minimax:tool_call>",
    "llama3_json": '{"name": "Ada", "born": 1815}',
    "pythonic": "[see](https://example.org), or [1, 2, 3]",
    "llama4_pythonic": "[weather('positional')]",
    "xlam": '[{"name": "Ada"}]',
    "phi4_mini": "functools[cache] is a decorator",
    "granite": "<|tool_call|> is not JSON",
    "olmo3": "<function_calls>\n1 + 1\n</function_calls>",
    "gemma4": "<|tool_call>weather{}<tool_call|>",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_text_that_is_not_a_call_is_content(name: str) -> None:
    """TC-05: the complete text is returned unchanged, for any split."""
    text = MALFORMED[name]
    for cut in range(len(text) + 1):
        assert read(FORMATS[name], [text[:cut], text[cut:]]) == [Content(text)], cut


BROKEN = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call>', "after"),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\noops\n</function>\n</tool_call>",
        "after",
    ),
    "kimi_k2": (
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{oops}<|tool_call_end|>",
        "<|tool_calls_section_end|>after",
    ),
    "pythonic": ("f(a=1, b=oops!)]", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_text_of_an_incomplete_call_is_returned(name: str) -> None:
    broken, behind = BROKEN[name]
    before = {"kimi_k2": "<|tool_calls_section_begin|>", "pythonic": "["}.get(name, "")
    events = read(FORMATS[name], [before + broken + behind])
    assert events == read(FORMATS[name], list(before + broken + behind))
    assert isinstance(events[0], CallStart)
    given_back = [event.text for event in events if isinstance(event, CallBroken)]
    assert given_back == [before + broken]
    assert content_of(events) == behind.replace("<|tool_calls_section_end|>", "")


def test_parallel_calls_are_one_if_asked() -> None:
    for name, golden in GOLDENS.items():
        assert calls_of(read(FORMATS[name], [golden.two], one_call=True)) == [("weather", WEATHER)], name


def test_a_model_names_its_calls() -> None:
    """Call ids of families that define them are reported."""
    starts = [event for event in read(FORMATS["kimi_k2"], [GOLDENS["kimi_k2"].two]) if isinstance(event, CallStart)]
    assert [start.id for start in starts] == ["functions.weather:0", "functions.now:1"]
    text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    assert read(FORMATS["mistral"], [text])[0] == CallStart(0, "now", "abcdefghi")


def marked(text: str) -> str:
    """Tags as MiniMax M3 writes them."""
    return text.replace("<", "]<]minimax[>[<")


ORDER: dict[str, Any] = {
    "type": "object",
    "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string"}, "amount": {"type": "integer"}}}},
    "properties": {
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "tags": {"type": "array", "items": {"type": "string"}},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "to": {"anyOf": [{"type": "object", "properties": {"zip": {"type": "string"}}}, {"type": "null"}]},
        "note": {"type": "string"},
    },
}
NESTED: list[tuple[str, Any]] = [
    ("<tags><item>7</item><item></item><item>a > b</item></tags>", {"tags": ["7", "", "a > b"]}),
    ("<tags></tags><lines>\n</lines>", {"tags": [], "lines": []}),
    (
        "<lines>\n<item>\n<sku>018</sku>\n<amount>2</amount>\n</item>\n<item><sku>x</sku></item></lines>",
        {"lines": [{"sku": "018", "amount": 2}, {"sku": "x"}]},
    ),
    ("<grid><item><item>1</item><item>2.5</item></item><item></item></grid>", {"grid": [[1, 2.5], []]}),
    ('<grid>[[1], [2]]</grid><lines>[{"sku": "a"}]</lines>', {"grid": [[1], [2]], "lines": [{"sku": "a"}]}),
    ("<to><zip>00100</zip></to>", {"to": {"zip": "00100"}}),
    ("<to>null</to>", {"to": None}),
    ("<note><item>no list</item></note>", {"note": marked("<item>no list</item>")}),
    ("<other><other>1</other><a>2</a></other>", {"other": {"other": "1", "a": "2"}}),
    ("<other><a>1</a><a>2</a><b></b></other>", {"other": {"a": ["1", "2"], "b": ""}}),
]


@pytest.mark.parametrize(("written", "arguments"), NESTED)
def test_tags_in_tags_are_lists_and_objects_by_their_schemas(written: str, arguments: Any) -> None:
    """TC-03 TC-04: however they are cut."""
    form, functions = FORMATS["minimax_m3"], (Function("order", ORDER),)
    text = marked(f'<tool_call>\n<invoke name="order">{written}</invoke>\n</tool_call>')
    for cut in range(len(text) + 1):
        reader = reader_of(form, functions=functions)
        events = joined([*reader.feed(text[:cut]), *reader.feed(text[cut:]), *reader.finish()])
        assert calls_of(events) == [("order", arguments)], text[:cut]
