"""Images and videos through the running service: replies of transformers, embeddings of another service, a crash of the
engine, and images turned off.

The model is a small Qwen2-VL with random weights and the tokenizer of the demo.
"""

import base64
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import torch
import transformers
from PIL import Image

from engine.media.families import read_processors
from engine.media.processor import process_video
from engine.media.video import open_video
from engine.worker.grid_positions import as_array
from tests.appliance.server.http.image_models import data_url, picture, png, video, write
from tests.documented import documented
from tests.e2e.conftest import Appliance
from tests.e2e.hostile_media import check_hostile_files
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24
MANIFEST = """\
apiVersion: slipway/v2
model: {{source: {{path: model}}, names: [eyes], max_context: 512, media: {{{media}}}}}
hardware: {{device: cpu, threads: 1}}
lifecycle: {{self_test: {{prompts: 0}}}}
{more}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights, tokenizer, template and processor."""
    base = tmp_path_factory.mktemp("images")
    (base / "model").mkdir()
    write("qwen2_vl", ROOT / "manifests/demo", base / "model")
    written = json.loads((base / "model/tokenizer.json").read_text())
    ids = {one["content"]: one["id"] for one in written["added_tokens"]}
    vocab = 1 + max(*ids.values(), *written["model"]["vocab"].values())
    config = transformers.Qwen2VLConfig(
        vision_config={
            **{"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2},
        },
        text_config={
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 512},
            **{"eos_token_id": ids["<|im_end|>"], "bos_token_id": None, "tie_word_embeddings": False},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(3)
    model = transformers.Qwen2VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
        for token in ids.values():
            model.lm_head.weight[token] = 0  # replies are text
    model.save_pretrained(base / "model")
    for name, media, more in (
        ("on", "accept_embeddings: true", ""),
        ("off", "", "limits: {media: {images: 0}}"),
        ("towers", "encoder_only: true", ""),
    ):
        (base / f"{name}.yaml").write_text(MANIFEST.format(media=media, more=more))
    return base


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], folder: Path) -> Appliance:
    appliance = launch(folder / "on.yaml")
    appliance.wait_ready()
    return appliance


def reply_of_transformers(folder: Path, prompt: list[int], image: Image.Image) -> list[int]:
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32).eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "model")
    given = processor(images=[image], return_tensors="pt")
    ids = torch.tensor([prompt])
    types = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(input_ids=ids, mm_token_type_ids=types, **given).logits[0, -1]
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
            types = torch.cat((types, torch.zeros(1, 1, dtype=torch.int64)), 1)
    return ids[0, len(prompt) :].tolist()


