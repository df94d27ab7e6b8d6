"""Check the image's environment after pruning, in its build: `verify.py MODEL [--compiled]`.

Generate tokens from the checkpoint MODEL with torch and, if they are installed, with each compiled kernel variant that
this CPU runs; the greedy texts must be equal. Import every module that the service imports. Both also write the
bytecode of exactly the modules that serving uses, because the build installs packages without any.

`--compiled` fails if the compiled kernels are missing: the build stage has a compiler.
"""

import argparse
import compileall
import importlib
import subprocess
import sys
from pathlib import Path

import appliance
import engine
import kernels
from engine import LLM, Params
from kernels.cpu import library

SERVICE = (
    "appliance.cli.main",
    "appliance.cli.entry",
    "appliance.server.process",
    "appliance.supervisor.reaper",
    "appliance.supervisor.launch",
    "appliance.supervisor.monitor",
    "appliance.planning.validate",
    "appliance.checkpoints.archive",
    "appliance.checkpoints.buckets",
    "appliance.checkpoints.hub",
    "appliance.checkpoints.wheel",
    "engine.__main__",
    "av",
    "gguf",
    "sentencepiece",
    "supervisor.supervisord",
    "tiktoken",
)


def generate(model: Path, **overrides: object) -> str:
    """Return 16 greedy tokens as text."""
    with LLM(model, **overrides) as llm:
        return llm.generate(["What is 17 + 25?"], Params(max_tokens=16, temperature=0.0))[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the image's environment after pruning.")
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--compiled", action="store_true", help="fail if the compiled kernels are missing")
    options = parser.parse_args()
    variants = library.usable()
    if options.compiled and not variants:
        raise SystemExit(
            f"verify: there is a C++ compiler, but {library.FOLDER} has no compiled kernels; does .dockerignore admit "
            "setup.py and kernels/?"
        )
    if not variants:
        print("verify: WARNING: no compiled CPU kernels; on a CPU this image serves with torch, several times slower")
    for name in SERVICE:
        importlib.import_module(name)
    # model.source.pypi runs pip as a program.
    subprocess.run(
        [sys.executable, "-B", "-P", "-m", "pip", "download", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    texts = {name: generate(options.model, kernels=name) for name in ("torch", *variants)}
    if len(set(texts.values())) != 1:
        raise SystemExit(f"verify: the greedy texts differ: {texts}")
    for package in (appliance, engine, kernels):
        if not compileall.compile_dir(Path(str(package.__file__)).parent, quiet=1):
            raise SystemExit(f"verify: {package.__name__} does not compile")
    print(f"verify: {', '.join(texts)} generate the same text; kernels for this CPU: {library.best()}")


if __name__ == "__main__":
    main()
