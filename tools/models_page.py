"""Writes docs/models.md from the declarations in engine/models: which architectures are served, and what of them."""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.models.families import ARCHITECTURES, FAMILIES  # noqa: E402

HEAD = """# Models that are served

<!-- made by tools/models_page.py from engine/models; a test keeps it so -->

Any checkpoint folder in Hugging Face layout whose `config.json` names one of these architectures: safetensors (one file
or shards), float32, bfloat16 or float16, old and new spellings of the configuration (`rope_theta` or `rope_parameters`,
`torch_dtype` or `dtype`, `text_config`). Rotary scalings: linear, dynamic, llama3, yarn, longrope. Sliding windows free
the blocks they leave behind. Mixtures of experts are served by the compiled kernels of a CPU, with any
weights that those have, and by torch, on a GPU too. Quantized checkpoints are refused for now.

| architecture | family | declared in |
|---|---|---|
"""

TAIL = """
Each is held to transformers in float32: logits within 1e-4, greedy tokens and logprobs through the whole engine
(`tests/engine/layers`, `tests/engine/test_against_transformers.py`).

## Another architecture

One file of declared parts and one line in `engine/models/families.py`. A checkpoint folder may also bring its own:
`slipway_model.py` with `ARCHITECTURES` and `declare(config)`, used only with `model.trust_remote_code: true`, because
its code is then run.
"""


def models_page() -> str:
    """The page as text."""
    lines = []
    for name in sorted(ARCHITECTURES):
        (family,) = (module for module in FAMILIES if name in module.ARCHITECTURES)
        first = " ".join((inspect.getdoc(family) or "").split("\n\n")[0].split())
        lines.append(f"| `{name}` | {first} | `engine/models/{family.__name__.rpartition('.')[2]}.py` |\n")
    return HEAD + "".join(lines) + TAIL


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(models_page())
