"""Write the table of docs/structured-output.md: support of each JSON Schema keyword, by the official test suite.

    python tools/structured_page.py

Each case of the suite (tests/engine/structured/suite) is compiled as a strict schema. The case passes if the masks
accept its instance exactly if the instance is valid.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.api.errors import RequestError  # noqa: E402
from engine.api.messages import Grammar  # noqa: E402
from engine.structured.definition import LIMITS, definition  # noqa: E402
from engine.structured.schema import enforce  # noqa: E402
from tools.pages import write_pages  # noqa: E402

SUITE: Final = ROOT / "tests/engine/structured/suite"
PAGE: Final = ROOT / "docs/structured-output.md"
BEGIN, END = "<!-- suite: begin -->\n", "<!-- suite: end -->\n"
DRAFTS: Final = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
OUTCOMES: Final = ("exact", "narrower", "wider", "refused")

NOTES: Final = {
    "allOf": "the properties of all parts have one fixed order",
    "const": "written as in the schema: 1, not 1.0; properties in the schema's order",
    "defs": "the meta-schema uses refused keywords",
    "definitions": "the meta-schema uses refused keywords",
    "dynamicRef": "refused unless it has no effect",
    "enum": "written as in the schema: 1, not 1.0",
    "format": "enforced, although the suite treats it as an annotation",
    "format/date-time": "a leap second only with Z or +00:00",
    "format/email": "no quoted local part, no IPv6 domain",
    "format/ipv6": "no mixed form with an IPv4 part",
    "format/time": "a leap second only with Z or +00:00",
    "format/unknown": "a format that JSON Schema does not define is an annotation",
    "if-then-else": "refused unless it has no effect",
    "maxContains": "refused unless it has no effect",
    "minContains": "refused unless it has no effect",
    "multipleOf": "refused with more than 15 digits",
    "not": "refused unless it has no effect",
    "oneOf": "as anyOf if the branches are known to exclude each other, otherwise refused",
    "patternProperties": "patterns must exclude each other",
    "propertyNames": "refused unless it has no effect",
    "ref": "within the schema, by pointer, anchor or id",
    "refRemote": "nothing is fetched",
    "type": "an integer is written without a point",
    "unevaluatedItems": "as items, if no other keyword evaluates items in place",
    "unevaluatedProperties": "as additionalProperties, if no other keyword evaluates properties in place",
    "uniqueItems": "refused unless it has no effect",
    "vocabulary": "nothing is fetched",
}


class _Bytes:
    """A vocabulary of single bytes."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end of text>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256, slices=[])


@dataclass
class Result:
    """One group of a keyword: results of its cases, reason of a refusal, and the compiled `schema`."""

    keyword: str
    description: str
    outcomes: list[tuple[str, str]] = field(default_factory=list)  # the case, its outcome
    refusal: str = ""
    matcher: Any = None
    schema: Any = None


def accepts(matcher: Any, text: str) -> bool:
    """Return true if the masks allow every byte of a text, and its end."""
    walk = matcher.deep_copy()
    return all(walk.try_consume_tokens([byte]) == 1 for byte in text.encode()) and bool(walk.is_accepting())


def results(draft: str) -> list[Result]:
    """Every group of the suite of a draft."""
    tokenizer, out = byte_tokenizer(), []
    for keyword, groups in json.loads((SUITE / f"{draft}.json").read_text()).items():
        for group in groups:
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            result = Result(keyword, group["description"], schema=schema)
            result.matcher, result.refusal = _compiled(schema, tokenizer)
            for name, data, valid in group["tests"]:
                if result.matcher is None:
                    outcome = "refused"
                else:
                    accepted = accepts(result.matcher, json.dumps(data, ensure_ascii=False))
                    outcome = "exact" if accepted == valid else "wider" if accepted else "narrower"
                result.outcomes.append((name, outcome))
            out.append(result)
    return out


def _compiled(schema: Any, tokenizer: LLTokenizer) -> tuple[Any, str]:
    try:
        enforced = enforce(schema, strict=True, param="schema").schema
    except RequestError as error:
        return None, str(error)
    matcher = LLMatcher(tokenizer, definition(Grammar("json_schema", json.dumps(enforced))), log_level=0, limits=LIMITS)
    return (None, matcher.get_error()) if matcher.is_error() else (matcher, "")


def table() -> str:
    counts: dict[str, dict[str, Counter[str]]] = {}
    for draft in DRAFTS:
        for result in results(draft):
            cell = counts.setdefault(result.keyword, {}).setdefault(draft, Counter())
            cell.update(outcome for _, outcome in result.outcomes)
    lines = [
        "| cases of | | 2020-12: " + " | ".join(OUTCOMES) + " | 7: " + " | ".join(OUTCOMES) + " | how |",
        "|---|---|" + "---|" * (2 * len(OUTCOMES) + 1),
    ]
    total = {draft: Counter[str]() for draft in DRAFTS}
    for keyword in sorted(counts, key=lambda name: (name.startswith("format/"), name)):
        cells = [counts[keyword].get(draft) for draft in DRAFTS]
        for draft, cell in zip(DRAFTS, cells, strict=True):
            total[draft].update(cell or {})
        lines.append(_line(f"`{keyword}`", _kind(cells), cells, NOTES.get(keyword, "")))
    lines.append(_line("all", "", list(total.values()), ""))
    return "\n".join(lines) + "\n"


def _kind(cells: list[Counter[str] | None]) -> str:
    seen = Counter[str]()
    for cell in cells:
        seen.update(cell or {})
    if not seen["exact"] + seen["narrower"]:
        return "refused"
    return "exact" if seen["exact"] == seen.total() else "approximated" if seen["narrower"] else "in part"


def _line(name: str, kind: str, cells: list[Counter[str] | None], note: str) -> str:
    numbers = [str(cell[outcome] or "") if cell else "" for cell in cells for outcome in OUTCOMES]
    return f"| {name} | {kind} | {' | '.join(numbers)} | {note} |".replace("  ", " ")


def page() -> str:
    """Return the page with an updated table."""
    text = PAGE.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :]


if __name__ == "__main__":
    write_pages(__doc__, {"structured-output.md": page})
