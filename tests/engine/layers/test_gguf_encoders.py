"""Encoders in GGUF files: hidden states and vectors equal transformers'."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from engine.api.errors import CheckpointError
from engine.api.messages import Pooling
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import usable
from tests.engine.gguf_writer import Kind, write_gguf
from tests.engine.layers.pooled_cases import CASES as POOLED
from tests.engine.layers.pooled_cases import SIZES, save
from tests.engine.layers.test_encoders import Runner, Saved, close, prompt
from tests.engine.layers.test_gguf_families import made

T5 = {"pooling_type": 1, "attention.relative_buckets_count": 8, "attention.layer_norm_rms_epsilon": 1e-6,
      "context_length": 512, "feed_forward_length": 66, "attention.key_length": 10}  # fmt: skip
# Case of pooled_cases.py -> kind of file and further keys.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"pooling_type": 2}),
    "xlm-roberta": ("bert", {"pooling_type": 1, "context_length": 62}),
    "nomic": ("nomic-bert", {"pooling_type": 1, "rope.freq_base": 1000.0}),
    "modernbert": ("modern-bert", {
        "pooling_type": 2, "attention.sliding_window": 6, "attention.sliding_window_pattern": 3,
        "rope.freq_base": 160_000.0, "rope.freq_base_swa": 10_000.0}),
    "jina-v2": ("jina-bert-v2", {"pooling_type": 1}),
    "jina-v3": ("jina-bert-v3", {"pooling_type": 1, "rope.freq_base": 20_000.0}),
    "eurobert": ("eurobert", {"pooling_type": 3}),
    "t5-encoder": ("t5encoder", T5),
    "mt5-encoder": ("t5encoder", T5),
    "umt5-encoder": ("t5encoder", T5),
    "gemma-embedding": ("gemma-embedding", {
        "pooling_type": 1, "attention.sliding_window": 6, "attention.sliding_window_pattern": [True, True, False],
        "rope.freq_base": 1e6, "rope.freq_base_swa": 10_000.0}),
}  # fmt: skip
LEFT_OUT = ("pooler.", "embeddings.position_ids", "head.", "decoder.")


def written(name: str, folder: Path, **more: object) -> tuple[Saved, Path]:
    """Return a model and its file. The converter leaves out the pooler and RoBERTa's positions that no token has."""
    made, (kind, keys) = Saved(save(name, folder / "original"), POOLED[name][0]), CASES[name]
    tensors = load_file(made.path / "model.safetensors")
    tensors = {own: tensor for own, tensor in tensors.items() if not own.startswith(LEFT_OUT)}
    if name == "xlm-roberta":
        positions = "embeddings.position_embeddings.weight"
        tensors[positions] = tensors[positions][2:]
    return made, write_gguf(folder / "m.gguf", made.model(), Kind(kind, keys | more), source=tensors)


@pytest.mark.parametrize("by", ["torch", *usable()[:1]])
@pytest.mark.parametrize("name", CASES)
def test_states_and_vectors_are_those_of_the_model(name: str, by: str, tmp_path: Path) -> None:
    model, path = written(name, tmp_path)
    runner, prompts = Runner(path, by), [prompt(17), prompt(5, 1)]
    for ids, hidden in zip(prompts, runner.hidden(prompts), strict=True):
        close(hidden, model.output(ids))
    assert runner.checkpoint.model.pooler is not None
    pool = CASES[name][1]["pooling_type"]
    for ids, vector in zip(prompts, runner.pooled(prompts, Pooling(task="embed")), strict=True):
        states = model.output(ids)
        want = {1: states.mean(0), 2: states[0], 3: states[-1]}[pool]
        close(vector, torch.nn.functional.normalize(want, dim=0))


