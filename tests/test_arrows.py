"""Which package may import which (docs/architecture.md), and that no imports form a cycle.

Found by reading the source: imports in functions and under TYPE_CHECKING count too. A package imports another if one of
its modules does. Cycles of packages are searched among the children of each package: its modules, and its subpackages
as a whole; a package and its own subpackages are one unit outside of it.
"""

import ast
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("appliance", "engine", "kernels", "slipway")
OURS = (*PACKAGES, "benchmarks", "tests", "tools")

# Every package, lowest first, with what else of the project its modules may import. A package may import itself. The
# line of the longest name that matches a module counts. A package without a line fails.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "kernels.cpu": (
        *(
            "kernels.ggml_blocks",
            "kernels.ggml_layout",
            "kernels.jit",
            "kernels.joined",
            "kernels.op",
            "kernels.quantisation",
            "kernels.page_codes",
            "kernels.stored_codes",
        ),
    ),
    "kernels.tools": ("kernels.jit", "kernels.op"),
    "kernels.sampling": ("kernels.cpu", "kernels.jit", "kernels.op"),
    "kernels.experts": (
        *("kernels.integer_layout", "kernels.integer_matmul", "kernels.sampling", "kernels.jit", "kernels.op"),
        *("kernels.tuning", "kernels.e4m3", "kernels.int8_matmul", "kernels.fp8_matmul", "kernels.product_tiles"),
        *("kernels.quantize_int8", "kernels.block_sum", "kernels.plane_layout", "kernels.planes"),
    ),
    "kernels.attention": (
        "kernels.cpu",
        "kernels.sampling",
        "kernels.jit",
        "kernels.op",
        "kernels.tuning",
        "kernels.page_codes",
    ),
    "kernels.recurrent": ("kernels.activation", "kernels.attention", "kernels.cpu", "kernels.jit", "kernels.op"),
    "engine": ("kernels",),
    "engine.api": (),
    "engine.metrics": ("engine.api",),
    "engine.gguf": ("engine.api.errors", "engine.api.files"),
    "engine.text": ("engine.gguf", "engine.api.errors", "engine.api.files"),
    "engine.media": ("engine.api.errors", "engine.api.files", "engine.api.media"),
    "engine.formats": (
        *("engine.api.errors", "kernels.fp8", "kernels.ggml_blocks", "kernels.ggml_layout", "kernels.integer_layout"),
        *("kernels.plane_layout", "kernels.quantisation", "kernels.cpu.quantize", "kernels.stored_codes"),
    ),
    "engine.models": (
        *("engine.formats", "engine.gguf", "engine.api.errors", "engine.api.config", "engine.api.files"),
        *("engine.api.media", "engine.text.tokenizer"),
    ),
    "engine.models.parts": ("engine.models.declared", "engine.api.media"),
    "engine.models.parts.recurrent": ("engine.models.declared", "engine.models.parts"),
    "engine.lowering.operations": ("engine.models",),
    "engine.models.gguf_families": ("engine.models", "engine.gguf", "engine.api.errors"),
    "engine.lowering": (
        *("engine.formats", "engine.models", "engine.api.config", "engine.api.errors", "kernels.ggml_layout"),
    ),
    "engine.kv": ("engine.api", "engine.models.parts", "engine.models.ranks"),
    "engine.structured": ("engine.text", "engine.api"),
    "engine.core": ("engine.api", "engine.kv", "engine.structured", "engine.models.parts"),
    "engine.core.whatif": ("engine.core", "engine.api"),
    "engine.distributed": ("engine.models.ranks", "engine.api", "kernels"),
    "engine.weights": ("engine.formats", "engine.models", "engine.distributed", "engine.api", "kernels"),
    "engine.layers": (
        *("engine.formats", "engine.models", "engine.lowering", "engine.weights", "engine.distributed"),
        *("engine.kv.layout", "engine.kv.states", "engine.worker.batch", "engine.api", "kernels"),
    ),
    "engine.layers.reference": (
        *("engine.models", "engine.lowering", "engine.layers", "engine.distributed.world", "engine.kv.layout"),
        "kernels",
    ),
    "engine.layers.compiled": (
        *("engine.models", "engine.lowering", "engine.layers", "engine.kv.layout", "engine.api", "kernels"),
        "engine.weights",
    ),
    "engine.layers.fused": (*("engine.models", "engine.lowering", "engine.layers", "engine.distributed", "kernels"),),
    "engine.sampling": ("engine.layers", "engine.distributed.world", "engine.api", "kernels"),
    "engine.worker": (
        *("engine.api", "engine.core.plan", "engine.kv", "engine.models", "engine.weights", "engine.distributed"),
        *("engine.formats", "engine.layers", "engine.lowering", "engine.sampling", "engine.text", "engine.imports"),
        "engine.media.spectrogram",
        "kernels",
    ),
    "appliance": (),
    "appliance.config": ("engine.api",),
    "appliance.config.sections": ("appliance.config.key",),
    "appliance.config.composition": ("appliance.config", "engine.api"),
    "appliance.hardware": ("kernels.cpu.library",),
    "appliance.output_formats": ("engine.api", "engine.structured.definition", "engine.structured.schema"),
    "appliance.migration": ("appliance.config", "appliance.output_formats"),
    "appliance.runtime": ("appliance.config",),
    "appliance.chat_templates": ("appliance.runtime.limited_processes", "engine.api", "engine.text"),
    "appliance.media": (
        *("appliance.config.sections", "appliance.runtime.limited_processes"),
        *("engine.api.errors", "engine.api.files", "engine.api.media", "engine.media"),
    ),
    "appliance.security": ("appliance.config", "engine.api"),
    "appliance.observability": ("appliance.config", "appliance.security", "engine.api", "engine.metrics"),
    "appliance.checkpoints": ("appliance.config", "appliance.runtime", "engine.api", "engine.models"),
    "appliance.constraints": (
        *("appliance.config", "appliance.hardware"),
        *("engine.api", "engine.formats", "engine.kv.layout", "engine.models", "engine.lowering"),
        "kernels.cpu.library",
    ),
    "appliance.planning": (
        *("appliance.config", "appliance.hardware", "appliance.constraints", "appliance.checkpoints"),
        *("appliance.security", "appliance.chat_templates", "appliance.output_formats"),
        *("engine.api", "engine.formats", "engine.gguf", "engine.kv.layout", "engine.kv.states", "engine.models"),
        *("engine.lowering", "engine.media.families"),
        *("engine.text", "kernels.cpu.library"),
    ),
    "appliance.planning.diff": (
        *("appliance.planning", "appliance.config", "appliance.hardware", "appliance.constraints"),
        "appliance.runtime",
    ),
    "appliance.bench": (),
    "appliance.bundle": (
        *("appliance.planning", "appliance.lockfile", "appliance.checkpoints", "appliance.config"),
        *("appliance.deployment.service", "engine.gguf"),
    ),
    "appliance.tuning": (
        *("appliance.planning", "appliance.bench", "appliance.config", "appliance.hardware"),
        *("engine.api", "engine.core", "engine.kv.layout", "engine.kv.states", "engine.models", "engine.text"),
    ),
    "appliance.evaluation": ("appliance.bench", "appliance.config.sections"),
    "appliance.deployment": (
        *("appliance.planning", "appliance.config", "appliance.checkpoints", "appliance.hardware"),
        *("appliance.observability.alerts", "engine.metrics.families", "appliance.observability.rules"),
    ),
    "appliance.lockfile": (
        *("appliance.planning", "appliance.config", "appliance.checkpoints"),
        *("engine.api", "engine.formats.registry", "engine.gguf", "engine.models", "engine.text"),
    ),
    "appliance.supervisor": (
        *("appliance.planning", "appliance.lockfile", "appliance.checkpoints", "appliance.hardware"),
        *("appliance.config", "appliance.runtime", "engine.api"),
    ),
    "slipway": (
        *("appliance.config", "appliance.planning", "appliance.server.chat", "appliance.server.pooling"),
        *("appliance.server.schema", "engine"),
    ),
    "appliance.server": (
        *("appliance.config", "appliance.security", "appliance.runtime", "appliance.observability"),
        *("appliance.chat_templates", "engine.api"),
    ),
    "appliance.server.schema": (),
    "appliance.server.schema.fields": ("appliance.server.schema",),
    "appliance.server.errors": ("engine.api",),
    "appliance.server.reply_store": ("appliance.config", "appliance.observability", "engine.api"),
    "appliance.server.routing": (
        *("appliance.server.errors", "appliance.config", "appliance.runtime", "appliance.observability"),
        *("engine.api", "engine.metrics.sequence", "appliance.checkpoints.unpack", "appliance.checkpoints.remote"),
    ),
    "appliance.server.chat": (
        *("appliance.server.schema", "appliance.config", "appliance.chat_templates", "appliance.output_formats"),
        *("appliance.media.part", "engine.media"),
        *("engine.api", "engine.text", "engine.structured.definition", "engine.structured.schema"),
    ),
    "appliance.server.http": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat"),
        *("appliance.server.reply_store", "appliance.server.routing"),
        *("appliance.config", "appliance.security", "appliance.runtime", "appliance.observability"),
        *("appliance.chat_templates", "appliance.media", "engine.api", "engine.text"),
    ),
    "appliance.server.admin": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.http"),
        *("appliance.server.routing", "appliance.observability", "engine.api"),
    ),
    "appliance.server.openai": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.server.reply_store", "appliance.output_formats", "appliance.observability"),
        *("appliance.media.part", "engine.api", "engine.text"),
    ),
    "appliance.server.openai.responses": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.server.reply_store", "appliance.server.routing"),
        *("appliance.output_formats", "appliance.observability", "appliance.media.part", "engine.api"),
    ),
    "appliance.server.anthropic": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.server.reply_store", "appliance.output_formats", "appliance.observability"),
        *("appliance.media.part", "engine.api"),
    ),
    "appliance.server.pooling": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.config", "appliance.chat_templates", "appliance.media.part", "engine.api", "engine.text"),
        "engine.media.prompt",
    ),
    "appliance.server.speech": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.config", "appliance.observability", "engine.api", "engine.media", "engine.text"),
    ),
    "appliance.server.cohere": (
        *("appliance.server.schema", "appliance.server.chat", "appliance.server.http", "appliance.server.pooling"),
        *("appliance.media.part", "engine.api"),
    ),
    "appliance.server.platforms": (
        *("appliance.server.schema", "appliance.server.errors", "appliance.server.chat", "appliance.server.http"),
        *("appliance.server.admin", "appliance.server.openai", "appliance.server.anthropic"),
        *("appliance.server.pooling", "appliance.server.cohere", "appliance.observability", "engine.api"),
        "appliance.config",
        "appliance.security",
    ),
    "appliance.chaos": (
        *("appliance.supervisor", "appliance.server.reply_store", "appliance.config", "appliance.security"),
        *("appliance.runtime", "engine.api"),
    ),
    "appliance.cli": (
        *("appliance.chaos", "appliance.supervisor", "appliance.planning", "appliance.lockfile"),
        *("appliance.checkpoints", "appliance.constraints", "appliance.hardware", "appliance.config"),
        *(
            "appliance.bench",
            "appliance.bundle",
            "appliance.deployment",
            "appliance.evaluation",
            "appliance.observability.alerts",
            "appliance.observability.rules",
            "appliance.migration",
            "appliance.runtime.processes",
            "appliance.security",
            "appliance.tuning",
            "engine.api",
            "engine.models",
            "engine.text",
        ),
    ),
    "appliance.cli.explanations": (
        *("appliance.config", "appliance.constraints", "appliance.supervisor", "appliance.server.errors"),
        "appliance.observability.alerts",
    ),
}
TORCH_FREE = (
    "appliance",
    "engine.api",
    "engine.media",
    "engine.text",
    "engine.gguf",
    "engine.models",
    "engine.lowering",
    "engine.core",
    "engine.kv",
    "engine.structured",
    "kernels.cpu.library",
)
# Their functions that read tensors import torch when they are called; plans call none of them.
TORCH_IN_FUNCTIONS = ("engine.formats",)
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


