"""Complete replies of families with more than reasoning, text and calls, at every split."""

from typing import Any

import pytest

from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.events import CallArguments, CallStart, Content, Event, ReasoningText, joined
from appliance.output_formats.formats import CALLS, PLAIN, REASONINGS, chosen
from appliance.output_formats.reader import reader_of
from tests.appliance.output_formats.goldens import FUNCTIONS, GOLDENS

NOW = [CallStart(0, "now"), CallArguments(0, "{}")]
K3_TOOLS = GOLDENS["kimi_k3"].none
K3_ANSWER = "<|open|>response<|sep|>The answer.<|close|>response<|sep|>"
K3_END = "<|close|>message<|sep|>"

# name: (format, the prompt opened the reasoning, text, events)
REPLIES: dict[str, tuple[str, bool, str, list[Event]]] = {
    "kimi k3, all of it": (
        "kimi_k3",
        True,
        f"Hm <|open|>.<|close|>think<|sep|>{K3_ANSWER}{K3_TOOLS}{K3_END}",
        [ReasoningText("Hm <|open|>."), Content("The answer."), *NOW],
    ),
    "kimi k3, its own start": (
        "kimi_k3",
        False,
        f"<|open|>think<|sep|>Hm<|close|>think<|sep|>{K3_ANSWER}{K3_END}",
        [ReasoningText("Hm"), Content("The answer.")],
    ),
    "kimi k3, the prompt opened the answer": (
        "kimi_k3",
        False,
        f"The answer.<|close|>response<|sep|>{K3_END}",
        [Content("The answer.")],
    ),
    "kimi k3, a call alone": (
        "kimi_k3",
        True,
        f"Hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>{K3_TOOLS}{K3_END}",
        [ReasoningText("Hm"), *NOW],
    ),
    "k2 horizon, fast": (
        "k2_horizon",
        False,
        f"<ifm|think_fast>\nHm\n</ifm|think_fast>\nThe answer.\n{GOLDENS['k2_horizon'].none}",
        [ReasoningText("Hm"), Content("The answer.\n"), *NOW],
    ),
    "apertus, thoughts that calls interrupt": (
        "apertus",
        False,
        f"<|inner_prefix|>Hm{GOLDENS['apertus'].none}",
        [ReasoningText("Hm"), *NOW],
    ),
    "gigachat, text before a call": (
        "gigachat3",
        False,
        f"I look.\n\n{GOLDENS['gigachat3'].none}",
        [Content("I look.\n\n"), *NOW],
    ),
    "minimax m3": (
        "minimax_m3",
        False,
        f"<mm:think>Hm</mm:think>Let me ] see.\n{GOLDENS['minimax_m3'].none}",
        [ReasoningText("Hm"), Content("Let me ] see.\n"), *NOW],
    ),
    "plamo 3": (
        "plamo3",
        False,
        f"<|plamo:begin_think:plamo|>Hm<|plamo:end_think:plamo|>Yes.{GOLDENS['plamo3'].none}",
        [ReasoningText("Hm"), Content("Yes."), *NOW],
    ),
}


def read(form: OutputFormat, pieces: list[str], **options: Any) -> list[Event]:
    reader = reader_of(form, functions=FUNCTIONS, **options)
    return joined([*(event for piece in pieces for event in reader.feed(piece)), *reader.finish()])


@pytest.mark.parametrize("name", REPLIES)
def test_whole_replies_are_read_however_they_are_cut(name: str) -> None:
    """TC-01 RE-07"""
    known, reasons, text, events = REPLIES[name]
    form = chosen(known, PLAIN)
    if form.reasoning is None:
        form = OutputFormat(next(each for each in REASONINGS if each.name == "think"), form.calls)
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]], reasons=reasons) == events, text[:cut]
    assert read(form, list(text), reasons=reasons) == events