def nomic_moe(tensors: dict[str, torch.Tensor], config: Any, ids: list[int]) -> torch.Tensor:
    """Compute NomicBERT with experts in odd layers, token by token for the experts."""
    F, heads, hidden = torch.nn.functional, config.num_attention_heads, config.hidden_size

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (hidden,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.layer_norm_eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    size = hidden // heads
    angles = torch.arange(len(ids))[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turn = lambda x: x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin  # noqa: E731
    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "emb_ln")
    for layer in range(config.num_hidden_layers):
        at = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{at}.attn.Wqkv").view(len(ids), 3, heads, size).permute(1, 2, 0, 3)
        mixed = ((turn(q) @ turn(k).transpose(1, 2)) * size**-0.5).softmax(-1) @ v
        x = norm(x + linear(mixed.transpose(0, 1).flatten(1), f"{at}.attn.out_proj"), f"{at}.norm1")
        if layer % 2 == 0:
            y = linear(F.gelu(linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        else:
            scores = (x @ tensors[f"{at}.mlp.router.layer.weight"].T).softmax(-1)
            up, down = (tensors[f"blk.{layer}.ffn_{one}_exps.weight"] for one in ("up", "down"))
            y = torch.zeros_like(x)
            for token, row in enumerate(scores):
                for expert in row.topk(2).indices.tolist():
                    y[token] += row[expert] * (down[expert] @ F.gelu(up[expert] @ x[token]))
        x = norm(x + y, f"{at}.norm2")
    return x


def written_nomic_moe(folder: Path, **more: object) -> tuple[dict[str, torch.Tensor], Any, Path]:
    """Return the tensors, the configuration and the file of a model, whose code is not part of transformers."""
    config = transformers.NomicBertConfig(**SIZES, layer_norm_eps=1e-5, num_local_experts=5)
    draw, hidden, inner = torch.Generator().manual_seed(7), config.hidden_size, config.intermediate_size
    shapes = {
        "embeddings.word_embeddings": (config.vocab_size, hidden),
        "embeddings.token_type_embeddings": (1, hidden),
    }
    biased = {"emb_ln": (hidden,)}
    for layer in range(3):
        at = f"encoder.layers.{layer}"
        biased |= {f"{at}.attn.Wqkv": (3 * hidden, hidden), f"{at}.attn.out_proj": (hidden, hidden)}
        biased |= {f"{at}.norm1": (hidden,), f"{at}.norm2": (hidden,)}
        if layer % 2:
            shapes |= {f"{at}.mlp.router.layer": (5, hidden), f"blk.{layer}.ffn_up_exps": (5, inner, hidden),
                       f"blk.{layer}.ffn_down_exps": (5, hidden, inner)}  # fmt: skip
        else:
            biased |= {f"{at}.mlp.fc1": (inner, hidden), f"{at}.mlp.fc2": (hidden, inner)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.3 for name, shape in (shapes | biased).items()}
    tensors |= {f"{name}.bias": torch.randn(shape[:1], generator=draw) * 0.3 for name, shape in biased.items()}
    keys = {"pooling_type": 1, "moe_every_n_layers": 2, "expert_count": 5, "expert_used_count": 2}
    kind = Kind("nomic-bert-moe", keys | {"rope.freq_base": 1e4} | more)
    path = write_gguf(folder / "m.gguf", SimpleNamespace(config=config), kind, source=tensors)
    return tensors, config, path


@pytest.mark.parametrize("by", ["torch", *usable()[:1]])
def test_experts_of_nomic_embed_are_routed_in_every_second_layer(by: str, tmp_path: Path) -> None:
    tensors, config, path = written_nomic_moe(tmp_path)
    ids = prompt(13)
    close(Runner(path, by).hidden([ids])[0], nomic_moe(tensors, config, ids))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("expert_count", 2**31 - 1, "num_experts is 2147483647; it must be at most 87,381"),
        ("expert_used_count", 6, "num_experts_per_tok is 6, but num_experts is 5"),
        ("expert_count", 6, r"blk\.1\.ffn_up_exps\.weight has shape \[5, 66, 48\], without expert 5"),
        ("attention.layer_norm_epsilon", float("nan"), r"nomic-bert-moe\.attention\.layer_norm_epsilon is nan"),
        ("rope.freq_base", float("inf"), r"nomic-bert-moe\.rope\.freq_base is inf; it must be finite"),
    ],
)
def test_absurd_numbers_of_experts_are_refused(key: str, value: float, what: str, tmp_path: Path) -> None:
    """An absurd number of experts would fill the memory with their declaration."""
    *_, path = written_nomic_moe(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=what):
        read_checkpoint(path)


@pytest.mark.parametrize("types", [{}, {"dense_3": Type.Q8_0}])
def test_projections_after_the_pooling_are_in_the_file(types: dict[str, Type], tmp_path: Path) -> None:
    """EmbeddingGemma's, which llama.cpp's converter appends with --sentence-transformers-dense-modules."""
    model, _ = written("gemma-embedding", tmp_path)
    draw, (kind, keys) = torch.Generator().manual_seed(1), CASES["gemma-embedding"]
    dense = {
        "dense_2.weight": torch.randn(64, 48, generator=draw),
        "dense_3.weight": torch.randn(40, 64, generator=draw),
    }
    source = load_file(model.path / "model.safetensors") | dense
    path = write_gguf(tmp_path / "d.gguf", model.model(), Kind(kind, keys), types=types, source=source)
    first, second = (
        torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type))
        for one in sorted((t for t in gguf.GGUFReader(path).tensors if "dense" in t.name), key=lambda t: t.name)
    )
    ids = prompt(11)
    for by in ("torch", *usable()[:1]):
        vector = Runner(path, by).pooled([ids], Pooling(task="embed"))[0]
        close(vector, torch.nn.functional.normalize(model.output(ids).mean(0) @ first.T @ second.T, dim=0))


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"dense_2.weight": (64, 40)}, r"dense_2\.weight has shape \[64, 40\]; it must be \[outputs, 48\]"),
        ({"dense_2.weight": (64, 48), "dense_3.weight": (40, 60)}, r"dense_3\.weight .*; it must be \[outputs, 64\]"),
        ({"dense_2.weight": (64, 48), "dense_2.bias": (63,)}, r"dense_2\.bias has shape \[63\]; it must be \[64\]"),
        ({"dense_2.weight": (2, 32, 48)}, r"dense_2\.weight has shape \[2, 32, 48\]"),
        ({"dense_2.bias": (64,)}, r"has the tensor dense_2\.bias, which the declared model does not use"),
    ],
)
def test_projections_of_wrong_shapes_are_refused(shapes: dict[str, tuple[int, ...]], what: str, tmp_path: Path) -> None:
    model, _ = written("gemma-embedding", tmp_path)
    source = load_file(model.path / "model.safetensors") | {name: torch.ones(shape) for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "d.gguf", model.model(), Kind(*CASES["gemma-embedding"]), source=source)
    with pytest.raises(CheckpointError, match=rf"d\.gguf: {what}"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("eurobert-mean", {"classifier_pooling": "late"}, "classifier_pooling is 'late'; supported are bos and mean"),
        ("nomic", {"n_embd": 48, "moe_every_n_layers": 2}, "moe_every_n_layers is 2; supported is 0, and mixtures of"),
    ],
)
def test_encoders_that_cannot_be_computed_are_refused(
    name: str, more: dict[str, Any], what: str, tmp_path: Path
) -> None:
    config = json.loads((save(name, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    with pytest.raises(CheckpointError, match=what):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "what"), [(4, "4, a reranker, which is not supported"), (9, "9, supported are 0 to")]
)
def test_a_reranker_is_refused(pooling: int, what: str, tmp_path: Path) -> None:
    _, path = written("bert", tmp_path, pooling_type=pooling)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: bert\.pooling_type is {what}"):
        read_checkpoint(path)


def test_a_tensor_that_embedding_models_lack_is_refused(tmp_path: Path) -> None:
    _, path = written("bert", tmp_path, pooling_type=0)
    assert read_checkpoint(path).modules is None
    path.write_bytes(path.read_bytes().replace(b"token_types", b"token_style"))
    with pytest.raises(CheckpointError, match=r"has the tensor token_style\.weight, which the declared model"):
        read_checkpoint(path)


def test_a_decoder_that_states_a_pooling_embeds(tmp_path: Path) -> None:
    model = made("smollm3")
    for pooling, pool in ((3, "last"), (0, None)):
        path = write_gguf(tmp_path / f"{pooling}.gguf", model, Kind("smollm3", {"pooling_type": pooling}))
        pooler = read_checkpoint(path).model.pooler
        assert (None if pooler is None else pooler.pool) == pool
