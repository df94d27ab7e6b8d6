"""hardware.torch_compile: compiled segments and modules compute what torch computes, and errors name the operation.

A compilation takes seconds, so the models are tiny and most tests compile a program of a few operations."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.api.errors import ConfigError
from engine.arguments import engine_config
from engine.layers import torch_compile
from engine.layers.torch_compile import Executor, ModuleCompiler, SegmentCompiler
from engine.llm import LLM, Params
from engine.lowering.lower import lower
from engine.lowering.operations import (
    Columns,
    Scale,
    Tanh,
    Value,
)
from engine.lowering.program import Op
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv, last_uses
from engine.lowering.segments import LEFT_OUT, ROWS, WITHOUT_KERNEL, coverage, segments
from engine.models.checkpoint import read_checkpoint

SMALL = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1, "max_step_tokens": 7}
GREEDY = Params(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
X, Y = Value(name="x", width=8), Value(name="y", width=8)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("programs"))


def engine(path: Path, **more: object) -> LLM:
    return LLM(path, **{**SMALL, "kernels": "torch", "max_running": 4, **more})


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[SegmentCompiler]:
    """Compilers that are made in the test."""
    made: list[SegmentCompiler] = []
    init = SegmentCompiler.__init__

    def kept(self: SegmentCompiler, *arguments: object) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(SegmentCompiler, "__init__", kept)
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly(
    "tests/engine/layers/test_torch_compile.py::test_a_program_runs_for_every_number_of_tokens_and_layers_share_it"
)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_compiled_engine_equals_torch(name, checkpoint, folder, compilers):
    path, prompts = checkpoint(name).path, [[1 + i for i in range(count)] for count in (5, 11, 1)]
    plain = engine(path).generate(prompts, GREEDY)
    found = engine(path, torch_compile=True, torch_compile_folder=folder).generate(prompts, GREEDY)
    for one, other in zip(plain, found, strict=True):
        assert one.ids == other.ids
        expected = [token.logprob for token in one.logprobs]
        assert [token.logprob for token in other.logprobs] == pytest.approx(expected, abs=1e-4)
    [compiler] = [one for one in compilers if one.programs]
    assert compiler.fallbacks == {}
    assert any(Path(folder).rglob("*.cpp"))


def executor(functions):
    return Executor(functions, lambda run: {}, lambda run, values, inputs: SimpleNamespace(values=values))


def tanh(op, run):
    run.values["x"] = torch.tanh(run.values["x"]) * op.factor


def scale(op, run):
    run.values["x"].mul_(op.factor)


def program(ops: list[Op]):
    return segments(ops, last_uses(ops, X), "triton")


@pytest.mark.slow
def test_a_program_runs_for_every_number_of_tokens_and_layers_share_it():
    ops = [Tanh(x=X, factor=2.0), Scale(x=Columns(value=X, first=0, width=8), factor=0.5)]
    compiler = SegmentCompiler(executor({Tanh: tanh, Scale: scale}))
    first, second = program(ops), program(ops)
    with torch.inference_mode():
        for tokens in (5, 9, 2):
            for layer in (first, second):
                x = torch.randn(tokens, 8)
                run = SimpleNamespace(values={"x": x.clone()})
                compiler.execute(layer, run)
                torch.testing.assert_close(run.values["x"], torch.tanh(x), atol=1e-6, rtol=0)
    assert compiler.fallbacks == {} and len(compiler.programs) == 1


@pytest.mark.slow
def test_an_operation_that_cannot_be_compiled_is_named_and_runs_with_torch(caplog):
    def unsupported(op, run):
        run.values["x"] = run.values["x"] * len(run.values["x"].numpy())

    ops = [Tanh(x=X, factor=1.0), Scale(x=Columns(value=X, first=0, width=8), factor=3.0)]
    compiler = SegmentCompiler(executor({Tanh: tanh, Scale: unsupported}))
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        for _ in range(2):
            run = SimpleNamespace(values={"x": x})
            compiler.execute(program(ops), run)
            torch.testing.assert_close(run.values["x"], torch.tanh(x) * 3)
    assert list(compiler.fallbacks) == ["Scale"] and len(compiler.programs) == 1
    assert [record.message.split(",")[0] for record in caplog.records] == ["torch.compile cannot compile Scale"]


def test_a_program_that_depends_on_the_number_of_tokens_is_not_used_for_others():
    def counted(op, run):
        run.values["x"] = run.values["x"] / len(run.values["x"])

    compiler = SegmentCompiler(executor({Tanh: counted}))
    with torch.inference_mode():
        for tokens in (4, 7):
            run = SimpleNamespace(values={"x": torch.ones(tokens, 8)})
            compiler.execute(program([Tanh(x=X, factor=1.0)]), run)
            assert run.values["x"][0, 0].item() == pytest.approx(1 / tokens)
    assert "number of tokens" in compiler.fallbacks["Tanh"]


def test_a_size_that_needs_too_many_programs_runs_with_torch(monkeypatch):
    def compiled(graph, **options):
        def call(*arguments):
            if len(arguments[-1]) == 7:
                raise torch._dynamo.exc.FailOnRecompileLimitHit("too many")
            return graph(*arguments)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    compiler, divided = SegmentCompiler(executor({Tanh: tanh})), program([Tanh(x=X, factor=2.0)])
    with torch.inference_mode():
        for tokens in (4, 7, 5):
            run = SimpleNamespace(values={"x": torch.ones(tokens, 8)})
            compiler.execute(divided, run)
            torch.testing.assert_close(run.values["x"], 2 * torch.tanh(torch.ones(tokens, 8)))
    assert list(compiler.fallbacks) == ["Tanh"]


def test_out_of_memory_is_no_reason_to_fall_back():
    def full(op, run):
        raise torch.OutOfMemoryError("no memory")

    compiler = SegmentCompiler(executor({Tanh: full}))
    with pytest.raises(torch.OutOfMemoryError):
        compiler.execute(program([Tanh(x=X, factor=1.0)]), SimpleNamespace(values={"x": torch.ones(2, 8)}))
    assert compiler.fallbacks == {}


def test_every_operation_is_either_compiled_or_has_a_reason():
    operations = set(Op.__args__)
    inner = {kind for kind in operations if kind.__name__ == "Quantized"}
    assert set(ROWS) | set(LEFT_OUT) | inner == operations and not set(ROWS) & set(LEFT_OUT)
    assert set(WITHOUT_KERNEL) <= set(ROWS)


def test_coverage_counts_operations_and_gives_reasons(checkpoint):
    model = read_checkpoint(checkpoint("llama").path).model
    ops = lower(model, 1).ops
    torch_ops, triton = coverage(ops, "torch"), coverage(fuse_add_normalize(fuse_prepare_kv(ops, norms=True)), "triton")
    assert torch_ops.compiled["Linear"] == 12 and torch_ops.left_out["Attend"] == "uses pages"
    assert triton.compiled == {} and triton.left_out["Activation"] == "has a Triton kernel"
    assert "; not compiled: Embed: selects rows by token; WriteKV, Attend: uses pages" in torch_ops.text


def test_configuration_hash_depends_on_settings_but_not_on_places(tmp_path):
    def hashed(**more):
        config = engine_config(**{"model": str(tmp_path), "kv_bytes": 1, "max_context": 8, **more})
        return torch_compile.configuration_hash(config, torch.device("cpu"))

    assert hashed() == hashed(model=str(tmp_path / "other")) == hashed(torch_compile_folder="/elsewhere")
    assert len({hashed(), hashed(dtype="bfloat16"), hashed(matmul_precision="high")}) == 3
    before = hashed()
    (tmp_path / "config.json").write_text("{}")
    assert hashed() != before


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").touch()
    wanted = engine_config(
        model=str(tmp_path), kv_bytes=1, max_context=8, torch_compile_folder=str(tmp_path / "file" / "programs")
    )
    with caplog.at_level(logging.WARNING):
        assert torch_compile.set_up(wanted, torch.device("cpu")) is None
    assert "each start compiles again" in caplog.text


def test_an_installation_that_cannot_compile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    monkeypatch.delattr(torch._inductor, "config", raising=False)
    config = engine_config(model=str(tmp_path), kv_bytes=1, max_context=8)
    with pytest.raises(ConfigError, match="hardware.torch_compile: this installation of torch cannot compile"):
        torch_compile.set_up(config, torch.device("cpu"))


class _Cached(torch.nn.Module):
    def forward(self, x, past_key_values=None):
        return x


def test_modules_with_keys_and_values_are_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    silu = type("Silu", (torch.nn.SiLU,), {"__module__": "transformers.models.x"})
    layer = torch.nn.Sequential(_Cached(), silu(), torch.nn.ReLU())
    outer = torch.nn.Sequential(layer)
    layer.forward = lambda x, past_key_values=None: x
    compiler = ModuleCompiler()
    compiler.compile_modules(outer)
    assert compiler.compiled == {"Silu": 1}


def test_a_module_that_cannot_be_compiled_is_named(monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    relu = type("Act", (torch.nn.ReLU,), {"__module__": "transformers.models.x"})
    outer = torch.nn.Sequential(relu())
    compiler = ModuleCompiler()
    compiler.compile_modules(outer)
    with caplog.at_level(logging.WARNING):
        assert [outer(torch.tensor([-1.0, 2.0])).tolist() for _ in range(2)] == [[0.0, 2.0]] * 2
    assert compiler.fallbacks == {"Act": "RuntimeError: no compiler"} and len(caplog.records) == 1
