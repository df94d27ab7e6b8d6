"""Segments of a program that torch.compile compiles (hardware.torch_compile).

A segment is traced with the functions of its executor: fake tensors whose first axis has a symbolic size pass through
them, and weights become arguments. Segments with the same operations and shapes, such as those of two layers, share one
compiled program. A step of one token has programs of its own, because torch specialises sizes of 1.

If a segment cannot be compiled, its halves are tried, down to single operations. An operation that fails alone is
executed by torch; a warning names it, and `fallbacks` has the reason.
"""

import hashlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from engine.api.config import EngineConfig
from engine.api.errors import ConfigError
from engine.lowering.program import Op, values_read, values_written
from engine.lowering.segments import Segment

_log = logging.getLogger(__name__)
Compiled = Callable[..., Any]


class Running(Protocol):
    """A step on its way through the operations."""

    values: dict[str, Any]


Run = TypeVar("Run", bound=Running)


@dataclass(frozen=True)
class Executor(Generic[Run]):
    """How an executor runs operations."""

    functions: Mapping[type, Callable[[Any, Run], None]]
    inputs: Callable[[Run], dict[str, Tensor]]
    """Return the tensors of a step, other than buffers, that operations of segments read: one row per token each."""
    bind: Callable[[Run, dict[str, Any], dict[str, Tensor]], Run]
    """Return a step with other buffers and other tensors of `inputs`."""


class NotCompiled(Exception):
    """A segment cannot be compiled."""


@dataclass(frozen=True)
class Traced:
    """A compiled segment of one layer."""

    segment: Segment
    call: Compiled
    weights: tuple[Tensor, ...]
    read: tuple[str, ...]  # buffers
    inputs: tuple[str, ...]  # other tensors of the step
    written: tuple[str, ...]  # buffers that get new tensors; others are changed in place


