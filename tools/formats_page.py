"""Write docs/formats.md from the declarations in appliance/output_formats: syntax of tool calls and reasoning."""

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

Select the format in which your model writes tool calls and reasoning, or check that Slipway detects it. Each format is
one declaration for a family of models. Two parts are derived from it: a parser, which produces the same events for
every split of the text, streamed or complete; and a grammar, which constrains replies. With `tool_choice` `required` or
a named function, a reply cannot contain an invalid call; `strict` tools constrain `auto` calls from their opening
marker on.

`model.format` is `auto` or a name from the tables, or two names joined with `+`, such as `hermes+deepseek_r1`. A name
selects the calls or the reasoning of its table, or both if both tables have it; the rest is detected. `plain` parses no
calls, `identity` no reasoning. `auto` searches the chat template for the signs below, from the top, and uses
`model_type` of config.json if templates alone are ambiguous; `slipway plan` prints the result.

Two kinds of checkpoints have no chat template, and Slipway has one for each: DeepSeek-V3.2, whose own code makes its
prompts (`chat_template_kwargs: {"thinking": true}` or `reasoning_effort` lets it think), and checkpoints with Mistral's
tekken.json in versions 7, 11 and 13, whose prompts are those of mistral_common. `model.chat_template` replaces them.

## Calls

Each example is generated from the grammar: one call of `f` with the text `x` for `a`; ⏎ is a newline.

| name | call | detected by |
|---|---|---|
"""

MIDDLE = """
`harmony` has channels: `analysis` is reasoning, `final` is content, a message with a recipient is a call, and other
messages on `commentary` are reasoning too; events have the name of the channel.

The parser also accepts these variants:

- JSON calls with keys in any order; arguments as a JSON string; missing or null arguments as `{}`;
- whitespace anywhere between markers; a single call instead of a list;
- Qwen calls without `<tool_call>`; Mistral calls without `[ARGS]` or with `[CALL_ID]`.

Values in tags are converted to JSON by the schema of their parameter. Text remains text even if it looks like a number.
A union accepts null, a boolean, a number, a list or object, then text. If the schema has no type, the type in the tag
is used (Kimi K3, K2 Horizon). Lists and objects of MiniMax M3 are nested tags or JSON; MiniCPM5 may write values in
CDATA.

A malformed call becomes content, including its marker. A call that ends after its name becomes content in a complete
reply; a stream cannot retract its records. An unfinished call keeps its arguments so far, or is dropped if it has no
name yet. Formats without markers are detected only at the beginning of a reply.

Ids of calls are `chatcmpl-tool-…`, `functions.NAME:N` for kimi_k2 and 9 letters and digits for Mistral's, also in the
history that is passed to the template.

## Reasoning

| name | markers | detected by | |
|---|---|---|---|
"""

TAIL = """
The prompt determines whether a reply begins inside its reasoning: the template may open or close it. Otherwise, formats
marked *reasoning at once* begin with reasoning, up to the end marker. If a switch of the template is off
(`chat_template_kwargs`, or `reasoning_effort: none`), the complete reply is content. Other reasoning counts only before
the first content. The marker of a call ends unclosed reasoning.

`thinking_token_budget` limits the tokens of reasoning: after this number the end marker is forced, token by token, also
under a grammar. It depends on the emitted tokens alone, so a resumed reply is the same. 0 ends reasoning at once; −1
and null set no limit. A step waits for the previous token only if it determines the next one: from the last token of
the budget to the end of the marker, and for every token under a grammar. It waits after the model has run.

## Add a family

Add a value to `call_families.py`, `tag_families.py` or `reasoning_families.py` in `appliance/output_formats`, and its
texts to `tests/appliance/output_formats/goldens.py` (a test fails without them). The body of a call is JSON
(`JsonCall`), a name and JSON (`NamedJson`), tags (`Tags`) or nearly JSON (`LooseCall`). The tests then cover every
split of its texts, replies sampled from its grammar, 10,000 fuzzed replies of all formats, and the tokens of four
tokenizers. `make fuzz TEXTS=10000 SEED=7` parses 10,000 fuzzed replies of each format.
"""

_ARGUMENTS = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False}
_EXAMPLE = Function("f", _ARGUMENTS)


def code(text: str) -> str:
    """Return text as code in a table."""
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
    """Return the only reply that a grammar permits, without optional spaces and digits."""
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
