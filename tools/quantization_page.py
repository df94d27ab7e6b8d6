"""Write docs/quantization-formats.md from a recorded run of the tests: the tested properties of each format.

`tests/cells.py` describes how to record.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.pages import write_pages  # noqa: E402

RECORDING = ROOT / "docs" / "tested-formats.json"
Cells = dict[str, dict[str, str]]
"""Name of a checkpoint → column → text."""

COLUMNS = {
    "written by": "Tool that wrote the checkpoint. For some formats a library also wrote a matrix, whose values are "
    "compared with those that this library restores (`tests/engine/formats/golden`).",
    "loads": "The tensors have the names, shapes and types of the declaration, and are loaded.",
    "equal": "Logits of torch are those of the dequantized model in float32 (relative distance below 1e-5).",
    "2 ranks": "Two ranks of tensor parallelism compute the same with torch, and load the planned bytes with Triton "
    "kernels. *torch*: the groups or blocks of this checkpoint cannot be divided between two ranks, so only torch runs "
    "it, which dequantizes them.",
    "experts": "A model with routed experts in this format computes the same with torch and with Triton kernels.",
    "CPU": "Form in which the fastest compiled kernels multiply by the matrices, with the same logits (activations are "
    "rounded to 8 bits).",
    "GPU": "Form in which Triton kernels multiply by them, in Triton's interpreter. *× int8*, *× fp8*: activations are "
    "rounded as the checkpoint says; otherwise they are not rounded.",
    "bytes": "The loaded weights take the planned bytes, exactly: with torch, compiled and Triton kernels, and with "
    "routed experts.",
}

HEAD = """# Tested quantization formats

<!-- made by tools/quantization_page.py from docs/tested-formats.json; a test keeps it so -->

Check how a quantized checkpoint is computed before you download it. Each line is the result of one test that passed in
the recorded run, with tiny checkpoints of random weights. [models.md](models.md#quantized-checkpoints) describes the
settings that each format supports.

"""

FOOT = """
*dequantized*: the matrices are converted to the type of the activations when they are loaded.

## Record

This command runs the tests, and writes the recording and this page (about ten minutes):

```sh
.venv/bin/pytest --record-formats docs/tested-formats.json tests/engine/layers/test_format_cells.py
.venv/bin/python -m tools.quantization_page
```

Results of other tests are kept, so that one format can be recorded alone, for example with `-k gguf`.
"""


def read_formats(file: Path = RECORDING) -> Cells:
    found: Cells = json.loads(file.read_text())
    return found


def write_formats(file: Path, formats: Mapping[str, Mapping[str, str]]) -> None:
    """Write a recording with a line for each checkpoint."""
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(cells, ensure_ascii=False)}" for name, cells in formats.items()
    )
    file.write_text(f"{{\n{lines}\n}}\n")


def quantization_page() -> str:
    """Return the page for the recording."""
    formats = read_formats()
    lines = [f"| format | checkpoint of the test | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, cells in sorted(formats.items(), key=lambda one: _method(one[1]["format"])):
        lines.append(f"| {cells['format']} | `{name}` | {' | '.join(cells[column] for column in COLUMNS)} |")
    columns = "".join(f"| {name} | {text} |\n" for name, text in COLUMNS.items())
    return f"{HEAD}{chr(10).join(lines)}\n\n## Columns\n\n| column | meaning |\n|---|---|\n{columns}{FOOT}"


def _method(text: str) -> str:
    """Return the method of a description such as `4 bits (gptq, groups of 128)`."""
    before, _, inside = text.partition("(")
    return inside.partition(",")[0].rstrip(")") if " bits" in before or before.startswith("fp8") else before.strip()


if __name__ == "__main__":
    write_pages(__doc__, {"quantization-formats.md": quantization_page})