@dataclass
class SegmentCompiler(Generic[Run]):
    """Compiles segments on first use and keeps their programs."""

    executor: Executor[Run]
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Error by name of an operation that torch executes because it cannot be compiled."""
    programs: dict[str, Compiled] = field(default_factory=dict)
    """Compiled programs by the hash of their operations and shapes."""
    _traced: dict[tuple[int, bool], tuple[Traced | Segment, ...]] = field(default_factory=dict)

    def execute(self, segments: Sequence[Segment], run: Run) -> None:
        """Run a step through the segments."""
        for segment in segments:
            if not segment.compiled:
                self._plain(segment, run)
                continue
            key = id(segment), _tokens(segment, run) == 1
            parts = self._traced.get(key)
            if parts is None:
                self._traced[key] = tuple(self._first(segment, run))
                continue
            for number, part in enumerate(parts):
                if isinstance(part, Segment):
                    self._plain(part, run)
                elif (error := _call_again(part, run, self.executor)) is not None:
                    self._fall_back(part.segment.ops[0], error)
                    self._traced[key] = (*parts[:number], part.segment, *parts[number + 1 :])
                    self._plain(part.segment, run)
            _free(segment, run)

    def _first(self, segment: Segment, run: Run) -> list[Traced | Segment]:
        """Compile and run a segment. Return its parts: all of it, or smaller ones if it cannot be compiled."""
        try:
            with _quiet():
                traced = self._trace(segment, run)
                _call(traced, run, self.executor, dynamic=_tokens(segment, run) > 1)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # errors of a compiler are results of this segment
            if len(segment.ops) > 1:
                return [part for half in segment.halves() for part in self._first(half, run)]
            self._fall_back(segment.ops[0], error)
            self._plain(segment, run)
            return [segment]
        _free(segment, run)
        return [traced]

    def _fall_back(self, op: Op, error: Exception) -> None:
        name = type(op).__name__
        if name not in self.fallbacks:
            self.fallbacks[name] = _spelled(error)
            _log.warning("torch.compile cannot compile %s, torch executes it: %s", name, self.fallbacks[name])

    def _plain(self, segment: Segment, run: Run) -> None:
        for op, names in zip(segment.ops, segment.unused, strict=True):
            self.executor.functions[type(op)](op, run)
            for name in names:
                run.values.pop(name, None)

    def _trace(self, segment: Segment, run: Run) -> Traced:
        """Return the segment's program with the arguments of this layer."""
        from torch._dispatch.python import enable_python_dispatcher
        from torch.fx.experimental.proxy_tensor import make_fx

        read = tuple(name for name in _names(segment) if name in run.values)
        inputs = self.executor.inputs(run)
        if other := [name for name in read if not isinstance(run.values[name], Tensor)]:
            raise NotCompiled(f"{', '.join(other)}: not a plain tensor")
        tensors = [*(run.values[name] for name in read), *inputs.values()]
        fakes, mode = _fakes(tensors)
        written: list[str] = []

        def compute(*given: Tensor) -> list[Tensor]:
            values = dict(zip(read, given[: len(read)], strict=True))
            bound = self.executor.bind(run, dict(values), dict(zip(inputs, given[len(read) :], strict=True)))
            self._plain(segment, bound)
            written[:] = [name for name, value in bound.values.items() if value is not values.get(name)]
            return [bound.values[name] for name in written]

        with mode, enable_python_dispatcher():
            graph = make_fx(compute, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
        if len(tensors[0]) > 1 and any(isinstance(fake.shape[0], int) or _is_fixed(fake.shape[0]) for fake in fakes):
            raise NotCompiled("its program depends on the number of tokens")
        weights = _weights_as_arguments(graph)
        unread = _drop_unread(graph, len(weights) + len(read))
        used = tuple(name for number, name in enumerate(inputs) if number not in unread)
        key = _program_hash(graph, [*weights, *tensors], len(weights))
        call = self.programs.get(key)
        if call is None:
            call = self.programs[key] = torch.compile(graph, fullgraph=True)
        return Traced(segment, call, weights, read, used, tuple(written))


def _free(segment: Segment, run: Running) -> None:
    for name in segment.dead:
        run.values.pop(name, None)


def _call(traced: Traced, run: Any, executor: Executor[Any], *, dynamic: bool = False) -> None:
    inputs = executor.inputs(run)
    tensors = [*(run.values[name] for name in traced.read), *(inputs[name] for name in traced.inputs)]
    if dynamic:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
    run.values.update(zip(traced.written, traced.call(*traced.weights, *tensors), strict=True))


def _call_again(traced: Traced, run: Any, executor: Executor[Any]) -> Exception | None:
    """Call a program that has run before. Return the error of a step that would need one more program than torch makes
    for different sizes; nothing has been computed then."""
    try:
        _call(traced, run, executor)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        return error
    return None


def _names(segment: Segment) -> dict[str, None]:
    return dict.fromkeys(value.name for op in segment.ops for value in (*values_read(op), *values_written(op)))


def _tokens(segment: Segment, run: Running) -> int:
    return next((len(run.values[name]) for name in _names(segment) if name in run.values), 0)


def _fakes(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Return fake tensors whose first axis has a symbolic size, unless it is 1, and the mode that they belong to."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: list[Tensor] = []
    for tensor in tensors:
        axes = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
        fakes.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=axes)))
    return fakes, mode


def _is_fixed(size: Any) -> bool:
    return size.node.maybe_as_int() is not None


def _weights_as_arguments(graph: torch.fx.GraphModule) -> tuple[Tensor, ...]:
    """Replace the constants of a traced program, which are weights, by arguments in front of the others."""
    weights: list[Tensor] = []
    nodes: dict[int, torch.fx.Node] = {}
    first = next(iter(graph.graph.nodes))
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        weight = getattr(graph, str(node.target))
        if id(weight) not in nodes:
            with graph.graph.inserting_before(first):
                nodes[id(weight)] = graph.graph.placeholder(f"weight_{len(weights)}")
            weights.append(weight)
        node.replace_all_uses_with(nodes[id(weight)])
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(weights)


def _drop_unread(graph: torch.fx.GraphModule, first: int) -> set[int]:
    """Remove the arguments from number `first` that nothing reads. Return their numbers, counted from `first`."""
    found = set()
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for number, node in enumerate(arguments[first:]):
        if not node.users:
            graph.graph.erase_node(node)
            found.add(number)
    graph.recompile()
    return found


