"""Measure the masks of structured output in microseconds per row and step, on one core.

    python -m benchmarks.masks [--vocabularies 32000,152000] [--rows 1,16] [--walks 16]

Vocabularies contain the words of Python's standard library by frequency, with all prefixes of each word, so they are
denser than trained ones. Words are split as in the pre-tokenizers of recent models: letters after at most one character
of another kind, single digits, punctuation, spaces. Replies are random walks over the masks, each with a new matcher,
so that first visits of automaton states count. A step is one call for all rows, as in the engine loop; `advance`
consumes one token. Times are CPU time, so that waiting on a busy machine does not count.
"""

import argparse
import collections
import json
import os
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from engine.api.messages import Grammar
from engine.structured.grammar import Compiler, Matcher
from engine.text.vocabulary import byte_level_text

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "score": {"type": ["number", "null"]},
    },
    "required": ["name", "age", "tags", "address", "score"],
    "additionalProperties": False,
}
ARITHMETIC: Final = r"""start: term (("+" | "-") term)*
term: factor (("*" | "/") factor)*
factor: NUMBER | NAME | "(" start ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_][a-z0-9_]*/"""
LANGUAGES: Final = {
    "JSON schema": Grammar("json_schema", json.dumps(PERSON)),
    "JSON object": Grammar("json_schema", '{"type": "object"}'),
    "regex": Grammar("regex", r"[A-Z][a-z]{1,20}( [A-Z][a-z]{1,20}){0,3}, \+?[0-9 ]{6,15}"),
    "letters": Grammar("regex", "[a-zA-Z ]{10,500}"),
    "small letters": Grammar("regex", "[a-z]{1,200}"),
    "text of JSON": Grammar("json_schema", '{"type": "string", "maxLength": 300}'),
    "choice": Grammar("lark", 'start: "yes" | "no" | "maybe later" | "I do not know"'),
    "Lark": Grammar("lark", ARITHMETIC),
    "text with tags": Grammar("lark", 'start: (call /[0-9]+/ ")")* /(?s:.*)/ \ncall[lazy]: /(?s:.*)<call\\(/'),
}
PIECES: Final = re.compile(r"_?[^\W\d_]+|[^\r\n\w]?[^\W\d_]+|[0-9]| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+|_")
STEPS: Final = 150  # of one walk at most


def write_tokenizer(directory: Path, size: int) -> None:
    """A byte-level tokenizer.json of `size` tokens."""
    counts: collections.Counter[str] = collections.Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:1500]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        counts.update(PIECES.findall(text))
    pieces = {bytes([byte]): byte for byte in range(256)}
    for word, _ in counts.most_common():
        for end in range(2, min(len(word), 24) + 1):
            if len(pieces) < size:
                pieces.setdefault(word[:end].encode(), len(pieces))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {byte_level_text(piece): token for piece, token in pieces.items()}, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "decoder": level}
    (directory / "tokenizer.json").write_text(json.dumps({**whole, "post_processor": None, "model": model}))


def walk(compiler: Compiler, grammar: Grammar, rows: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """Seconds per row of each step's masks, and of each token's advance."""
    matchers: list[Matcher] = [compiler.compile(grammar, [0]) for _ in range(rows)]
    masks, advances = list[float](), list[float]()
    for _ in range(STEPS):
        matchers = [each for each in matchers if not each.finished]
        if not matchers:
            break
        began = time.process_time()
        found = compiler.masks(matchers)
        masks.append((time.process_time() - began) / len(matchers))
        for matcher, mask in zip(matchers, found, strict=True):
            assert isinstance(mask, np.ndarray), mask
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            began = time.process_time()
            matcher.advance(token)
            advances.append(time.process_time() - began)
    return masks, advances


def measure(size: int, counts: Sequence[int], walks: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(Path(place), size)
        compiler = Compiler(Path(place), size)
        compiler.compile(LANGUAGES["choice"], [0])  # reads the tokenizer
        for name, grammar in LANGUAGES.items():
            began = time.process_time()
            compiler.compile(grammar, [0])
            compiled = (time.process_time() - began) * 1e3
            for rows in counts:
                rng, masks, advances = random.Random(1), list[float](), list[float]()
                for _ in range(max(1, walks * counts[0] // rows)):
                    step, advance = walk(compiler, grammar, rows, rng)
                    masks, advances = masks + step, advances + advance
                cells = [f"{np.percentile(values, q) * 1e6:.0f}" for values in (masks, advances) for q in (50, 99)]
                mean = f"{np.mean(masks) * 1e6:.0f}"
                print(f"| {size} | {name} | {rows} | {compiled:.1f} | {mean} | {' | '.join(cells)} |", flush=True)
        compiler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabularies", default="32000,152000")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--walks", type=int, default=16)
    asked = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("| vocabulary | language | rows | compile, ms | mask, µs: mean | p50 | p99 | advance, µs: p50 | p99 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in map(int, asked.vocabularies.split(",")):
        measure(size, [int(rows) for rows in asked.rows.split(",")], asked.walks)


if __name__ == "__main__":
    main()