def test_a_reply_to_a_video_equals_transformers(service: Appliance, folder: Path) -> None:
    """Between texts, also from the prefix cache. tests/engine/media compares the processor."""
    data = video(count=7)
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What happens?"}]
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts]}]}
    replies = [ask(service, **body) for _ in range(2)]
    processor = read_processors(folder / "model").video
    assert processor is not None
    with open_video(data) as clip:
        found = process_video(processor, clip, 128)
    given = {name: torch.from_numpy(as_array(one).copy()) for name, one in found.tensors.items()}
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32).eval()
    prompt = replies[0]["prompt_token_ids"]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(TOKENS):
            types = 2 * (ids == model.config.video_token_id).long()
            logits = model(input_ids=ids, mm_token_type_ids=types, **given).logits[0, -1]
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
    for reply in replies:
        assert reply["choices"][0]["token_ids"] == ids[0, len(prompt) :].tolist()
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def messages(*images: Image.Image) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(png(image))}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def ask(service: Appliance, *images: Image.Image, **more: object) -> dict:
    body = {"model": "eyes", "messages": messages(*images), "temperature": 0, "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    found = service.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()


def test_replies_equal_transformers_and_the_prefix_cache_tells_images_apart(service: Appliance, folder: Path) -> None:
    images = [picture(), picture(seed=1), picture(width=96, height=20, seed=2)]
    replies = [ask(service, image) for image in images]
    for image, reply in zip(images, replies, strict=True):
        expected = reply_of_transformers(folder, reply["prompt_token_ids"], image)
        assert reply["choices"][0]["token_ids"] == expected
    assert len({str(one["choices"][0]["token_ids"]) for one in replies}) == len(images)
    again = ask(service, images[0])
    assert again["choices"][0]["token_ids"] == replies[0]["choices"][0]["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert "slipway_media_encoded_total" in service.client.get("/metrics").text


def test_a_stream_with_an_image_survives_a_kill_of_its_engine(service: Appliance) -> None:
    count = 200
    body = {"model": "eyes", "messages": messages(picture(seed=4), picture(seed=5)), "temperature": 0}
    body |= {"max_tokens": count, "ignore_eos": True, "stream": True}
    whole = "".join(stream(service, body))
    pieces = []
    for number, piece in enumerate(stream(service, body)):
        pieces.append(piece)
        if number == 5:
            os.kill(service.pids()["engine-0"], signal.SIGKILL)
    assert "".join(pieces) == whole and len(pieces) > 20


def stream(service: Appliance, body: dict) -> list[str]:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=120)
    extra = {"ignore_eos": body["ignore_eos"]}
    chunks = client.chat.completions.create(
        **{name: value for name, value in body.items() if name != "ignore_eos"}, extra_body=extra
    )
    return (chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_replies_to_the_embeddings_of_another_service_equal_transformers(
    service: Appliance, launch: Callable[..., Appliance], folder: Path
) -> None:
    """The reply of a service of the towers alone has parts for messages of the other one."""
    towers, image = launch(folder / "towers.yaml"), picture(70, 41)
    part = {"type": "image_url", "image_url": {"url": data_url(png(image))}}
    towers.wait_ready()
    found = towers.client.post("/v1/media/embeddings", json={"input": [part, part]})
    assert found.status_code == 200, found.text
    first, second = found.json()["data"]
    assert first["image_embeds"] == second["image_embeds"] and first["shape"][1] == 32
    refused = towers.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}]})
    assert refused.status_code == 404 and "encode" in refused.text
    assert towers.stop() == 0
    message = {"role": "user", "content": [first, {"type": "text", "text": "What is this?"}]}
    replies = [ask(service, messages=[message]) for _ in range(2)]
    wanted = reply_of_transformers(folder, replies[0]["prompt_token_ids"], image)
    assert [reply["choices"][0]["token_ids"] for reply in replies] == [wanted] * 2
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("count", thinned((48, 1000), (48,)))
def test_hostile_images_and_videos_get_an_error_or_a_reply(service: Appliance, count: int) -> None:
    """`make test-all` sends 1,000 files; FUZZ_SEED selects others."""
    check_hostile_files(service, "eyes", count, ("image_url", "video_url"))
    assert ask(service, picture())["choices"]


def test_the_command_of_the_page_runs(service: Appliance) -> None:
    reply = json.loads(documented("docs/images.md", "image_url", service.url))
    assert reply["model"] == "eyes" and reply["choices"][0]["message"]["content"]


@pytest.mark.nightly("tests/engine/test_image_embeddings.py::test_without_images_the_image_encoder_is_not_loaded")
def test_images_that_are_turned_off_get_400_and_no_tower(launch: Callable[..., Appliance], folder: Path) -> None:
    appliance = launch(folder / "off.yaml")
    appliance.wait_ready()
    found = appliance.client.post("/v1/chat/completions", json={"model": "eyes", "messages": messages(picture())})
    assert found.status_code == 400 and "messages[0].content[0]" in found.text
    text = [{"role": "user", "content": "hello"}]
    found = appliance.client.post("/v1/chat/completions", json={"model": "eyes", "messages": text, "max_tokens": 4})
    assert found.status_code == 200
