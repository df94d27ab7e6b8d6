"""A model takes exactly the checkpoint it declares."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.model import TextModel
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import has_experts
from engine.models.sources import elements, linear_paths, sources, unquantized


def loaded(path, dtype=torch.float32, progress=lambda fraction: None):
    checkpoint = read_checkpoint(path)
    sizes = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    model = TextModel(checkpoint.model, sizes, SINGLE, dtype, "cpu")
    model.load(checkpoint, progress)
    return model, checkpoint


def changed(saved, change):
    file = saved.path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_every_architecture_is_made_of_exactly_the_tensors_that_transformers_saved(case, checkpoint):
    """Sources are derived from the declaration; transformers wrote the names and shapes."""
    model, read = loaded(checkpoint(case).path)
    assert sum(torch.Size(info.shape).numel() for info in read.tensors.values()) == elements(sources(read.model))


def test_every_projection_has_the_path_that_transformers_gives_its_module(case, checkpoint):
    """Experts are separate modules only in files: transformers keeps a layer's experts and router in one module."""
    saved = checkpoint(case)
    read = read_checkpoint(saved.path)
    paths, model = linear_paths(read.model), saved.transformers()
    modules = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    inside = [
        name.removesuffix(".weight") for name in read.tensors if ".experts." in name or name in unquantized(read.model)
    ]
    assert bool(inside) == has_experts(read.model)
    modules |= set(inside)
    if model.config.tie_word_embeddings:
        modules.discard("lm_head")  # the embedding again, no projection of its own
    assert len(paths) == len(set(paths)) and set(paths) == modules and all(paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            lambda t: t.update({"model.layers.1.q.weight": torch.ones(2)}),
            r"model\.safetensors: has model\.layers\.1\.q",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"model\.norm\.weight has shape \[47\]"),
    ],
)
def test_a_damaged_checkpoint_is_not_loaded(own_checkpoint, change, message):
    saved = own_checkpoint("llama")
    changed(saved, change)
    with pytest.raises(CheckpointError, match=message):
        loaded(saved.path)


def test_a_copy_of_a_tied_head_is_ignored(own_checkpoint, driver, ids):
    saved = own_checkpoint("qwen3")
    want = driver(saved.path).run(ids(9, 0), 9)
    changed(saved, lambda t: t.update({"lm_head.weight": torch.zeros_like(t["model.embed_tokens.weight"])}))
    assert torch.equal(driver(saved.path).run(ids(9, 0), 9), want)


def test_progress_reaches_one_and_never_falls(checkpoint):
    seen = []
    loaded(checkpoint("llama").path, progress=seen.append)
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] == 1.0


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_cast_to_the_wanted_type(own_checkpoint, driver, ids, stored):
    """A checkpoint in another type computes as the same numbers in float32 do."""
    prompt, saved = ids(11, 2), own_checkpoint("gemma2")
    changed(saved, lambda t: t.update({name: x.to(stored) for name, x in t.items()}))
    got = driver(saved.path).run(prompt, 4)
    torch.testing.assert_close(got, saved.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "cohere-qk-norm", "olmo2"])
def test_a_model_in_bfloat16_stays_near_float32(name, checkpoint, driver, ids):
    prompt = ids(9, 3)
    engine = driver(checkpoint(name).path)
    want = engine.run(prompt, 9)
    model, _ = loaded(checkpoint(name).path, torch.bfloat16)
    engine.model, engine.pages = model, engine.pages.bfloat16()
    got = engine.run(prompt, 9)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_keys_and_values_in_half_precision_stay_near_float32(checkpoint, driver, ids):
    prompt = ids(21, 4)
    engine = driver(checkpoint("llama").path)
    want = engine.run(prompt, 1)
    engine.pages = engine.pages.half()
    got = engine.run(prompt, 1)
    assert 0 < (got - want).abs().max() < 0.02 * want.abs().max()
