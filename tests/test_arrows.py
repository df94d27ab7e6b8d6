"""Who may import whom (docs/architecture.md). Found by reading the source, and once more by importing it afresh."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("appliance", "engine", "kernels", "benchmarks", "tests", "tools")

# package (the longest that matches a module counts) → what of the project it may import
ALLOWED: dict[str, tuple[str, ...]] = {
    "appliance": (
        "appliance",
        "engine.api",
        "engine.text",
        "engine.gguf",
        "engine.models",
        "engine.kv.layout",
        "engine.structured.definition",
        "engine.structured.schema",
        "kernels.cpu.library",
    ),
    "engine": ("engine", "kernels"),
    "engine.api": ("engine.api",),
    "engine.gguf": ("engine.gguf", "engine.api.errors", "engine.api.files"),
    "engine.text": ("engine.text", "engine.gguf", "engine.api.errors", "engine.api.files"),
    "engine.models": (
        *("engine.models", "engine.gguf", "engine.api.errors", "engine.api.config", "engine.api.files"),
        "engine.text.tokenizer",
    ),
    "engine.kv": ("engine.kv", "engine.api", "engine.models.parts"),
    "engine.structured": ("engine.structured", "engine.text", "engine.api"),
    "engine.core": ("engine.core", "engine.api", "engine.kv", "engine.structured", "engine.models.parts"),
    "engine.weights": ("engine.weights", "engine.models", "engine.distributed", "engine.api", "kernels"),
    "engine.distributed": ("engine.distributed", "engine.models.ranks", "engine.api", "kernels"),
    "engine.layers": (
        *("engine.layers", "engine.models", "engine.weights", "engine.distributed", "engine.kv.layout"),
        *("engine.worker.batch", "engine.api", "kernels"),
    ),
    "engine.sampling": ("engine.sampling", "engine.layers", "engine.api", "kernels"),
    "engine.worker": (
        *("engine.worker", "engine.api", "engine.core.plan", "engine.kv", "engine.models", "engine.weights"),
        *("engine.distributed", "engine.layers", "engine.sampling", "engine.text", "kernels"),
    ),
    "kernels": ("kernels",),
}
TORCH_FREE = (
    "appliance",
    "engine.api",
    "engine.text",
    "engine.gguf",
    "engine.models",
    "engine.core",
    "engine.kv",
    "engine.structured",
    "kernels.cpu.library",
)
# The two that put an engine together: the program, and the offline `LLM`.
TOGETHER = ("engine.__main__", "engine.llm")
HEAVY = ("torch", "triton", "transformers")


# These build whatever objects a file names, or run it.
UNSAFE_MODULES = ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
UNSAFE_CALLS = (
    "eval",
    "exec",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "np.load",
    "numpy.load",
)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("appliance", "engine", "kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, in functions too; `from a import b` counts as a.b if that is a module of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                inner = f"{base}.{name.name}"
                yield node.lineno, inner if _is_module(inner) else base


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def forbidden(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """`line: module → imported` for each arrow that does not exist."""
    owner = max((package for package in ALLOWED if within(module, package)), key=len)
    torch_free = any(within(module, package) for package in TORCH_FREE)
    for line, name in imports(source, module, is_package):
        heavy = name.split(".")[0] in HEAVY and torch_free
        ours = name.split(".")[0] in OURS and not any(within(name, package) for package in ALLOWED[owner])
        if heavy or (ours and module not in TOGETHER):
            yield f"{line}: {module} → {name}"


def test_no_module_imports_what_it_may_not() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{arrow}"
        for module, path in modules()
        for arrow in forbidden(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not wrong, "forbidden imports:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "arrow"),
    [
        ("appliance.server.openai.chat", "import os\nimport torch", "2: appliance.server.openai.chat → torch"),
        (
            "appliance.planning",
            "from engine.core import scheduler",
            "1: appliance.planning → engine.core.scheduler",
        ),
        ("appliance.planning", "from engine.kv import NULL", "1: appliance.planning → engine.kv"),
        ("engine.api.frames", "from engine.models import parts", "1: engine.api.frames → engine.models.parts"),
        ("engine.core.loop", "def f():\n    from torch import nn", "2: engine.core.loop → torch"),
        ("engine.core.loop", "from ..worker import batch", "1: engine.core.loop → engine.worker.batch"),
        ("engine.worker.run", "from engine.core import scheduler", "1: engine.worker.run → engine.core.scheduler"),
        ("engine.models.llama", "import appliance.planning.plan", "1: engine.models.llama → appliance.planning.plan"),
        ("kernels.op", "import engine.api", "1: kernels.op → engine.api"),
        ("engine.sampling.draw", "import benchmarks", "1: engine.sampling.draw → benchmarks"),
    ],
)
def test_a_forbidden_arrow_is_told_with_its_line(module: str, source: str, arrow: str) -> None:
    assert list(forbidden(module, source)) == [arrow]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("appliance.planning", "from engine.kv.layout import layout\nimport engine.api.config\nimport pydantic"),
        ("engine.worker.run", "from engine.core.plan import StepPlan\nimport torch"),
        ("engine.core.loop", "from . import plan\nfrom .plan import StepPlan\nfrom engine.kv import layout"),
        ("kernels.op", "import torch, triton"),
    ],
)
def test_an_allowed_arrow_is_not_told(module: str, source: str) -> None:
    assert not list(forbidden(module, source))


@pytest.mark.parametrize("package", TORCH_FREE)
def test_a_fresh_interpreter_imports_every_module_of_a_package_without_torch(package: str) -> None:
    names = [name for name, _ in modules() if within(name, package) and not name.endswith("__main__")]
    assert names
    loaded = f"[n for n in {HEAVY!r} if n in sys.modules]"
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def unsafe_readers(source: str) -> Iterator[str]:
    """`line: name` of each import and call that could run code out of a file."""
    for line, name in imports(source, "x", is_package=False):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{line}: {name}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
            yield f"{node.lineno}: {ast.unparse(node.func)}"


def test_no_module_reads_a_format_that_can_run_code() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{found}" for _, path in modules() for found in unsafe_readers(path.read_text())]
    assert not wrong, "use msgspec, JSON or safetensors instead:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import Unpickler",
        "def f(x):\n    return eval(x)",
        "torch.load(p)",
        "yaml.load(t, L)",
    ],
)
def test_a_format_that_can_run_code_is_found(source: str) -> None:
    assert list(unsafe_readers(source))


def test_methods_named_eval_are_not_taken_for_the_function() -> None:
    assert not list(unsafe_readers("model.eval()\nyaml.safe_load(x)\nimport pickletools_of_ours"))
