"""MLP and mixture of experts."""

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.layers.linear import ExpertStack, LinearLayer, StackSlice
from engine.layers.step import Step
from engine.models.parts import MLP, Experts
from engine.models.sources import join, mlp_linears, routed_mlps, router_linear
from kernels.activation import ACTIVATIONS, gated
from kernels.experts.routes import route


class MLPLayer:
    def __init__(
        self,
        part: MLP,
        path: str,
        world: World,
        stack_slices: tuple[StackSlice, StackSlice] | tuple[None, None] = (None, None),
    ) -> None:
        """stack_slices: destinations of the up and the down projection."""
        up, down = mlp_linears(part)
        path = join(path, part.name)
        self.up = LinearLayer(up, path, world, stack_slice=stack_slices[0])
        self.down = LinearLayer(down, path, world, stack_slice=stack_slices[1])
        self.part, self.act, self.has_gate = part, ACTIVATIONS[part.act], part.gate is not None

    @property
    def loadables(self) -> list[LinearLayer]:
        return [self.up, self.down]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.down(self.activated(x))

    def activated(self, x: Tensor) -> Tensor:
        """Return act(gate x) · up x, [rows, intermediate_size] of this rank."""
        y = self.up(x)
        return gated(self.act, y) if self.has_gate else self.act(y)


class ExpertsLayer:
    """Mixture of experts. Every rank has a share of every expert's intermediate size, and the entire router, so that
    all
    ranks select the same experts."""

    def __init__(self, part: Experts, path: str, world: World) -> None:
        path = join(path, part.name)
        self.part, self.world = part, world
        self.router = LinearLayer(router_linear(part), path, world, rounded=False)
        self.ups, self.downs = ExpertStack(part.num_experts), ExpertStack(part.num_experts)
        self.experts = [
            MLPLayer(mlp, path, world, (StackSlice(self.ups, number), StackSlice(self.downs, number)))
            for number, mlp in enumerate(routed_mlps(part))
        ]
        self.shared = None if part.shared is None else MLPLayer(part.shared, path, world)

    @property
    def loadables(self) -> list[LinearLayer]:
        mlps = [*self.experts, *([] if self.shared is None else [self.shared])]
        return [self.router, *(layer for mlp in mlps for layer in mlp.loadables)]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [tokens, hidden]. The outputs of a token's experts are added in index order, in fp32."""
        logits = self.router.in_fp32(x)
        chosen, weights = route(logits[:, : self.part.num_experts], self.part.top_k, self.part.scores)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, expert in enumerate(self.experts):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y.index_add_(0, rows, _share(expert, x[rows]) * weights[rows, ranks, None])
        if self.shared is not None:
            opened = 1.0 if self.part.shared_gate is None else logits[:, self.part.num_experts :].sigmoid()
            y += _share(self.shared, x) * opened
        return (y if self.world.size == 1 else self.world.all_reduce(y)).to(x.dtype)


def _share(mlp: MLPLayer, x: Tensor) -> Tensor:
    """Return this rank's contribution to the MLP's output."""
    return mlp.down.product(mlp.activated(x)).float()
