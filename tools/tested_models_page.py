"""Write docs/tested-models.md from a recorded run of the tests: the tested properties of each architecture.

`tests/cells.py` describes how to record. `EMPTY` has the reasons of cells without tests.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.models.families import ARCHITECTURES, POOLED  # noqa: E402
from tools.pages import write_pages  # noqa: E402

RECORDING = ROOT / "docs" / "tested-models.json"
Cells = dict[str, dict[str, list[str]]]
"""Architecture → column → node ids of the tests that passed."""
NotRun = dict[str, list[str]]
"""Architecture → columns with tests that were not part of the recorded run."""
NOT_RUN = "Its tests were not part of the recorded run."

GENERATING = ("chunked prefill", "prefix hit", "preempted", "resumed after SIGKILL")
COLUMNS = {
    "loads": "A checkpoint that transformers saved is loaded.",
    "equals transformers": "Logits, or logprobs of greedy replies, are those of transformers in float32 within 1e-4 "
    "(2e-4 for sums over many steps), and tokens are equal.",
    "chunked prefill": "So are they if a prompt is computed in several steps.",
    "prefix hit": "So are they if the beginning of the prompt is in the prefix cache.",
    "preempted": "So are they if requests are preempted, because the KV cache is too small for all.",
    "resumed after SIGKILL": "An engine process is killed in the middle of a reply; the next one continues it with "
    "the same tokens.",
    "2 ranks": "Two ranks of tensor parallelism compute the same.",
    "compiled CPU": "The fastest compiled kernels of the CPU compute the same.",
    "Triton interpreted": "Triton's kernels compute the same, in its interpreter.",
    "planned bytes = loaded bytes": "The loaded weights take the planned bytes, exactly.",
}

ALIASES = {
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "Ernie4_5_MoEForCausalLM": "Ernie4_5_MoeForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
}
"""Names that first exporters gave to an architecture, and its present name."""

ENCODER_DECODERS = [name for name in ARCHITECTURES if "ConditionalGeneration" in name or name == "MarianMTModel"]
POOLING = [name for family in POOLED for name in family.ARCHITECTURES]


SPEECH = ["WhisperForConditionalGeneration"]
NO_ATTENTION = ("FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM")
NO_BLOCKS = (*NO_ATTENTION, "RecurrentGemmaForCausalLM")


def _cells(names: Iterable[str], columns: Iterable[str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, column) for name in names for column in columns)


EMPTY: dict[str, frozenset[tuple[str, str]]] = {
    "The name is an older one of another row.": _cells(ALIASES, COLUMNS),
    "No tokens are generated.": _cells(POOLING, GENERATING),
    "A request needs no more blocks than at its admission, because the model has no attention or only windows.": _cells(
        NO_BLOCKS, ["preempted"]
    ),
    "Triton kernels do not support the encoder of spectrograms.": _cells(SPEECH, ["Triton interpreted"]),
    "The encoder input is computed in one step, and no state is cached, because all of it depends on the complete "
    "input.": _cells(ENCODER_DECODERS, ("chunked prefill", "prefix hit")),
}
"""Reason → cells that stay empty."""

HEAD = """# Tested models

<!-- made by tools/tested_models_page.py from docs/tested-models.json; a test keeps it so -->

This page lists the tested properties of each architecture. Checkpoints of the tests are tiny and random; each
architecture has one or several configurations, among them odd ones (one KV head, odd sizes, windows at the edges of
blocks). A cell with ✓ is the result of tests that passed in the recorded run;
[tested-models.json](tested-models.json) has their names. An empty cell has the letter of its reason.
[models.md](models.md) describes the architectures.

"""

FOOT = """
## Record

`make test` runs a part of these tests, `make test-all` all of them. This command runs them, and writes the recording
and this page (about half an hour):

```sh
.venv/bin/pytest --record-cells docs/tested-models.json -m "not variants" -k "not base" tests/engine
.venv/bin/python -m tools.tested_models_page
```

