"""Muon for the matrices (orthogonalised momentum; https://kellerjordan.github.io/posts/muon), AdamW for the rest.

Matrices of equal shape are orthogonalised in one batch: on a CPU the calls, not the arithmetic, are what costs.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the Newton-Schulz steps, tuned per step for convergence in five (You, https://x.com/YouJiacheng).
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(x: Tensor, kind: torch.dtype) -> Tensor:
    """The nearest orthogonal matrices of a batch, roughly. x: [n, a, b]."""
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).to(kind)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in STEPS:
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class Optimizer:
    """Both rules over one network; `step(share)` takes the share of the full learning rate."""

    def __init__(self, network: nn.Module, kind: torch.dtype, *, rate: float = 0.02, other_rate: float = 3e-3) -> None:
        self.kind, self.rate, self.other_rate = kind, rate, other_rate
        self.matrices: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, weight in network.named_parameters():
            if weight.ndim == 2 and not name.startswith("embed"):
                self.matrices.setdefault(tuple(weight.shape), []).append(weight)
            else:
                others.append(weight)
        self.momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.matrices.items()
        }
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def state(self) -> dict[str, object]:
        """State that resumes a run."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def resume(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        for shape, momentum in state["momentum"].items():
            self.momentum[shape].copy_(momentum)
        self.adam.load_state_dict(state["adam"])

    @torch.no_grad()
    def step(self, share: float) -> None:
        rate = self.rate * share
        for shape, group in self.matrices.items():
            gradient = torch.stack([weight.grad for weight in group if weight.grad is not None])
            momentum = self.momentum[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp_(momentum, 0.95), self.kind)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for weight, direction in zip(group, update, strict=True):
                weight.mul_(1 - 0.01 * rate).add_(direction, alpha=-rate * scale)
        for settings in self.adam.param_groups:
            settings["lr"] = self.other_rate * share
        self.adam.step()
