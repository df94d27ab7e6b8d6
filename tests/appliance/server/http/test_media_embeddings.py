"""Embeddings of images: the route that returns them, content parts that have them, and faults."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from appliance.config.gateway import PooledModel
from appliance.server.chat.media import content_part, media_part
from appliance.server.first_requests import ask_each_kind, kinds
from engine.api.messages import Delta, Pooled, Submit
from engine.media.families import read_processors
from engine.media.processor import process
from tests.appliance.server.http.image_models import AUDIO_MODEL, data_url, picture, png, wav, write
from tests.appliance.server.http.test_images import PATH, asked, part, refused

ROUTE, WIDTH = "/v1/media/embeddings", 6
ONE, OTHER = data_url(png(picture())), data_url(png(picture(64, 24, seed=1)))


@pytest.fixture(scope="session")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen2_vl", checkpoint, tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture
def make(make_gateway: Callable[..., Any], model: Path) -> Iterator[Callable[..., Any]]:
    made = []

    def build(**fields: Any) -> Any:
        made.append(make_gateway(**{"model": str(model), **fields}))
        return made[-1]

    yield build
    for gateway in made:
        gateway.service.media.close()


@pytest.fixture
def towers(make: Callable[..., Any]) -> Any:
    """A service of the towers alone."""
    gateway = make(modalities=("image",), tasks=("encode",))
    gateway.router.reply = embeddings
    return gateway


@pytest.fixture
def decoder(make: Callable[..., Any]) -> Any:
    """A service without towers."""
    fields = {"embedded_modalities": ("image",), "media_width": WIDTH, "limits.media.images": 0}
    return make(**fields).says("a cat")


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).normal(size=(count, WIDTH)).astype("<f4")


def embeddings(submit: Submit) -> list[Delta]:
    found = rows(len(submit.prompt))
    return [Delta(submit.id, finish="stop", pooled=Pooled(found.shape, found.tobytes()))]


def encoded(towers: Any, *urls: str, **more: Any) -> list[dict[str, Any]]:
    status, reply = towers.post(ROUTE, {"input": [part(url) for url in urls], **more})
    assert status == 200, reply
    data: list[dict[str, Any]] = reply["data"]
    return data


def test_embeddings_are_parts_of_other_requests(towers: Any, decoder: Any, model: Path) -> None:
    """The prompt equals that of the image."""
    processor = read_processors(model).image
    assert processor is not None
    item = process(processor, picture())
    data = encoded(towers, ONE, OTHER)
    assert [one["index"] for one in data] == [0, 1] and all(one["object"] == "media_embeddings" for one in data)
    assert data[0]["shape"] == [sum(item.runs), WIDTH] and data[0]["type"] == "image_embeds"
    file = load(base64.b64decode(data[0]["image_embeds"]))
    assert np.array_equal(file["embeddings"], rows(20)) and file["size"].tolist() == [30, 40]
    submit = towers.submits[0]
    assert submit.media[0].spans == ((0, 20),) and submit.media[0].digest == item.digest
    assert submit.pooling is not None and submit.pooling.task == "token_embed"

    assert decoder.post(PATH, asked("see", data[0], "and", data[1]))[0] == 200
    (made,) = decoder.submits
    (image,) = decoder.ids("<|image_pad|>")
    assert list(made.prompt).count(image) == 20 + data[1]["shape"][0]
    first = made.media[0]
    assert first.tensors["image_grid_thw"] == item.tensors["image_grid_thw"]
    assert first.tensors["embeddings"].data == rows(20).tobytes()
    assert [made.prompt[at] for at in range(first.spans[0][0], sum(first.spans[0]))] == [image] * 20


def test_numbers_may_have_16_bits(towers: Any, decoder: Any) -> None:
    (one,) = encoded(towers, ONE, embed_dtype="bfloat16")
    assert decoder.post(PATH, asked(one))[0] == 200
    found = np.frombuffer(decoder.submits[0].media[0].tensors["embeddings"].data, "<f4")
    np.testing.assert_allclose(found, rows(20).flatten(), rtol=1 / 128)


def test_embeddings_are_compared_with_texts(towers: Any, make: Callable[..., Any]) -> None:
    """An item of /score may be a file, or the name of one."""
    (one,) = encoded(towers, ONE)
    fields = {"embedded_modalities": ("image",), "media_width": WIDTH, "limits.media.images": 0}
    gateway = make(**fields, tasks=("embed", "score"), pooled=PooledModel(width=2))
    vector = np.ones(2, "<f4")
    gateway.router.reply = lambda submit: [Delta(submit.id, finish="stop", pooled=Pooled((2,), vector.tobytes()))]
    named = {"type": "image_embeds", "image_embeds": None, "uuid": "cat"}
    for given in ({**one, "uuid": "cat"}, {"content": [named]}):
        status, reply = gateway.post("/score", {"queries": "a cat", "documents": [given]})
        assert status == 200, reply
    media = [submit.media for submit in gateway.submits if submit.media]
    assert len(media) == 2 and media[0] == media[1]
    assert media[0][0].tensors["embeddings"].data == rows(20).tobytes()


@pytest.mark.parametrize(
    "given",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}, "uuid": "bell"},
        {"type": "video_url", "video_url": "https://example.com/a.mp4"},
        {"type": "audio_url", "audio_url": None, "uuid": "bell"},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ],
)
def test_a_part_is_made_again_from_its_item(given: dict[str, Any]) -> None:
    item = media_part(given, "input")
    assert media_part(content_part(item), "input") == item


def test_media_of_a_pooling_request_are_limited_together(towers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence sends its item to an engine, also if items repeat."""
    encoded(towers, ONE)
    size = sum(len(tensor.data) for tensor in towers.submits[0].media[0].tensors.values())
    monkeypatch.setattr("appliance.server.chat.sequences.MAX_MEDIA", 2 * size)
    encoded(towers, ONE, ONE)
    towers.submits.clear()
    fault = refused(towers, {"input": [part(ONE)] * 3}, ROUTE)
    assert fault["param"] == "input" and f"{3 * size:,} bytes" in fault["message"]