def _program_hash(graph: torch.fx.GraphModule, tensors: Sequence[Tensor], weights: int) -> str:
    """Return the hash of a program and the shapes of its arguments, without the number of tokens."""
    shapes = [
        (tuple(one.shape if number < weights else one.shape[1:]), one.stride() if number < weights else (), one.dtype)
        for number, one in enumerate(tensors)
    ]
    single = len(tensors) > weights and len(tensors[weights]) == 1
    return hashlib.sha256(f"{graph.code}\n{shapes}\n{single}".encode()).hexdigest()


# -- modules of transformers' code -------------------------------------------------------------------------------------

CACHE_ARGUMENTS = {"past_key_values", "past_key_value", "layer_past", "attention_mask", "position_embeddings"}


@dataclass
class ModuleCompiler:
    """Compiles modules of transformers' code that use no keys and values, such as MLPs and norms. Modules of a class
    share a program."""

    compiled: dict[str, int] = field(default_factory=dict)  # number of modules by name of their class
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Error by name of a class that runs without torch.compile because it cannot be compiled."""
    _programs: dict[type, Compiled] = field(default_factory=dict)
    _ran: set[type] = field(default_factory=set)  # classes whose program has run

    def compile_modules(self, module: torch.nn.Module) -> None:
        """Compile the largest modules inside of `module` that use no keys and values."""
        for child in module.children():
            if any(map(_uses_cache, child.modules())):
                self.compile_modules(child)
            elif type(child).__module__.startswith("transformers."):
                self._compile(child)

    def _compile(self, module: torch.nn.Module) -> None:
        kind, plain = type(module), module.forward
        program = self._programs.setdefault(kind, torch.compile(kind.forward, fullgraph=True, dynamic=True))
        self.compiled[kind.__name__] = self.compiled.get(kind.__name__, 0) + 1

        def forward(*arguments: Any, **options: Any) -> Any:
            if kind.__name__ in self.fallbacks:
                return plain(*arguments, **options)
            try:
                with _quiet() if kind not in self._ran else nullcontext():
                    found = program(module, *arguments, **options)
                self._ran.add(kind)
                return found
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # errors of a compiler are results of this module
                self.fallbacks[kind.__name__] = _spelled(error)
                _log.warning("torch.compile cannot compile %s, torch executes it: %s", kind.__name__, _spelled(error))
                return plain(*arguments, **options)

        module.forward = forward


def _uses_cache(module: torch.nn.Module) -> bool:
    return not CACHE_ARGUMENTS.isdisjoint(inspect.signature(module.forward).parameters)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings of the compiler. Where warnings are errors, they would count as its failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _spelled(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- the cache ---------------------------------------------------------------------------------------------------------


def configuration_hash(config: EngineConfig, device: torch.device) -> str:
    """Return the hash of all that compiled programs depend on: torch, Python, the device, and the configuration without
    the place of the checkpoint."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    found = hashlib.sha256(f"{torch.__version__} {sys.version_info[:2]} {device.type} {where}\n".encode())
    for part in (
        msgspec.structs.replace(config.model, path=""),
        msgspec.structs.replace(config.quantization, folder=None),
        msgspec.structs.replace(config.hardware, cpus=(), process_cpus=(), torch_compile_folder=None),
    ):
        found.update(msgspec.json.encode(part))
    file = Path(config.model.path) / "config.json"
    if file.is_file():
        found.update(file.read_bytes())
    return found.hexdigest()


def set_up(config: EngineConfig, device: torch.device) -> Path | None:
    """Let this process compile in its own thread, and keep programs in the folder of this configuration. Return the
    folder, or None without a folder that can be written. Raise ConfigError if torch.compile is not installed."""
    try:
        import torch._inductor.config as inductor
    except ImportError as error:
        raise ConfigError(
            f"hardware.torch_compile: this installation of torch cannot compile ({error}); set it to false"
        ) from error

    inductor.compile_threads = 1  # other processes would outlive an engine that is killed
    if config.hardware.torch_compile_folder is None:
        return None
    folder = Path(config.hardware.torch_compile_folder) / configuration_hash(config, device)[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as a read-only file system
        _log.warning("hardware.torch_compile: each start compiles again: %s: %s", folder, error.strerror)
        return None
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": str(folder)})  # torch has no other setting for it
    return folder
