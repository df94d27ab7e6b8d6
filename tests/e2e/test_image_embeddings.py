"""Embedding models that read images through the running service: vectors and scores equal those of transformers.

The models are a small SigLIP and a small ColPali with random weights and the tokenizer of the demo.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.appliance.server.http.image_models import data_url, picture, png
from tests.documented import documented
from tests.e2e.conftest import Appliance

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = """\
apiVersion: slipway/v2
model: {source: {path: model}, names: [finder]}
hardware: {device: cpu, threads: 1}
"""
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
EYES |= {"image_size": 12}
PROCESSOR = {"size": {"height": 12, "width": 12}, "image_processor_type": "SiglipImageProcessor"}
PICTURES = [picture(), picture(17, 60, seed=1)]


def write(base: Path, specials: list[str], processor: dict[str, Any]) -> dict[str, int]:
    """Write tokenizer, processor and manifest. Return the size of the vocabulary and the ids of special tokens."""
    folder = base / "model"
    folder.mkdir()
    backend = Tokenizer.from_file(str(ROOT / "manifests/demo/tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": specials[0], "bos_token": specials[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (base / "m.yaml").write_text(MANIFEST)
    return {"": backend.get_vocab_size(), **{text: backend.token_to_id(text) for text in specials}}


def saved(model: Any, folder: Path) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.float().eval().save_pretrained(folder)
    return model


def pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(SiglipImageProcessorPil(size=PROCESSOR["size"])(image, return_tensors="np")["pixel_values"])


def part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(png(image))}}


def talk(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def close(found: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), wanted, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_siglip_embeds_texts_and_images(launch: Callable[..., Appliance], tmp_path: Path) -> None:
    ids = write(tmp_path, ["<pad>"], {})
    words = {**EYES, "vocab_size": ids[""], "max_position_embeddings": 16, "projection_size": 32}
    words = {key: value for key, value in words.items() if key not in ("patch_size", "image_size")}
    words |= {"pad_token_id": ids["<pad>"], "bos_token_id": None, "eos_token_id": None}
    model = saved(
        transformers.SiglipModel(transformers.SiglipConfig(text_config=words, vision_config=EYES)), tmp_path / "model"
    )
    backend = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))

    def of_text(text: str) -> np.ndarray:
        own = backend.encode(text, add_special_tokens=False).ids
        given = torch.tensor([own + [ids["<pad>"]] * (16 - len(own))])
        with torch.no_grad():
            vector = model.get_text_features(input_ids=given).pooler_output[0].numpy()
        return vector / np.linalg.norm(vector)

    def of_image(image: Any) -> np.ndarray:
        with torch.no_grad():
            vector = model.get_image_features(pixel_values=pixels(image)).pooler_output[0].numpy()
        return vector / np.linalg.norm(vector)

    images, texts = [of_image(one) for one in PICTURES], [of_text("a cat"), of_text("two dogs")]
    service = launch(tmp_path / "m.yaml")
    service.wait_ready()
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none")
    replied = client.embeddings.create(model="finder", input=["A cat!", "two  dogs"], encoding_format="float")
    close([one.embedding for one in replied.data], np.stack(texts))
    assert replied.usage.prompt_tokens == 32  # texts are padded

    def post(path: str, **body: Any) -> Any:
        found = service.client.post(path, json=body)
        assert found.status_code == 200, found.text
        return found.json()

    shown = json.loads(documented("docs/pooling.md", "image_url", service.url))
    assert len(shown["data"]) == 2
    mixed = post("/v1/embeddings", input=[part(PICTURES[1]), "a cat", part(PICTURES[0])])
    close([one["embedding"] for one in mixed["data"]], np.stack([images[1], texts[0], images[0]]))
    asked = post("/v1/embeddings", messages=[talk(part(PICTURES[0])), talk({"type": "text", "text": "two dogs"})])
    close([one["embedding"] for one in asked["data"]], np.stack([images[0], texts[1]]))
    embed = post("/v2/embed", images=[data_url(png(PICTURES[1]))], input_type="search_document", model="finder")
    close(embed["embeddings"]["float"], images[1][None])
    scores = post("/v1/score", queries="a cat", documents=[part(one) for one in PICTURES])
    close([one["score"] for one in scores["data"]], np.array([texts[0] @ one for one in images]))
    for body, where in (
        ({"messages": talk(part(PICTURES[0]), {"type": "text", "text": "a cat"})}, "one input is either a text or one"),
        ({"messages": [*talk(part(PICTURES[0])), *talk(part(PICTURES[0]))]}, "send one message of the role user"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, "image_url"),
    ):
        refused = service.client.post("/v1/embeddings", json=body)
        assert refused.status_code == 400 and where in refused.json()["error"]["message"], refused.text


@pytest.mark.nightly("tests/e2e/test_image_embeddings.py::test_siglip_embeds_texts_and_images")
@pytest.mark.slow
def test_colpali_ranks_images(launch: Callable[..., Appliance], tmp_path: Path) -> None:
    settings = {"image_seq_length": 9, "query_prefix": "Question: ", "visual_prompt_prefix": "Describe the image."}
    ids = write(tmp_path, ["<pad>", "<image>", "<bos>"], settings)
    eyes = transformers.SiglipVisionConfig(**EYES, vision_use_head=False, projection_dim=32)
    text = transformers.GemmaConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": ids[""], "max_position_embeddings": 128},
    )
    inner = transformers.PaliGemmaConfig(
        text_config=text, vision_config=eyes, projection_dim=32, hidden_size=32, image_token_index=ids["<image>"]
    )
    config = transformers.ColPaliConfig(vlm_config=inner, embedding_dim=12)
    model = saved(transformers.ColPaliForRetrieval(config), tmp_path / "model")
    backend = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))

    def vectors(text: str, image: Any = None) -> np.ndarray:
        given = torch.tensor([backend.encode(text, add_special_tokens=False).ids])
        more = {} if image is None else {"pixel_values": pixels(image)}
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=given, attention_mask=torch.ones_like(given), **more).embeddings
        return found[0].numpy()

    documents = [vectors("<image>" * 9 + "<bos>Describe the image.\n", one) for one in PICTURES]
    query = vectors("<bos>Question: where is it?" + "<pad>" * 10 + "\n")
    service = launch(tmp_path / "m.yaml")
    service.wait_ready()

    def post(path: str, **body: Any) -> Any:
        found = service.client.post(path, json=body)
        assert found.status_code == 200, found.text
        return found.json()

    wanted = [float((query @ one.T).max(1).sum()) for one in documents]
    scores = post("/v1/score", queries="where is it?", documents=[part(one) for one in PICTURES])
    close([one["score"] for one in scores["data"]], np.array(wanted))
    ranked = post("/v1/rerank", query="where is it?", documents=[{"content": [part(one)]} for one in PICTURES])
    order = sorted((0, 1), key=lambda at: -wanted[at])
    assert [one["index"] for one in ranked["results"]] == order
    close([one["relevance_score"] for one in ranked["results"]], np.array(wanted)[order])
    found = post("/v1/embeddings", input=["where is it?", part(PICTURES[0])])
    close(found["data"][0]["embedding"], query)
    close(found["data"][1]["embedding"], documents[0])
    for body, what in (
        ({"queries": part(PICTURES[0]), "documents": [part(PICTURES[1])]}, "a query of this model is a text"),
        ({"queries": "where?", "documents": ["a text"]}, "a document of this model is an image"),
    ):
        refused = service.client.post("/v1/score", json=body)
        assert refused.status_code == 400 and what in refused.json()["error"]["message"], refused.text


@pytest.mark.nightly("tests/engine/test_image_embeddings.py::test_a_vision_language_model_embeds_prompts_with_images")
@pytest.mark.slow
def test_a_vision_language_model_embeds_conversations_with_images(
    launch: Callable[..., Appliance], tmp_path: Path
) -> None:
    """Qwen3-VL-Embedding: the normalised state of the last token, for no image, one and two."""
    specials = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    ids, folder = write(tmp_path, [*specials, "<|video_pad|>"], {}), tmp_path / "model"
    settings = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 2304}}
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind | settings))
    parts = "{% if part.type == 'image' %}" + "".join(specials) + "{% else %}{{ part.text }}{% endif %}"
    template = "{% for message in messages %}{% for part in message.content %}" + parts + "{% endfor %}{% endfor %}"
    described = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template + "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "m.yaml").write_text(MANIFEST.replace("names: [finder]", "names: [finder], task: embed"))
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": ids[""], "max_position_embeddings": 256}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}}
    eyes = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
    eyes |= {"out_hidden_size": 32, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=eyes, image_token_id=ids["<|image_pad|>"])
    model = saved(transformers.Qwen3VLForConditionalGeneration(config), folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def of(words: str, *images: Any) -> np.ndarray:
        given = dict(Qwen2VLImageProcessorPil(**settings)(list(images), return_tensors="pt")) if images else {}
        pads = [int(grid.prod()) // 4 for grid in given.get("image_grid_thw", ())]
        prompt = "".join(f"{specials[0]}{specials[1] * count}{specials[2]}" for count in pads) + words + "<|im_end|>"
        own = torch.tensor([backend.encode(prompt, add_special_tokens=False).ids])
        types = (own == ids["<|image_pad|>"]).int()
        with torch.no_grad():
            vector = model.model(input_ids=own, mm_token_type_ids=types, **given).last_hidden_state[0, -1].numpy()
        return vector / np.linalg.norm(vector)

    service = launch(tmp_path / "m.yaml")
    service.wait_ready()
    words = {"type": "text", "text": "two dogs"}
    talks = [talk(words), talk(part(PICTURES[0]), words), talk(part(PICTURES[1]), part(PICTURES[0]), words)]
    found = service.client.post("/v1/embeddings", json={"messages": talks})
    assert found.status_code == 200, found.text
    wanted = [of("two dogs"), of("two dogs", PICTURES[0]), of("two dogs", PICTURES[1], PICTURES[0])]
    close([one["embedding"] for one in found.json()["data"]], np.stack(wanted))