def test_repeated_embeddings_are_read_once(towers: Any, decoder: Any) -> None:
    """By the hash of their file, or by a name."""
    (one,) = encoded(towers, ONE)
    named = {"type": "image_embeds", "image_embeds": None, "uuid": "cat"}
    for given in (one, {**one, "uuid": "cat"}, named):
        assert decoder.post(PATH, asked(given))[0] == 200
    assert decoder.service.media.processed == 1
    digests = {submit.media[0].digest for submit in decoder.submits}
    assert len(digests) == 1
    assert "no image with the uuid 'dog'" in refused_after(decoder, {**named, "uuid": "dog"})


def refused_after(gateway: Any, given: dict[str, Any]) -> str:
    gateway.submits.clear()
    fault = refused(gateway, asked("see", given))
    assert fault["param"] == "messages.0.content.1.image_embeds"
    return str(fault["message"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("!!!!", "not valid base64"),
        (base64.b64encode(b"PK\3\4" + bytes(60)).decode(), "torch.save"),
        (base64.b64encode(bytes(60)).decode(), "format safetensors"),
        ("", "in base64"),
        (None, "in base64"),
        ({"image_grid_thw": "AAAA"}, "in base64"),
    ],
)
def test_a_wrong_file_is_named(decoder: Any, given: Any, reason: str) -> None:
    assert reason in refused_after(decoder, {"type": "image_embeds", "image_embeds": given})


def test_embeddings_of_another_size_or_model_are_refused(towers: Any, make: Callable[..., Any]) -> None:
    (one,) = encoded(towers, ONE, mm_processor_kwargs={"max_pixels": 500})
    fields = {"embedded_modalities": ("image",), "limits.media.images": 0}
    decoder = make(**fields, media_width=WIDTH).says("a cat")
    assert "the same mm_processor_kwargs" in refused_after(decoder, one)
    assert decoder.post(PATH, {**asked(one), "mm_processor_kwargs": {"max_pixels": 500}})[0] == 200
    assert "those of this model have 7" in refused_after(make(**fields, media_width=7), one)