def modules(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def packages() -> set[str]:
    """Every folder with a Python file."""
    return {".".join(path.relative_to(ROOT).parts[:-1]) for _, path in modules()}


class Statements(NamedTuple):
    """Parts of a source that the tests read."""

    imports: list[ast.Import | ast.ImportFrom]
    calls: list[tuple[int, str]]  # line and name of each function that UNSAFE_CALLS may list


LISTED_CALL = re.compile(rf"\b(?:{'|'.join(map(re.escape, UNSAFE_CALLS))})\s*\(")


def blocks(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements, including those in functions, classes, branches, handlers and cases."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(tree, name, ())
        for one in inner if isinstance(inner, list) else ():
            yield one
            yield from blocks(one)


@cache
def statements(source: str) -> Statements:
    """Return the imports and calls of a source, which is parsed once for all tests. Its expressions are searched only
    if it has the name of a listed call."""
    tree = ast.parse(source)
    found = Statements([one for one in blocks(tree) if isinstance(one, ast.Import | ast.ImportFrom)], [])
    for node in ast.walk(tree) if LISTED_CALL.search(source) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.calls.append((node.lineno, node.func.id))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            found.calls.append((node.lineno, f"{node.func.value.id}.{node.func.attr}"))
    return found


def imports(source: str, module: str, is_package: bool, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, in functions too; `from a import b` counts as a.b if that is a module of ours."""
    for node in statements(source).imports:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        else:
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                inner = f"{base}.{name.name}"
                yield node.lineno, inner if _is_module(inner, root) else base


@cache
def _is_module(name: str, root: Path) -> bool:
    if root == ROOT and name.split(".")[0] not in OURS:
        return False
    path = root / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


Graph = dict[str, set[str]]


@cache
def import_graph(root: Path = ROOT) -> Graph:
    """Each module with the modules of ours that it imports. The import of a package by its own module does not count:
    Python loads a package before its modules in any case."""
    found = dict(modules(root))
    return {
        module: {
            name
            for _, name in imports(path.read_text(), module, path.name == "__init__.py", root)
            if name in found and not within(module, name)
        }
        for module, path in found.items()
    }


def children_graph(graph: Graph, package: str) -> Graph:
    """The children of a package, "" for the top, with the children that each imports."""
    depth = len(package.split(".")) + 1 if package else 1

    def child(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    inside = {module for module in graph if not package or (within(module, package) and module != package)}
    children: Graph = {child(module): set() for module in sorted(inside)}
    for module in inside:
        children[child(module)] |= {child(name) for name in graph[module] & inside} - {child(module)}
    return children


def cycles(graph: Graph) -> list[list[str]]:
    """The shortest way from each node back to itself, found by brute force; each cycle once."""
    found: dict[frozenset[str], list[str]] = {}
    try:
        TopologicalSorter(graph).prepare()
        return []
    except CycleError:
        pass
    for start in graph:
        ways, seen = deque([[start]]), set()
        while ways:
            way = ways.popleft()
            for after in sorted(graph[way[-1]]):
                if after == start:
                    found.setdefault(frozenset(way), [*way, start])
                    ways.clear()
                    break
                if after not in seen:
                    seen.add(after)
                    ways.append([*way, after])
    return list(found.values())


def told(found: list[list[str]]) -> str:
    return "\n".join(" → ".join(cycle) for cycle in found)


def test_no_files_import_each_other_in_a_cycle() -> None:
    found = cycles(import_graph())
    assert not found, f"cycles of files:\n{told(found)}"


@pytest.mark.parametrize("package", ["", *sorted(packages())])
def test_no_packages_import_each_other_in_a_cycle(package: str) -> None:
    found = cycles(children_graph(import_graph(), package))
    assert not found, f"cycles below {package or 'the top'}:\n{told(found)}"


def test_every_package_is_listed_and_every_line_is_a_package() -> None:
    assert packages() == set(ALLOWED)


def planted(root: Path, **files: str) -> Graph:
    """The graph of a tree of these files; `engine__a__x` is engine/a/x.py."""
    for name, text in files.items():
        path = root / Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
        (root / path.relative_to(root).parts[0] / "__init__.py").touch()
    return import_graph(root)


@pytest.mark.parametrize(
    "back",
    [
        "import engine.a.x",
        "from engine.a import x",
        "from engine.a.x import f",
        "from ..a import x",
        "def f():\n    from engine.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.a.x import f",
    ],
)
def test_a_planted_cycle_of_files_is_found(tmp_path: Path, back: str) -> None:
    graph = planted(
        tmp_path, engine__a__x="from engine.b import y", engine__b__y="import engine.b.z", engine__b__z=back
    )
    assert cycles(graph) == [["engine.a.x", "engine.b.y", "engine.b.z", "engine.a.x"]]


def test_a_planted_cycle_of_packages_without_one_of_files_is_found(tmp_path: Path) -> None:
    graph = planted(
        tmp_path,
        **{"engine__a__x": "from engine.b import y", "engine__b__y": "", "engine__b__z": "from engine.a import w"},
        engine__a__w="",
    )
    assert cycles(graph) == []
    assert cycles(children_graph(graph, "engine")) == [["engine.a", "engine.b", "engine.a"]]
    assert cycles(children_graph(graph, "")) == []


def forbidden(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """`line: module → imported` for each arrow that does not exist."""
    owner = max((package for package in ALLOWED if within(module, package)), key=len)
    torch_free = any(within(module, package) for package in TORCH_FREE)
    for line, name in imports(source, module, is_package):
        heavy = name.split(".")[0] in HEAVY and torch_free
        ours = name.split(".")[0] in OURS and not any(within(name, package) for package in (owner, *ALLOWED[owner]))
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


# Imports modules and prints those of HEAVY that are loaded. Standard modules that most packages use are loaded first,
# once for all children.
FORKING = """
import importlib, json, os, sys, traceback
import asyncio, dataclasses, enum, json, logging, pathlib, re, subprocess, typing
import msgspec, numpy, pydantic
packages, heavy = json.load(sys.stdin)
assert not [name for name in heavy if name in sys.modules]
for package, names in packages.items():
    if os.fork() == 0:
        try:
            for name in names:
                importlib.import_module(name)
            print(json.dumps([package, [name for name in heavy if name in sys.modules]]), flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.wait()
"""


@cache
def loaded_by_package() -> tuple[dict[str, list[str]], str]:
    """The modules of HEAVY that a fresh interpreter has loaded after the modules of each package, and its errors."""
    packages = {
        package: [name for name, _ in modules() if within(name, package) and not name.endswith("__main__")]
        for package in (*TORCH_FREE, *TORCH_IN_FUNCTIONS)
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        input=json.dumps([packages, HEAVY]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return dict(map(json.loads, done.stdout.splitlines())), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", (*TORCH_FREE, *TORCH_IN_FUNCTIONS))
def test_a_fresh_interpreter_imports_every_module_of_a_package_without_torch(package: str) -> None:
    assert any(within(name, package) for name, _ in modules())
    loaded, errors = loaded_by_package()
    assert package in loaded, errors
    assert loaded[package] == []


def unsafe_readers(source: str) -> Iterator[str]:
    """`line: name` of each import and call that could run code out of a file."""
    for line, name in imports(source, "x", is_package=False):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{line}: {name}"
    for line, name in statements(source).calls:
        if name in UNSAFE_CALLS:
            yield f"{line}: {name}"


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
