"""The training twin of Qwen3: transformers' `Qwen3ForCausalLM` over packed rows of many short samples.

A token attends to earlier tokens of its own sample and of the shared system turn (`parent`). Positions count from the
start of each sample, so packing has no effect on results. Weights are float32; arithmetic is bfloat16 if the machine
has fast bfloat16 instructions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int
    hidden: int = 256
    layers: int = 4
    inner: int = 640
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    def config(self, end: int, pad: int) -> dict[str, object]:
        """Return the sizes as a Hugging Face config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad, "head_dim": self.dim, "hidden_act": "silu",
            "hidden_size": self.hidden, "initializer_range": 0.02, "intermediate_size": self.inner,
            "max_position_embeddings": 2048,
            "num_attention_heads": self.heads, "num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps, "rope_scaling": None, "rope_theta": self.rope_theta, "sliding_window": None,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
            "vocab_size": self.vocab,
        }  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Packed rows; equal `sample` ids are one sample, `parent` is the id of the preceding shared turn (or its own)."""

    ids: Tensor  # [rows, tokens] int64
    targets: Tensor  # [rows, tokens] int64, the next token or -1
    positions: Tensor  # [rows, tokens] int64
    sample: Tensor  # [rows, tokens] int64
    parent: Tensor  # [rows, tokens] int64


class Layer(nn.Module):
    """One decoder layer's weights, each as in the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = shape
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(s.hidden), nn.RMSNorm(s.hidden)
        self.q_proj = nn.Linear(s.hidden, s.heads * s.dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.gate_proj, self.up_proj = (nn.Linear(s.hidden, s.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)


class Network(nn.Module):
    """Embedding, layers, final norm; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif name.startswith("embed"):
                nn.init.normal_(weight, std=0.05)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def checkpoint(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The given weights under their Hugging Face names, bfloat16."""
        part = {
            "q_": "self_attn.",
            "k_": "self_attn.",
            "v_": "self_attn.",
            "o_": "self_attn.",
            "ga": "mlp.",
            "up": "mlp.",
            "do": "mlp.",
        }
        tensors = {}
        for name, weight in weights.items():
            pieces = name.split(".")
            if pieces[0] == "layers":
                pieces[2] = part.get(pieces[2][:2], "") + pieces[2]
            tensors["model." + ".".join(pieces)] = weight.detach().to("cpu", torch.bfloat16).contiguous()
        return tensors


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def apply_layer(layer: Layer, s: Shape, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """One layer. x: [rows, tokens, hidden]; cos, sin: [rows, tokens, 1, dim/2]; mask: [rows, 1, 1, tokens, tokens]."""
    rows, tokens, _ = x.shape
    groups, kind = s.heads // s.kv_heads, x.dtype
    h = _normed(x, layer.input_layernorm.weight, s.eps)
    q, k, v = (
        functional.linear(h, m.weight.to(kind)).view(rows, tokens, -1, s.dim)
        for m in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q = (
        _rotated(_normed(q, layer.q_norm.weight, s.eps), cos, sin)
        .transpose(1, 2)
        .reshape(rows * s.kv_heads, groups * tokens, s.dim)
    )
    k = (
        _rotated(_normed(k, layer.k_norm.weight, s.eps), cos, sin)
        .transpose(1, 2)
        .reshape(rows * s.kv_heads, tokens, s.dim)
    )
    v = v.transpose(1, 2).reshape(rows * s.kv_heads, tokens, s.dim)
    scores = torch.bmm(q, k.transpose(1, 2)).view(rows, s.kv_heads, groups, tokens, tokens)
    weights = (
        torch.softmax(scores.float() * s.dim**-0.5 + mask, -1).to(kind).view(rows * s.kv_heads, groups * tokens, tokens)
    )
    read = torch.bmm(weights, v).view(rows, s.heads, tokens, s.dim).transpose(1, 2).reshape(rows, tokens, -1)
    x = x + functional.linear(read, layer.o_proj.weight.to(kind))
    h = _normed(x, layer.post_attention_layernorm.weight, s.eps)
    gate, up = (
        functional.linear(h, layer.gate_proj.weight.to(kind)),
        functional.linear(h, layer.up_proj.weight.to(kind)),
    )
    return x + functional.linear(functional.silu(gate) * up, layer.down_proj.weight.to(kind))


def scores_of_targets(
    network: Network, rows: Rows, kind: torch.dtype, layer_function: object = apply_layer
) -> tuple[Tensor, Tensor]:
    """Logits [n, vocab] float32 at the positions with a target, and those targets [n]."""
    s = network.shape
    half = torch.arange(0, s.dim, 2, device=rows.ids.device).float() / s.dim
    angles = rows.positions[..., None, None].float() * s.rope_theta**-half
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    same = (rows.sample[:, :, None] == rows.sample[:, None, :]) | (rows.parent[:, :, None] == rows.sample[:, None, :])
    tokens = rows.ids.shape[1]
    same &= torch.ones(tokens, tokens, dtype=torch.bool, device=same.device).tril()
    mask = torch.where(same, 0.0, -math.inf)[:, None, None]
    x = network.embed_tokens(rows.ids).to(kind)
    for layer in network.layers:
        x = layer_function(layer, s, x, cos, sin, mask)  # type: ignore[operator]
    wanted = rows.targets.flatten() >= 0
    h = _normed(x, network.norm.weight, s.eps).flatten(0, 1)[wanted]
    return functional.linear(h, network.embed_tokens.weight.to(kind)).float(), rows.targets.flatten()[wanted]
