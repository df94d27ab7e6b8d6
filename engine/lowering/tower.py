"""Lowering of a declared tower: its blocks and the steps of its projectors become programs, whose first operation
receives rows of patches or of features. Between programs, rows are joined, so their number changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from engine.lowering.lower import PartLowering
from engine.lowering.operations import (
    Activation,
    Columns,
    Input,
    Keep,
    Linear,
    Matrix,
    Normalize,
    NormVector,
    Value,
)
from engine.lowering.program import Op, Program
from engine.lowering.querying import QueryProgram, query_program
from engine.models.media import (
    Activate,
    AttentionPool,
    Blocks,
    JoinRows,
    Media,
    Merge,
    Patches,
    Project,
    Projector,
    ProjectorStep,
    Querying,
    RowStep,
    Tower,
    block_path,
)
from engine.models.parts import MLP, LayerNorm, RMSNorm
from engine.models.sources import join

Stage = Program | QueryProgram | RowStep


@dataclass(frozen=True)
class ProjectorProgram:
    """Computes embeddings from columns [first, first + width) of the features."""

    first: int
    width: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class TowerProgram:
    patches: Program | None  # pixels of patches in, embedded patches out; spectrograms have no program
    tower: Program  # embedded patches in, features out
    projectors: tuple[ProjectorProgram, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Return all programs, in the order of loading."""
        return (
            *(() if self.patches is None else (self.patches,)),
            self.tower,
            *(one for of in self.projectors for stage in of.stages for one in programs_of(stage)),
        )


def programs_of(stage: Stage) -> tuple[Program, ...]:
    match stage:
        case Program():
            return (stage,)
        case QueryProgram():
            return stage.context, stage.program
    return ()


@lru_cache(maxsize=4)
def lower_tower(media: Media, ranks: int = 1) -> TowerProgram:
    """Return the programs of each of `ranks` tensor-parallel ranks. Raises ConfigError if heads or rows cannot be
    divided among them."""
    embed = _patches(media.tower, ranks)
    tower = _TowerLowering(media.tower, ranks).program()
    return TowerProgram(embed, tower, tuple(_projector(one, media.tower, ranks) for one in media.projectors))


def _patches(tower: Tower, ranks: int) -> Program | None:
    patches = tower.patches
    if not isinstance(patches, Patches):
        return None
    steps: list[ProjectorStep] = [Project(linear=patches.linear)]
    if patches.norm is not None:
        steps.append(patches.norm)
    return _StepLowering(ranks).program(steps, tower.root, patches.pixels)


class _TowerLowering(PartLowering):
    def __init__(self, tower: Tower, ranks: int) -> None:
        super().__init__(tower.hidden, ranks)
        self.tower, self.root = tower, tower.root
        self.features = Value(name="features", width=tower.width)

    def program(self) -> Program:
        tower = self.tower
        ops: list[Op] = [Input(y=self.x)]
        if tower.before is not None:
            ops.append(self.norm(tower.before, tower.root, self.x, self.x))
        ops += self._features(0)
        for index, block in enumerate(tower.blocks):
            self.windowed = tower.window > 0 and index not in tower.whole
            for part in block:
                ops += self.residual_block(part, block_path(tower, index))
            ops += self._features(index + 1)
        if tower.taken == (len(tower.blocks),):
            *ops, last = ops
            assert isinstance(last, Keep), "a program ends with its feature"
            return Program(tuple(ops), last.x)
        return Program(tuple(ops), self.features)

    def _features(self, computed: int) -> Iterator[Op]:
        """Yield the operations that keep the output of the first `computed` blocks where it is a feature."""
        hidden, norm = self.tower.hidden, self.tower.norm
        for number, taken in enumerate(self.tower.taken):
            if taken == computed:
                read = self.x if norm is None else self.normed
                if norm is not None:
                    yield self.norm(norm, self.tower.root, self.x, read)
                yield Keep(x=read, y=Columns(value=self.features, first=number * hidden, width=hidden))


def _projector(projector: Projector, tower: Tower, ranks: int) -> ProjectorProgram:
    chosen = projector.feature
    first, width = (0, tower.width) if chosen is None else (chosen * tower.hidden, tower.hidden)
    lowering, stages, at = _StepLowering(ranks), list[Stage](), width
    pending: list[ProjectorStep] = []
    for step in projector.steps:
        if not isinstance(step, RowStep | Blocks):
            pending.append(step)
            continue
        if pending:
            program = lowering.program(pending, projector.root, at)
            stages.append(program)
            at, pending = program.out.width, []
        if isinstance(step, Blocks):
            stages.append(_BlocksLowering(step, ranks).program(projector.root))
            continue
        if isinstance(step, Querying):
            path = join(projector.root, step.name) if isinstance(step, AttentionPool) else projector.root
            queried = query_program(step, path, ranks)
            stages.append(queried)
            at = queried.program.out.width
            continue
        stages.append(step)
        at *= step.side**2 if isinstance(step, Merge) else step.count if isinstance(step, JoinRows) else 1
    if pending:
        stages.append(lowering.program(pending, projector.root, at))
    return ProjectorProgram(first, width, tuple(stages))


class _BlocksLowering(PartLowering):
    def __init__(self, step: Blocks, ranks: int) -> None:
        super().__init__(step.hidden, ranks)
        self.step = step

    def program(self, root: str) -> Program:
        step, ops = self.step, list[Op]([Input(y=self.x)])
        for index, block in enumerate(step.blocks):
            for part in block:
                ops += self.residual_block(part, join(root, step.layers, str(step.first + index)))
        return Program(tuple(ops), self.x)


class _StepLowering(PartLowering):
    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)

    def program(self, steps: list[ProjectorStep], root: str, width: int) -> Program:
        """Return the program of consecutive steps. width: of its input."""
        x = Value(name="x", width=width)
        ops: list[Op] = [Input(y=x)]
        for number, step in enumerate(steps):
            match step:
                case Project(linear=linear, act=act):
                    y = Value(name=f"y{number}", width=sum(row.units * row.width for row in linear.rows))
                    ops.append(Linear(x=x, y=y, weight=Matrix(linear=linear, path=root, part="mlp")))
                    x = y
                    if act != "none":
                        x = Value(name=f"activated{number}", width=y.width)
                        ops.append(Activation(x=y, y=x, act=act, gated=False))
                case Activate(act=act):
                    y = Value(name=f"y{number}", width=x.width)
                    ops.append(Activation(x=x, y=y, act=act, gated=False))
                    x = y
                case MLP():
                    y = Value(name=f"y{number}", width=step.hidden)
                    ops += self.mlp(step, join(root, step.name), x, y, "mlp")
                    x = y
                case LayerNorm() | RMSNorm() as norm:
                    y = Value(name=f"y{number}", width=norm.size)
                    ops.append(Normalize(x=x, y=y, weight=NormVector(norm=norm, path=root)))
                    x = y
                case _:
                    raise ValueError("rows are joined between programs")
        return Program(tuple(ops), x)
