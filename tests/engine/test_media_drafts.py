"""Drafts for prompts with images: replies equal those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best
from tests.engine.media_models import check, greedy, llava, llava_picture, opened

ONE, OTHER = llava_picture(1), llava_picture(2)
PROMPTS = ((11,), (3, ONE, 5), (ONE, 2, OTHER, 1))
REPLY = 12


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    return llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def replies(family):
    return {parts: family.reply(*parts, count=REPLY) for parts in PROMPTS}


def write_head(target: Path, folder: Path, method: str) -> str:
    """Write a random EAGLE or EAGLE-3 head for a target."""
    model = read_checkpoint(target).model
    hidden, draw = model.embed.hidden, torch.Generator().manual_seed(3)
    inputs, layer = (hidden, "layers.0.") if method == "eagle" else (2 * hidden, "midlayer.")
    shapes = {
        **{f"{layer}self_attn.{name}_proj.weight": (hidden, inputs) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        **{f"{layer}mlp.{name}_proj.weight": (48, hidden) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (hidden, 48),
        "fc.weight": (hidden, (2 if method == "eagle" else 3) * hidden),
    }
    norms = [f"{layer}post_attention_layernorm"]
    if method == "eagle3":
        norms += [f"{layer}input_layernorm", f"{layer}hidden_norm", "norm"]
        shapes["lm_head.weight"] = (model.embed.vocab, hidden)
    config = {
        "architectures": ["LlamaForCausalLM" if method == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": model.embed.vocab,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [0, 1, len(model.blocks)],
    }
    tensors = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors | {f"{name}.weight": torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "ngram"])
def test_drafts_do_not_change_replies_to_images(method: str, kernels: str, family, replies, tmp_path: Path):
    own = {} if method == "ngram" else {"draft_model": write_head(family.folder, tmp_path / "head", method)}
    own |= {"max_step_tokens": 16, "max_running": 2}  # chunks end inside of images
    with opened(family, kernels, speculation=method, draft_tokens=3, ngram_min=1, **own) as llm:
        found = llm.generate([family.prompt(*parts) for parts in PROMPTS], greedy(REPLY))
        counters = llm._loop.scheduler.counters
    for parts, generation in zip(PROMPTS, found, strict=True):
        check(generation, replies[parts])
    assert counters.draft_tokens >= 10


def test_a_head_reads_the_embeddings_of_images(family, tmp_path: Path):
    """Equal tokens with different images have different drafts at the first position, where only the image differs."""
    folder = write_head(family.folder, tmp_path / "head", "eagle")
    made = []
    for picture, tokens in ((ONE, 64), (OTHER, 64), (ONE, 8)):
        own = {"draft_model": folder, "draft_tokens": 3, "max_step_tokens": tokens, "max_running": 2}
        with opened(family, "torch", speculation="eagle", **own) as llm:
            drafter = llm._worker._runner._draft
            (passes,) = drafter.passes
            forward, inputs = passes.forward, []

            def spy(rows, states=None, media=None, forward=forward, inputs=inputs):
                inputs.append(media)
                return forward(rows, states, media)

            passes.forward = spy
            llm.generate(family.prompt(3, picture, 5), greedy(2))
            made.append(inputs)
    [one, *_], [other, *_], chunks = made
    assert one.tokens.tolist() == other.tokens.tolist() == list(range(2, 11)), "one position before each token"
    assert not torch.equal(one.embeddings, other.embeddings)
    parts = [each.embeddings for each in chunks if each is not None]
    assert len(parts) == 2 and torch.equal(torch.cat(parts), one.embeddings), "the second chunk begins in the image"