@pytest.mark.parametrize("form", CALLS, ids=lambda form: form.name)
def test_markers_are_kept_where_they_are_special_tokens(form: Any) -> None:
    """Markers must not contain tokens that a decoder hides. PLaMo's tags consist of several tokens."""
    kept = OutputFormat(None, form).tokens()
    for opening in form.openings:
        if opening.startswith(("<", "[TOOL", "]<")):
            assert any(opening.startswith(mark) for mark in kept), (opening, kept)
    if form.name == "plamo3":
        assert {"<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:msg|>"} <= set(kept)
    if form.name == "minicpm5":
        assert {"<function", "</function>", "<param", "</param>"} <= set(kept)
    if form.name == "minimax_m3":
        assert "]<]minimax[>[" in kept


def test_a_type_attribute_decides_if_the_schema_is_open() -> None:
    """TC-04: of Kimi K3 and K2 Horizon."""
    call = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|><|close|>tools<|sep|>'
    argument = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    written = [("a", "number", "1"), ("b", "string", "1"), ("c", "boolean", "true"), ("d&amp;&quot;", "array", "[1]")]
    text = call.format("".join(argument.format(*one) for one in written))
    for pieces in ([text], list(text)):
        _, arguments = read(chosen("kimi_k3", PLAIN), pieces)
        assert arguments == CallArguments(0, '{"a": 1, "b": "1", "c": true, "d&\\"": [1]}')
    typed = (
        "<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>a</ifm|arg_key>{}<ifm|arg_value>1</ifm|arg_value></ifm|tool_call>"
    )
    for kind, value in (("<ifm|arg_type>integer</ifm|arg_type>\n", "1"), ("", '"1"')):
        _, arguments = read(chosen("k2_horizon", PLAIN), [typed.format(kind)])
        assert arguments == CallArguments(0, f'{{"a": {value}}}')


def test_cdata_is_read_verbatim() -> None:
    text = '<function name="f"><param name="a"><![CDATA[</param> & <![CDATA[ ]] >]]>\n</param></function>'
    for pieces in ([text], list(text)):
        _, arguments = read(chosen("minicpm5", PLAIN), pieces)
        assert arguments == CallArguments(0, '{"a": "</param> & <![CDATA[ ]] >"}')


_K2 = (
    "<ifm|tool_calls><ifm|tool_call>note<ifm|arg_key>{}</ifm|arg_key><ifm|arg_value>{}</ifm|arg_value></ifm|tool_call>"
)
_HEAD = "<|channel|>commentary to=functions.now <|constrain|>json"
FOUND = [
    # JSON that becomes invalid only after the closing tag ends at that tag.
    ("k2_horizon", _K2.format("place", '{"rows": "x</ifm|arg_value><ifm|arg_key>id</ifm|arg_key><ifm|arg_value>\n7')),
    ("qwen3_coder", '<function=note>\n<parameter=place>{"a": "x</parameter>\n<parameter=id>7</parameter>\n</function>'),
    # A name that is as long as one may be, or longer, before a mark of several characters.
    *(("k2_horizon", _K2.format("k" * length, "1")) for length in (255, 256, 257)),
    # A marker may begin within a possible prefix of another marker.
    ("harmony", "<|cha<|message|>nel|>commentary Hi"),
    ("harmony", f'{_HEAD}<|messag<|message|>e|>{{"a": 1}}<|call|>'),
    # Text that is neither a second call nor content.
    ("pythonic+think", "[now(),<think>o]]"),
]


@pytest.mark.parametrize(("known", "text"), FOUND)
def test_fuzzing_regressions_parse_equally_at_every_split(known: str, text: str) -> None:
    """TC-01"""
    form = chosen(known, PLAIN)
    whole = read(form, [text])
    assert not [event for event in whole if isinstance(event, Content | ReasoningText) and not event.text]
    assert read(form, list(text)) == whole
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]]) == whole, text[:cut]


def test_json_that_is_none_is_a_text_up_to_its_closing_tag() -> None:
    _, arguments, *_ = read(chosen("qwen3_coder", PLAIN), [FOUND[1][1]])
    assert arguments == CallArguments(0, '{"place": "{\\"a\\": \\"x", "id": "7"}')
