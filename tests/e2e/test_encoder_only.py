"""A service of the towers alone, and one of the decoder without towers: replies equal transformers'.

The tower has features for the first hidden states of the decoder. tests/e2e/test_images.py has a tower without such
features, and a decoder with its tower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.appliance.server.http.image_models import data_url, picture, png, write
from tests.e2e.conftest import Appliance

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 12
MANIFEST = """\
apiVersion: slipway/v2
model: {{source: {{path: model}}, names: [eyes], max_context: 512, media: {{{media}}}}}
hardware: {{device: cpu, threads: 1}}
{more}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL with random weights, whose tower has features for the first hidden states of the decoder."""
    base = tmp_path_factory.mktemp("encoder")
    (base / "model").mkdir()
    write("qwen2_vl", ROOT / "manifests/demo", base / "model")
    written = json.loads((base / "model/tokenizer.json").read_text())
    ids = {one["content"]: one["id"] for one in written["added_tokens"]}
    vocab = 1 + max(*ids.values(), *written["model"]["vocab"].values())
    config = transformers.Qwen3VLConfig(
        vision_config={
            **{"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48},
            **{"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        },
        text_config={
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocab, "max_position_embeddings": 512},
            **{"eos_token_id": ids["<|im_end|>"], "bos_token_id": None, "tie_word_embeddings": False},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(3)
    model = transformers.Qwen3VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
        for token in ids.values():
            model.lm_head.weight[token] = 0  # replies are text
    model.save_pretrained(base / "model")
    manifests = {
        "towers": ("encoder_only: true", ""),
        "decoder": ("accept_embeddings: true", "lifecycle: {self_test: {prompts: 0}}\nlimits: {media: {images: 0}}"),
    }
    for name, (media, more) in manifests.items():
        (base / f"{name}.yaml").write_text(MANIFEST.format(media=media, more=more))
    return base


def reply_of_transformers(folder: Path, prompt: list[int], image: Any) -> list[int]:
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32).eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "model")
    given = processor(images=[image], return_tensors="pt")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(TOKENS):
            types = (ids == model.config.image_token_id).long()
            logits = model(input_ids=ids, mm_token_type_ids=types, **given).logits[0, -1]
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.nightly("tests/e2e/test_images.py::test_replies_to_the_embeddings_of_another_service_equal_transformers")
@pytest.mark.slow
def test_a_decoder_replies_to_the_embeddings_of_another_service(launch: Callable[..., Appliance], folder: Path) -> None:
    """The reply of the first service has parts for messages of the second one."""
    towers = launch(folder / "towers.yaml")
    decoder = launch(folder / "decoder.yaml")
    towers.wait_ready()
    image = picture(70, 41)
    part = {"type": "image_url", "image_url": {"url": data_url(png(image))}}
    found = towers.client.post("/v1/media/embeddings", json={"input": [part, part]})
    assert found.status_code == 200, found.text
    first, second = found.json()["data"]
    assert first["image_embeds"] == second["image_embeds"] and first["shape"][1] == 64
    refused = towers.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    assert refused.status_code == 404 and "encode" in refused.text
    decoder.wait_ready()
    text = {"type": "text", "text": "What is this?"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [first, text]}], "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    replies = [decoder.client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
    prompt = replies[0]["prompt_token_ids"]
    wanted = reply_of_transformers(folder, prompt, image)
    for reply in replies:
        assert reply["choices"][0]["token_ids"] == wanted
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    body["messages"][0]["content"][0] = part
    assert decoder.client.post("/v1/chat/completions", json=body).status_code == 400
