"""Embedding models that read images, through the whole engine: vectors equal transformers'."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import normalize

from engine.api.config import TaskConfig
from engine.api.errors import RequestError
from engine.api.messages import Pooling
from engine.llm import MediaPrompt
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.media import media_sources
from kernels.cpu.library import best
from tests.cells import Shows
from tests.engine.layers.test_footprint import compare
from tests.engine.media_models import IMAGE, TEXT, Family, Picture, opened, picture, qwen_picture, saved

EMBED, EACH, PLAIN = Pooling("embed"), Pooling("token_embed"), Pooling("embed", activate=False)
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
WORDS = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
    **{"max_position_embeddings": 12, "eos_token_id": 95, "bos_token_id": 94},
}
KERNELS = ("torch", best())


def dual(name: str, folder: Path) -> Family:
    eyes = {**EYES, **({"num_patches": 9} if name == "Siglip2" else {"image_size": 12})}
    more = {"projection_dim": 20} if name == "CLIP" else {}
    words = {**WORDS, **({} if name == "CLIP" else {"projection_size": 16, "pad_token_id": 1})}
    config = getattr(transformers, f"{name}Config")(text_config=words, vision_config=eyes, **more)
    torch.manual_seed(6)
    model = getattr(transformers, f"{name}Model")(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.25)
    model.save_pretrained(folder)
    return Family(model, folder)


def dual_picture(name: str, seed: int) -> Picture:
    if name != "Siglip2":
        return picture((1, 3, 12, 12), 1, seed)
    grid = {1: (3, 3), 2: (2, 5), 3: (4, 1)}[seed]
    return picture((grid[0] * grid[1], 48), 1, seed, spatial_shapes=torch.tensor([grid]))


@torch.no_grad()
def image_vector(family: Family, one: Picture) -> np.ndarray:
    given = dict(one.tensors)
    if "spatial_shapes" in given:
        given["pixel_values"] = given["pixel_values"][None]
        given["pixel_attention_mask"] = torch.ones(given["pixel_values"].shape[:2], dtype=torch.int32)
    found: torch.Tensor = family.model.get_image_features(**given).pooler_output[0]
    return found.numpy()


@torch.no_grad()
def text_vector(family: Family, ids: list[int]) -> np.ndarray:
    found: torch.Tensor = family.model.get_text_features(input_ids=torch.tensor([ids])).pooler_output[0]
    return found.numpy()


def alone(one: Picture, family: Family) -> MediaPrompt:
    return replace(family.prompt(one), ids=(0,))


@pytest.fixture(scope="module", params=["CLIP", "Siglip", "Siglip2"])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    return request.param, dual(request.param, tmp_path_factory.mktemp("dual"))


@pytest.mark.parametrize("kernels", KERNELS)
def test_vectors_of_images_and_texts_equal_transformers(case: tuple[str, Family], kernels: str, shows: Shows) -> None:
    """Rows of images and texts are in the same steps, and a repeated image is not computed again."""
    name, family = case
    pictures = [dual_picture(name, seed) for seed in (1, 2, 3)]
    texts = [[5, 9, 95], [*range(4, 15), 95], [95]]
    prompts = [alone(pictures[0], family), texts[0], alone(pictures[1], family), texts[1], texts[2]]
    prompts += [alone(pictures[2], family), alone(pictures[0], family)]
    want = [image_vector(family, pictures[0]), text_vector(family, texts[0]), image_vector(family, pictures[1])]
    want += [text_vector(family, texts[1]), text_vector(family, texts[2]), image_vector(family, pictures[2])]
    want += [want[0]]
    with opened(family, kernels, max_context=12, max_step_tokens=24, max_running=4) as llm:
        plain, unit = llm.pool(prompts, PLAIN), llm.pool(prompts, EMBED)
    for one, other, vector in zip(plain, unit, want, strict=True):
        np.testing.assert_allclose(one, vector, rtol=0, atol=1e-4)
        np.testing.assert_allclose(other, vector / np.linalg.norm(vector), rtol=0, atol=1e-5)
    shows(family.folder, *(("loads", "equals transformers") if kernels == "torch" else ("compiled CPU",)))


def test_vectors_with_triton_equal_transformers(case: tuple[str, Family], shows: Shows) -> None:
    name, family = case
    one, text = dual_picture(name, 1), [5, 9, 95]
    with opened(family, "triton", max_context=12, max_running=2, max_step_tokens=16) as llm:
        found = llm.pool([text, alone(one, family), alone(one, family)], PLAIN)
    np.testing.assert_allclose(found[0], text_vector(family, text), rtol=0, atol=1e-4)
    for each in found[1:]:
        np.testing.assert_allclose(each, image_vector(family, one), rtol=0, atol=1e-4)
    shows(family.folder, "Triton interpreted")


def test_vectors_of_two_ranks_equal_transformers(case: tuple[str, Family], shows: Shows) -> None:
    name, family = case
    one, text = dual_picture(name, 2), [5, 9, 95]
    with opened(family, "torch", max_context=12, tensor=2) as llm:
        of_text, of_image = llm.pool([text, alone(one, family)], PLAIN)
    np.testing.assert_allclose(of_text, text_vector(family, text), rtol=0, atol=1e-4)
    np.testing.assert_allclose(of_image, image_vector(family, one), rtol=0, atol=1e-4)
    shows(family.folder, "2 ranks")


@pytest.mark.parametrize("kernels", KERNELS)
def test_loaded_bytes_are_the_planned_bytes(case: tuple[str, Family], kernels: str, shows: Shows) -> None:
    _, family = case
    compare(read_checkpoint(family.folder), kernels)
    shows(family.folder, "planned bytes = loaded bytes")


def test_an_image_is_a_prompt_of_its_own(case: tuple[str, Family]) -> None:
    name, family = case
    one = dual_picture(name, 1)
    with opened(family, "torch", max_context=12) as llm:
        with pytest.raises(RequestError, match="as a prompt of one token"):
            llm.pool([replace(family.prompt(one, 2), ids=(0, 3, 4))], EMBED)
        with pytest.raises(RequestError, match="an image has only one vector; use the task embed"):
            llm.pool([alone(one, family)], EACH)
        wrong = Picture({"pixel_values": torch.zeros(1, 3, 8, 8)}, 1)
        with pytest.raises(RequestError):
            llm.pool([alone(wrong, family)], EMBED)


@pytest.mark.parametrize("without", [TaskConfig(images=False), TaskConfig(text_only=True)])
def test_without_images_the_image_encoder_is_not_loaded(case: tuple[str, Family], without: TaskConfig) -> None:
    name, family = case
    whole, text = read_checkpoint(family.folder), read_checkpoint(family.folder, task=without)
    assert whole.model.media is not None and text.model.media is None
    check_tensors(text.model, text.tensors)
    head = [one for one in media_sources(whole.model.media) if ".head." in one]
    assert bool(head) == (name != "CLIP")


def retrieval(name: str, folder: Path) -> Family:
    if name == "ColPali":
        eyes = transformers.SiglipVisionConfig(**EYES, image_size=12, vision_use_head=False, projection_dim=32)
        text = transformers.GemmaConfig(**TEXT)
        inner: Any = transformers.PaliGemmaConfig(
            text_config=text, vision_config=eyes, projection_dim=32, hidden_size=32, image_token_index=IMAGE
        )
    else:
        eyes = {"depth": 2, "num_heads": 2, "embed_dim": 16, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
        text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"rope_parameters": rope}
        inner = transformers.Qwen2VLConfig(text_config=text, vision_config=eyes, image_token_id=IMAGE)
    config = getattr(transformers, f"{name}Config")(vlm_config=inner, embedding_dim=12)
    model = getattr(transformers, f"{name}ForRetrieval")(config)
    model.lm_head = torch.nn.Linear(4, 96, bias=False)  # some exporters keep a head, which is not read
    saved(model, folder)
    return Family(model, folder)


RETRIEVAL: dict[str, Callable[[int], Picture]] = {
    "ColPali": lambda seed: picture((1, 3, 12, 12), 9, seed),
    "ColQwen2": qwen_picture,
}


@torch.no_grad()
def token_vectors(family: Family, prompt: MediaPrompt, one: Picture | None) -> np.ndarray:
    """Return the vectors of transformers. ColQwen2 was trained with M-RoPE, whose positions its class in transformers
    does not compute from token ids."""
    ids, given = torch.tensor([prompt.ids]), {} if one is None else dict(one.tensors)
    given["attention_mask"] = torch.ones_like(ids)
    if "image_grid_thw" in given:
        given["pixel_values"] = given["pixel_values"][None]
        kinds = (ids == IMAGE).int()
        rope = family.model.vlm.get_rope_index(ids, image_grid_thw=given["image_grid_thw"], mm_token_type_ids=kinds)
        given["position_ids"] = rope[0]
    found: torch.Tensor = family.model(input_ids=ids, **given).embeddings[0]
    return found.numpy()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RETRIEVAL)
def test_token_vectors_equal_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    """Documents of an image and queries of text, in chunks where attention permits it, with a repeated image."""
    family = retrieval(name, tmp_path)
    make = RETRIEVAL[name]
    cases = [(family.prompt(2, make(1), 5), make(1)), (family.prompt(7), None), (family.prompt(make(2), 3), make(2))]
    cases.append(cases[0])
    with opened(family, kernels, max_step_tokens=40, max_running=3, max_context=64) as llm:
        found = llm.pool([prompt for prompt, _ in cases], EACH)
    for one, (prompt, image) in zip(found, cases, strict=True):
        np.testing.assert_allclose(one, token_vectors(family, prompt, image), rtol=0, atol=1e-4)


def test_a_vision_language_model_embeds_prompts_with_images(tmp_path: Path) -> None:
    """Vectors of Qwen3-VL-Embedding are the last token's hidden state of a causal model, normalized."""
    family = qwen3_vl(tmp_path)
    prompt, one = family.prompt(3, qwen_picture(1), 4), qwen_picture(1)
    with opened(family, "torch", max_step_tokens=16, task=TaskConfig(task="embed")) as llm:
        found = llm.pool([prompt, prompt], EMBED)
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        states = family.model.model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **one.tensors)
    want = normalize(states.last_hidden_state[0, -1], dim=-1).numpy()
    for each in found:
        np.testing.assert_allclose(each, want, rtol=0, atol=1e-4)


def qwen3_vl(folder: Path) -> Family:
    from tests.engine.media_models import FAMILIES

    return FAMILIES["qwen3-vl"][0](folder)
