"""Values that are smaller than keys: in pages they have the size of keys, with zeros after them."""

from torch import Tensor

from engine.lowering.operations import PadValues


def pad_values(op: PadValues, x: Tensor, y: Tensor) -> Tensor:
    """Write queries and keys, then padded values, to y: [tokens, (heads + kv_heads) · head_dim]."""
    first = op.heads * op.head_dim
    y[:, :first] = x[:, :first]
    values = y[:, first:].unflatten(1, (op.kv_heads, op.head_dim))
    values[..., : op.value_dim] = x[:, first:].unflatten(1, (op.kv_heads, op.value_dim))
    values[..., op.value_dim :] = 0
    return y
