"""Write docs/choose.md from the first lines of manifests/*.yaml.

python -m tools.choose_page [--out DIR]
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# Choose a manifest

Find the example that is nearest to your hardware and model, copy it, and let `slipway check` and `slipway plan` judge
the copy. `slipway init MODEL` writes a commented manifest for this machine instead.

```sh
slipway init manifests/demo -o my.yaml
slipway check my.yaml
slipway plan my.yaml --hardware h200x1
```

`--hardware` plans for a machine that you do not have: `h100x4` is four GPUs of a kind, `avx512:16:60GiB` is a CPU with
16 cores and this much free memory.

## By size

Weights take the number of parameters times the bytes of each: 2 in bfloat16, 1 in 8 bits, about 0.6 in 4 bits. The KV
cache needs memory on top of that; `slipway plan MANIFEST --why kv` derives it for your model.

| model | bfloat16 | 8 bits | 4 bits |
|---|---|---|---|
"""
SIZES = ((0.6, "0.6B"), (1.7, "1.7B"), (4, "4B"), (8, "8B"), (14, "14B"), (32, "32B"), (70, "70B"))
BYTES = (2.0, 1.05, 0.6)
NEXT = """
Use 4 or 8 bits on a CPU (`quantization: {weights: int8}`), because decoding reads all weights for every token. On a GPU
use bfloat16 if it fits, else a checkpoint with packed weights, or several GPUs with `parallelism: {tensor: 2}`.

## By hardware

The examples are in the folder `manifests`.

"""


@dataclass(frozen=True)
class Example:
    name: str
    purpose: str
    machine: str  # in words
    model: str  # name of the checkpoint


def examples() -> list[Example]:
    found = []
    for path in sorted((ROOT / "manifests").glob("*.yaml")):
        text = path.read_text()
        lines = []
        for line in text.splitlines():
            if not line.startswith("# ") or line.startswith(("# For:", "# yaml-language-server")):
                break
            lines.append(line[2:])
        machine = re.search(r"^# For: (.+?)\.?$", text, re.MULTILINE)
        assert machine, f"{path.name} does not say what it is for"
        purpose = re.split(r"(?<=\.)\s", " ".join(lines))[0]
        found.append(Example(path.name, purpose, machine[1], model(yaml.safe_load(text))))
    return found


def model(manifest: dict[str, object]) -> str:
    """Return the last part of the path, repository or package of the model."""
    section = manifest["model"]
    assert isinstance(section, dict)
    source = section.get("source") or {}
    for kind, value in source.items():
        if kind in ("path", "s3", "gs", "az", "huggingface", "pypi"):
            word = value if isinstance(value, str) else value.get("repo") or value.get("package") or value.get("uri")
            return "" if "${" in str(word) else str(word).rstrip("/").rsplit("/", 1)[-1]
    return ""


def choose_page() -> str:
    sizes = [f"| {name} | {' | '.join(f'{count * each:,.1f} GB' for each in BYTES)} |\n" for count, name in SIZES]
    table = ["| manifest | model | for | purpose |\n|---|---|---|---|\n"]
    for one in sorted(examples(), key=lambda one: ("NVIDIA" in one.machine, one.machine, one.name)):
        machine = re.sub(r"--hardware (\S+?)\)", r"`\1`)", one.machine).replace("|", "\\|")
        table.append(f"| [{one.name}](../manifests/{one.name}) | {one.model} | {machine} | {one.purpose} |\n")
    return HEAD + "".join(sizes) + NEXT + "".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/choose.md.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR", help="folder (docs)")
    path = parser.parse_args().out / "choose.md"
    path.write_text(choose_page())
    print(path)


if __name__ == "__main__":
    main()
