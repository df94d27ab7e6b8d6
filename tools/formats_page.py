"""Writes docs/formats.md from the declarations in appliance/output_formats: how models write calls and reasoning."""

import sys
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from appliance.output_formats.constraint import Constraint  # noqa: E402
from appliance.output_formats.declaration import Calls, Function, Reasoning  # noqa: E402
from appliance.output_formats.formats import CALLS, HARMONY, HARMONY_MARKS, REASONINGS  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Output formats

<!-- made by tools/formats_page.py from appliance/output_formats; a test keeps it so -->

How a family of models writes tool calls and reasoning is one declaration. From it follow the reader, which gives the
same events however the text is cut, streamed or whole, and the grammar that binds a reply: with `tool_choice`
`required` or a named function a call that is not valid cannot be written, and `strict` tools bind `auto` from the
marker on that opens a call.

`model.format` is `auto` or a name of the tables, or two joined by `+`, such as `hermes+deepseek_r1`. A name sets what
it names, both where it stands in both tables; the rest is recognised. `plain` reads no calls, `identity` no
reasoning. `auto` looks for the signs below in the chat template, from the top, and asks `model_type` of config.json
where templates alone leave it open; `slipway plan` prints what it found.

## Calls

The example is what a grammar makes a model write: one call of `f` with the text `x` for `a`; ⏎ is a line end.

| name | a call | recognised by |
|---|---|---|
"""

MIDDLE = """
`harmony` is a format of channels: `analysis` is reasoning, `final` is content, a message to a recipient is a call,
and what else is said on `commentary` is reasoning too, as its channel in the events tells.

What is read beyond that: JSON calls with their keys in any order, arguments as a string of JSON, missing or null ones
as `{}`; whitespace anywhere between markers; one call where a list should be; a Qwen call without `<tool_call>`;
Mistral's without `[ARGS]`, or with `[CALL_ID]`. Values in tags become JSON by the schema of their parameter: text
stays text, also where it looks like a number; a union takes null, a boolean, a number, a list or object, then text.
What such a tag says of a type (Kimi K3, K2 Horizon) decides where the schema does not. Lists and objects of MiniMax M3
are tags in tags, or JSON; a value of MiniCPM5 may stand in CDATA.
What was to be a call and is none is content, marker and all; one that breaks off behind its name is content in a
whole reply, while a stream cannot take back what it sent. An unfinished call keeps its arguments so far, or is
dropped if it has no name yet. Formats without markers are only looked for where a reply begins.

Ids of calls are `chatcmpl-tool-…`, `functions.NAME:N` for kimi_k2 and 9 letters and digits for Mistral's, also in the
history that the template gets.

## Reasoning

| name | marks | recognised by | |
|---|---|---|---|
"""

TAIL = """
Whether a reply begins inside of its reasoning is first seen in the prompt: the template opened it, or closed it. Else
a reply *is reasoning at once* where the table says so, up to the end marker, unless a switch of the template is off
(`chat_template_kwargs`, or `reasoning_effort: none`); where it is off all is content. Other reasoning counts only
before the first content. A call's marker inside unclosed reasoning ends it.

`thinking_token_budget` limits the tokens of reasoning: behind so many the end marker is forced, token by token, under
a grammar too. It depends on the emitted tokens alone, so a reply that is resumed is the same. 0 closes reasoning at
once; −1 and null set no limit. A step waits for the token before only where that decides what comes next: from the last
token of the budget to the end of the marker, and for every one under a grammar; and it waits when the model has run.

## Another family

One value in `call_families.py`, `tag_families.py` or `reasoning_families.py` of `appliance/output_formats`, and its
texts in `tests/appliance/output_formats/goldens.py`, which a test asks for. A call's body is JSON (`JsonCall`), a name
and JSON (`NamedJson`), tags (`Tags`) or nearly JSON (`LooseCall`). Other tests take it from there: every split of its
texts, replies drawn from its grammar, 10,000 fuzzed ones of all formats, the tokens of four tokenizers. `make fuzz
TEXTS=10000 SEED=7` reads so many of each format.
"""

_ARGUMENTS = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False}
_EXAMPLE = Function("f", _ARGUMENTS)


def code(text: str) -> str:
    """Text as code in a table."""
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`{shown}`" if "`" not in shown else f"`` {shown} ``"


class _Bytes:
    """A vocabulary of single bytes and an end."""

    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    bos_token_id, eos_token_id = None, 256
    special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _written(matcher: LLMatcher) -> str:
    """The one reply that a grammar leaves, without the spaces and digits that it does not ask for."""
    found = bytearray()
    words = np.zeros(9, np.uint32)
    while not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if 256 in allowed:
            break
        needed = [byte for byte in allowed if byte not in b" \t\n\r"] or [b"\n"[0] if 10 in allowed else allowed[0]]
        other = [byte for byte in needed if byte not in b"0123456789"]
        token = (other or needed)[0]
        assert matcher.consume_token(token), "it was allowed"
        found.append(token)
    return found.decode()


def _example(calls: Calls) -> str:
    channels = HARMONY.channels if calls is HARMONY.calls else None
    grammar = Constraint(lambda _: None, channels=channels).calls(calls, (_EXAMPLE,), one_call=True)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    return _written(LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text)))


def _signs(part: Calls | Reasoning) -> str:
    signs = ", ".join(map(code, part.recognised_by)) or "its name only"
    types = " or ".join(part.model_types)
    return f"{signs}; model type {types}…" if types else signs


def _rules(reasoning: Reasoning) -> str:
    said = []
    if reasoning.implicit:
        said.append("reasoning at once")
    if reasoning.switches:
        said.append(f"switches {', '.join(reasoning.switches)}, by themselves {'on' if reasoning.default else 'off'}")
    if reasoning.answer is not None:
        said.append(f"the answer in {code(' '.join(reasoning.answer))}")
    if reasoning.dropped:
        said.append(f"no text: {code(' '.join(reasoning.dropped))}")
    return "; ".join(said)


def formats_page() -> str:
    calls = [f"| {each.name} | {code(_example(each))} | {_signs(each)} |" for each in CALLS]
    reasonings = [
        f"| {each.name} | {code(each.start)} {code(each.end)} | {_signs(each)} | {_rules(each)} |"
        for each in REASONINGS
    ]
    assert HARMONY.calls is not None, "it has calls"
    signs = ", ".join(map(code, HARMONY_MARKS))
    calls.append(f"| harmony | {code(_example(HARMONY.calls))} | {signs} |")
    return HEAD + "\n".join(calls) + "\n" + MIDDLE + "\n".join(reasonings) + "\n" + TAIL


if __name__ == "__main__":
    write_pages(__doc__, {"formats.md": formats_page})
