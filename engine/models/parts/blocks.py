"""Residual blocks: the parts that read the hidden states, and how their outputs are added."""

from typing import Literal, TypeGuard

from engine.models.declared import declared
from engine.models.parts.attention import Attention, Indexer, LatentAttention
from engine.models.parts.conformer import Convolution, LocalAttention
from engine.models.parts.mlp import MLP, Experts, LayerInput, LowRank, Projection
from engine.models.parts.norms import Norm
from engine.models.parts.recurrent.mixer import Recurrent

SelfAttention = Attention | LatentAttention
PageWriter = SelfAttention | Indexer
Body = SelfAttention | MLP | Experts | Recurrent | LayerInput | LowRank | Projection | LocalAttention | Convolution


@declared(frozen=True, kw_only=True)
class Parallel:
    """Several bodies with the same input; their outputs are summed (Cohere)."""

    bodies: tuple[Body, ...]
    scales: tuple[float, ...] = ()  # factor of each body's output, greater than 0; empty: all are 1
    norms: tuple[Norm, ...] = ()  # norm of the input of each body, in place of the block's `before` (GPT-NeoX)
    after: tuple[Norm | None, ...] = ()  # norm of the output of each body, before they are added (Gemma 4)


@declared(frozen=True, kw_only=True)
class ResidualBlock:
    """x = last(factor · (x + scale · after(body(before(x))))), or with `multiplier` its product with that number.

    A block with `side` computes a side stream s of hidden states, which are not added to x, or reads it (Zamba2):

    opens       s = body(before([x, e])), where e is the embedding of the token
    continues   s = body(before(s))
    joins       x = x + body(before(x + s))

    With the side `pair`, x = x + body([e, x']), whose columns `FusedStates` computed (EAGLE-3).

    `shortcut` has the same input as the body, or with `shortcut_norm` that norm of x; its output is added after the
    last residual block of the layer (LongCat, Arctic)."""

    body: Body | Parallel
    first: Norm | None = None  # replaces x by its norm before anything else (MiniMax-01)
    before: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    last: Norm | None = None
    factor: float = 1.0
    multiplier: str = ""  # name of a tensor with a single number
    side: Literal["", "opens", "continues", "joins", "pair"] = ""
    path: str = ""  # of its tensors below the root, if they belong to another layer, which shares them
    shortcut: Experts | None = None
    shortcut_norm: Norm | None = None
    limit: float | None = None  # inputs of `before`, `after` and `last` are clipped to ± this number


Block = tuple[ResidualBlock, ...]


def is_self_attention(body: Body) -> TypeGuard[SelfAttention]:
    return isinstance(body, LatentAttention) or (isinstance(body, Attention) and not body.source)


def summed_bodies(branch: ResidualBlock) -> tuple[Body, ...]:
    """Return the bodies whose outputs a residual block adds."""
    return branch.body.bodies if isinstance(branch.body, Parallel) else (branch.body,)


def bodies(branch: ResidualBlock) -> tuple[Body, ...]:
    """Return all bodies of a residual block, its shortcut last."""
    return summed_bodies(branch) if branch.shortcut is None else (*summed_bodies(branch), branch.shortcut)


def body_scales(branch: ResidualBlock) -> tuple[float, ...]:
    """Return the factor of the output of each body of a residual block."""
    scales = branch.body.scales if isinstance(branch.body, Parallel) else ()
    return scales or (1.0,) * len(summed_bodies(branch))


def body_norms(branch: ResidualBlock) -> tuple[Norm, ...]:
    """Return the norm of each body of a residual block; empty if the bodies share the norm `before`."""
    return branch.body.norms if isinstance(branch.body, Parallel) else ()


def output_norms(branch: ResidualBlock) -> tuple[Norm | None, ...]:
    """Return the norm of the output of each body of a residual block; empty if there are none."""
    return branch.body.after if isinstance(branch.body, Parallel) else ()


def block_norms(branch: ResidualBlock) -> tuple[Norm, ...]:
    """Return all norms of the hidden states in a residual block."""
    routers = (body.router_norm for body in bodies(branch) if isinstance(body, Experts))
    around = (
        branch.first,
        branch.before,
        *body_norms(branch),
        *output_norms(branch),
        branch.after,
        branch.last,
        branch.shortcut_norm,
    )
    return tuple(norm for norm in (*around, *routers) if norm is not None)