Results of other tests are kept, so one family can be recorded with its tests alone, for example with `-k afmoe`. A new
architecture needs a test that uses the fixture `shows` (`tests/cells.py`) for each column, or a reason in `EMPTY` of
the tool.
"""


def read_recording(file: Path = RECORDING) -> Cells:
    """Read a recording. It has each test once, and refers to it by its number."""
    written = json.loads(file.read_text())
    tests = written["tests"]
    return {
        name: {column: [tests[number] for number in numbers] for column, numbers in columns.items()}
        for name, columns in written["architectures"].items()
    }


def read_not_run(file: Path = RECORDING) -> NotRun:
    """Read the cells whose tests have not been run for the recording."""
    found: NotRun = json.loads(file.read_text())["not_run"]
    return found


def write_recording(file: Path, cells: Cells, not_run: NotRun) -> None:
    """Write a recording with a line for each test and each architecture. Recorded cells are removed from `not_run`."""
    tests = sorted({test for columns in cells.values() for found in columns.values() for test in found})
    number = {test: at for at, test in enumerate(tests)}
    rows = {
        name: {column: [number[test] for test in cells[name][column]] for column in COLUMNS if column in cells[name]}
        for name in sorted(cells)
    }
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in rows.items())
    named = ",\n".join(f" {json.dumps(test)}" for test in tests)
    left = {name: [one for one in columns if one not in cells.get(name, {})] for name, columns in not_run.items()}
    rest = ",\n".join(f" {json.dumps(name)}: {json.dumps(columns)}" for name, columns in left.items() if columns)
    parts = f'"tests": [\n{named}\n],\n"architectures": {{\n{lines}\n}},\n"not_run": {{\n{rest}\n}}'
    file.write_text(f"{{{parts}}}\n")


def problems(cells: Mapping[str, Mapping[str, object]], not_run: Mapping[str, Sequence[str]]) -> list[str]:
    """Return every disagreement of a recording with the list of families and with the reasons for empty cells."""
    found = [f"{name} is recorded, but not served; remove it" for name in sorted(cells.keys() - set(ARCHITECTURES))]
    for name in ARCHITECTURES:
        for column in COLUMNS:
            filled, reasons = column in cells.get(name, {}), _reasons(name, column, not_run)
            if filled and reasons:
                found.append(f"{name}, {column}: is recorded, but EMPTY has a reason why it is not")
            if not filled and len(reasons) != 1:
                found.append(f"{name}, {column}: is not recorded; EMPTY has {len(reasons)} reasons instead of 1")
    return found


def _reasons(name: str, column: str, not_run: Mapping[str, Sequence[str]]) -> list[str]:
    found = [reason for reason, cells in EMPTY.items() if (name, column) in cells]
    return [*found, NOT_RUN] if column in not_run.get(name, ()) else found


def tested_models_page() -> str:
    """Return the page for the recording."""
    cells, not_run = read_recording(), read_not_run()
    shown = (*EMPTY, NOT_RUN) if not_run else tuple(EMPTY)
    letter = {reason: chr(ord("a") + at) for at, reason in enumerate(shown)}
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in sorted(ARCHITECTURES):
        marks = [
            "✓" if column in cells.get(name, {}) else " ".join(letter[one] for one in _reasons(name, column, not_run))
            for column in COLUMNS
        ]
        lines.append(f"| `{name}` | {' | '.join(marks)} |")
    columns = "".join(f"| {name} | {text} |\n" for name, text in COLUMNS.items())
    reasons = "".join(f"| {letter[reason]} | {reason} |\n" for reason in shown)
    aliases = "".join(f"| `{old}` | `{new}` |\n" for old, new in ALIASES.items())
    return (
        HEAD
        + "\n".join(lines)
        + f"\n\n## Columns\n\n| column | meaning |\n|---|---|\n{columns}"
        + f"\n## Empty cells\n\n| letter | reason |\n|---|---|\n{reasons}"
        + f"\n| older name | row |\n|---|---|\n{aliases}"
        + FOOT
    )


if __name__ == "__main__":
    write_pages(__doc__, {"tested-models.md": tested_models_page})
