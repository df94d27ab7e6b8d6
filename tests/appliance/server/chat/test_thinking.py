"""Detection of replies that begin inside their reasoning: from the prompt, then from request switches."""

from pathlib import Path

import pytest

from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.events import Content, Event, ReasoningText, joined
from appliance.output_formats.formats import HERMES, REASONINGS
from appliance.output_formats.reader import reader_of
from appliance.server.chat.thinking import Thinking, thinking_limit, thinking_of
from engine.text import Tokenizer

DEMO = Path(__file__).parents[4] / "manifests" / "demo"
BY_NAME = {reasoning.name: reasoning for reasoning in REASONINGS}


def read(name: str, prompt: str, text: str, **variables: bool) -> list[Event]:
    """Return the events of a reply, read in one piece and by characters."""
    reasoning = BY_NAME[name]
    thinking = thinking_of(prompt, False, reasoning, variables)
    form = OutputFormat(None if thinking.off else reasoning, HERMES)
    found = []
    for pieces in ([text], list(text)):
        reader = reader_of(form, reasons=thinking.begun)
        events = [event for piece in pieces for event in reader.feed(piece)]
        found.append(joined([*events, *reader.finish()]))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", ["glm45", "holo2", "deepseek_r1", "minimax_m2", "step3"])
def test_some_models_leave_the_start_away(name: str) -> None:
    """RE-01"""
    assert read(name, "<|assistant|>", "a</think>b") == [ReasoningText("a"), Content("b")]
    assert read(name, "<|assistant|>", "<think>a</think>b") == [ReasoningText("a"), Content("b")]
    assert read(name, "<|assistant|>", "cut off") == [ReasoningText("cut off")]


@pytest.mark.parametrize("name", ["think", "qwen3", "kimi_k2", "olmo3"])
def test_others_begin_with_content_unless_they_say_otherwise(name: str) -> None:
    assert read(name, "<|assistant|>", "a") == [Content("a")]
    assert read(name, "<|assistant|>", "<think>a</think>b") == [ReasoningText("a"), Content("b")]
    assert read(name, "<|assistant|><think>\n", "a</think>b") == [ReasoningText("a"), Content("b")]


@pytest.mark.parametrize(("name", "off"), [("glm45", {"enable_thinking": False}), ("deepseek_v3", {})])
def test_switched_off_all_is_content(name: str, off: dict[str, bool]) -> None:
    """RE-04; identity: markers stay in the text."""
    assert read(name, "<|assistant|>", "<think>a</think>b", **off) == [Content("<think>a</think>b")]
    assert read(name, "<|assistant|>", "a</think>b", thinking=True) == [ReasoningText("a"), Content("b")]


def test_the_prompt_has_precedence_over_a_switch() -> None:
    opened = Thinking(begun=True, open=True, end="</think>")
    assert thinking_of("…<think>", False, BY_NAME["deepseek_v3"], {}) == opened
    assert thinking_of("…<think></think>", False, BY_NAME["glm45"], {}) == Thinking(closed=True)
    assert thinking_of("a<think>b", True, BY_NAME["think"], {}) == opened
    assert thinking_of("a<think>b</think>c", True, BY_NAME["glm45"], {}) == Thinking(closed=True)
    assert thinking_of("a", False, None, {}) == Thinking(off=True)


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("kind", ["think", "think_fast", "think_faster"])
def test_a_budget_closes_what_the_prompt_opened(kind: str, continues: bool) -> None:
    """With several pairs of markers, the budget closes the pair that the prompt opened."""
    prompt = f"<ifm|think>a</ifm|think>\n<ifm|{kind}>{'so far' if continues else ''}"
    thinking = thinking_of(prompt, continues, BY_NAME["k2_horizon"], {})
    assert thinking == Thinking(begun=True, open=True, end=f"</ifm|{kind}>")
    form = OutputFormat(BY_NAME["k2_horizon"], HERMES)
    tokenizer = Tokenizer(DEMO)
    limit = thinking_limit(5, form, form, thinking, tokenizer)
    assert limit is not None and tokenizer.decode(list(limit.close)) == f"</ifm|{kind}>"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ernie45", "<think>\na\n</think>\n\n<response>\n", "\n</response>\n"),
        ("hunyuan_a13b", "<think>\na\n</think>\n<answer>\n", "\n</answer>"),
        ("cohere", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ("granite", "Here is my thought process:\na\n\nHere is my response:\n", ""),
        ("granite", "Here's my thought process: a Here's my response: ", ""),
        ("mistral", "[THINK]a[/THINK]", ""),
        ("seed_oss", "<seed:think>a</seed:think>", ""),
        ("gemma4", "<|channel>thought\na<channel|>", ""),
    ],
)
def test_other_marks_belong_to_no_text(name: str, before: str, after: str) -> None:
    assert read(name, "", f"{before}so\n\nit is{after}") == [ReasoningText("a"), Content("so\n\nit is")]