def test_embeddings_need_the_key(towers: Any, make: Callable[..., Any], gateway: Any) -> None:
    (one,) = encoded(towers, ONE)
    assert "model.media.accept_embeddings" in refused_after(make(modalities=("image",)), one)
    assert "parts of type 'image_embeds' are not supported" in refused(gateway.says("a"), asked(one))["message"]


def test_a_limit_counts_images_and_embeddings(towers: Any, make: Callable[..., Any], decoder: Any) -> None:
    """A limit of 0 turns only images off."""
    (one,) = encoded(towers, ONE)
    fields = {"modalities": ("image",), "embedded_modalities": ("image",), "media_width": WIDTH}
    both = make(**fields, **{"limits.media.images": 1}).says("a cat")
    assert both.post(PATH, asked(one))[0] == both.post(PATH, asked(part(ONE)))[0] == 200
    both.submits.clear()
    assert "limits.media.images" in refused(both, asked(one, part(ONE)))["message"]
    assert "image is not supported" in refused(decoder, asked(part(ONE)))["message"]
    assert decoder.post(PATH, asked(one, one, one))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "body.input"),
        ({"input": ["text"]}, "body.input.0"),
        ({"input": [{"type": "text", "text": "hello"}]}, "input.0"),
        ({"input": [part(ONE), {"type": "image_embeds", "image_embeds": "AAAA"}]}, "input.1"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, "input.0.image_url"),
        ({"input": [part(ONE)], "embed_dtype": "fp8_e4m3"}, "body.embed_dtype"),
        ({"input": [part(ONE)], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": [part(ONE)] * 17}, "input.16.image_url"),
    ],
)
def test_wrong_requests_for_embeddings_are_refused(towers: Any, body: dict[str, Any], param: str) -> None:
    fault = refused(towers, body, ROUTE)
    assert fault["param"] == param


def test_an_image_of_more_tokens_than_the_context_is_refused(make: Callable[..., Any]) -> None:
    gateway = make(modalities=("image",), tasks=("encode",), max_context=19)
    assert "19" in refused(gateway, {"input": [part(ONE)]}, ROUTE)["message"]
    small = part(data_url(png(picture(24, 24))))
    assert "input[1]: " in refused(gateway, {"input": [small, part(ONE)]}, ROUTE)["message"]


def test_an_engine_embeds_an_image_before_it_is_ready(towers: Any) -> None:
    assert list(kinds(towers.service)) == ["/v1/media/embeddings#image_url"]
    assert asyncio.run(ask_each_kind(towers.service, towers.app.router, 0))
    (submit,) = towers.submits
    assert submit.media[0].modality == "image"


def test_other_services_have_no_such_route(gateway: Any, towers: Any) -> None:
    status, reply = gateway.post(ROUTE, {"input": [part(ONE)]})
    assert (
        status in (404, 501)
        and "a model that serves embeddings of media (model.media.encoder_only); it serves generate"
        in reply["error"]["message"]
    )
    assert towers.post(PATH, asked("hello"))[0] in (404, 501)


def test_audio_has_embeddings_too(checkpoint: Path, make: Callable[..., Any], tmp_path: Path) -> None:
    assert AUDIO_MODEL["config"]["model_type"] == "qwen2_audio"
    folder = str(write("qwen2_audio", checkpoint, tmp_path))
    towers = make(model=folder, modalities=("audio",), tasks=("encode",))
    towers.router.reply = embeddings
    url = f"data:audio/wav;base64,{base64.b64encode(wav()).decode()}"
    status, reply = towers.post(ROUTE, {"input": [{"type": "audio_url", "audio_url": {"url": url}}]})
    assert status == 200, reply
    (one,) = reply["data"]
    decoder = make(model=folder, embedded_modalities=("audio",), media_width=WIDTH).says("a bell")
    assert one["type"] == "audio_embeds" and decoder.post(PATH, asked(one))[0] == 200
    assert decoder.submits[0].media[0].modality == "audio"
