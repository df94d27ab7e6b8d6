"""Videos and audio in requests, references to earlier items, and options of processors; faults name the field."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.media.audio import read_audio
from engine.media.families import read_processors
from engine.media.processor import process_audio, process_video
from engine.media.video import open_video
from tests.appliance.server.http.image_models import data_url, picture, png, video, wav, write

PATH = "/v1/chat/completions"
CLIP, SOUND, IMAGE = video(), wav(), data_url(png(picture()))
SMALL = data_url(png(picture(20, 20)))


def encoded(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write(name, checkpoint, tmp_path_factory.mktemp(name)) for name in ("qwen2_vl", "qwen2_audio", "llava")
    }


@pytest.fixture
def make(make_gateway: Callable[..., Any], models: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    made = []
    kinds = {"qwen2_vl": ("image", "video"), "qwen2_audio": ("audio",), "llava": ("image",)}

    def build(name: str = "qwen2_vl", **fields: Any) -> Any:
        made.append(make_gateway(**{"model": str(models[name]), "modalities": kinds[name], **fields}))
        return made[-1].says("a cat")

    yield build
    for gateway in made:
        gateway.service.media.close()


def asked(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], **fields}


def of(kind: str, url: str | None, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: None if url is None else {"url": url}, **more}


def refused(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = gateway.post(PATH, body)
    assert status == 400, reply
    fault: dict[str, Any] = reply["error"]
    return fault


def test_videos_and_images_keep_their_order(make: Callable[..., Any], models: dict[str, Path]) -> None:
    """Items equal those of the processor; the prompt has their tokens."""
    gateway = make()
    clip = of("video_url", encoded(CLIP, "video/mp4"))
    status, reply = gateway.post(PATH, asked(of("image_url", IMAGE), clip, of("image_url", IMAGE)))
    assert status == 200, reply
    (submit,) = gateway.submits
    assert [item.modality for item in submit.media] == ["image", "video", "image"]
    assert submit.media[0].spans < submit.media[1].spans < submit.media[2].spans
    processor = read_processors(models["qwen2_vl"]).video
    assert processor is not None
    with open_video(CLIP) as opened:
        expected = process_video(processor, opened, 128)
    assert submit.media[1].digest == expected.digest and submit.media[1].tensors == expected.tensors
    (token,) = gateway.ids("<|video_pad|>")
    assert list(submit.prompt).count(token) == sum(expected.runs) == submit.media[1].spans[0][1]
    assert reply["usage"]["prompt_tokens"] == len(submit.prompt)


def test_a_list_of_frames_is_a_video(make: Callable[..., Any]) -> None:
    """As in vLLM: data:video/jpeg;base64,FRAME,FRAME."""
    gateway = make()
    frames = [base64.b64encode(png(picture(seed=seed))).decode() for seed in range(4)]
    assert gateway.post(PATH, asked(of("video_url", f"data:video/jpeg;base64,{','.join(frames)}")))[0] == 200
    (item,) = gateway.submits[0].media
    assert item.modality == "video" and item.tensors["video_grid_thw"].data[:8] == (2).to_bytes(8, "little")
    other = base64.b64encode(png(picture(20, 20))).decode()
    fault = refused(gateway, asked(of("video_url", f"data:video/jpeg;base64,{frames[0]},{other}")))
    assert "several sizes" in fault["message"]


@pytest.mark.parametrize(
    "limits,url,words",
    [
        ({"limits.media.videos": 0}, encoded(CLIP, "video/mp4"), "limits.media.videos"),
        ({"limits.media.seconds": 1.0}, encoded(CLIP, "video/mp4"), "limit is 1 s"),
        ({"limits.media.max_pixels": 500}, encoded(CLIP, "video/mp4"), "limit is 500 pixels"),
        ({}, encoded(CLIP[:300], "video/mp4"), "damaged"),
        ({}, encoded(b"nothing", "video/mp4"), "known format"),
        ({}, "https://example.com/a.mp4", "does not fetch URLs"),
        ({}, "file:///etc/passwd", "file URLs are not allowed"),
    ],
)
def test_a_video_that_cannot_be_read_is_named(
    make: Callable[..., Any], limits: dict[str, Any], url: str, words: str
) -> None:
    gateway = make(**limits)
    fault = refused(gateway, asked(of("image_url", SMALL), of("video_url", url)))
    assert fault["param"] == "messages.0.content.1.video_url" and words in fault["message"]
    assert gateway.post(PATH, asked(of("image_url", SMALL)))[0] == 200


def test_frames_beyond_the_limit_are_sampled_down(make: Callable[..., Any]) -> None:
    gateway = make(**{"limits.media.frames": 4})
    assert gateway.post(PATH, asked(of("video_url", encoded(CLIP, "video/mp4"))))[0] == 200
    (item,) = gateway.submits[0].media
    assert item.tensors["video_grid_thw"].data[:8] == (2).to_bytes(8, "little")


def test_a_video_in_an_allowed_folder_is_read(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(CLIP)
    gateway = make(**{"limits.media.folders": (str(tmp_path),)})
    assert gateway.post(PATH, asked(of("video_url", f"file://{tmp_path}/a.mp4")))[0] == 200
    refused(gateway, asked(of("video_url", f"file://{tmp_path}/../etc/passwd")))


def sound(data: bytes = SOUND, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def test_audio_is_sent_to_the_engine(make: Callable[..., Any], models: dict[str, Path]) -> None:
    """input_audio and audio_url of the same file are one item; the official client sends it."""
    gateway = make("qwen2_audio")
    body = asked(sound(), of("audio_url", encoded(SOUND, "audio/wav")))
    reply = gateway.openai(lambda client: client.chat.completions.create(model="qwen", **body))
    assert reply.choices[0].message.content == "a cat"
    first, second = gateway.submits[0].media
    assert first.modality == "audio" and first.digest == second.digest
    processor = read_processors(models["qwen2_audio"]).audio
    assert processor is not None
    expected = process_audio(processor, read_audio(SOUND, max_seconds=9))
    assert first.tensors == expected.tensors
    (token,) = gateway.ids("<|AUDIO|>")
    assert list(gateway.submits[0].prompt).count(token) == 2 * sum(expected.runs)


@pytest.mark.parametrize(
    "part,words",
    [
        (sound(b"nothing"), "Invalid or unsupported audio file"),
        (sound(wav(5 * 16_000)), "longer than 4 seconds"),
        (sound(wav(100)), "shorter"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "data in base64 and their format"),
        ({"type": "audio_url", "audio_url": {}}, "the URL of the audio"),
        ({"type": "image_url", "image_url": {"url": IMAGE}}, "accepts only text and audio"),
    ],
)
def test_audio_that_cannot_be_read_is_named(make: Callable[..., Any], part: dict[str, Any], words: str) -> None:
    assert words in refused(make("qwen2_audio"), asked(part))["message"]


def test_other_modalities_are_refused(make: Callable[..., Any]) -> None:
    gateway = make("llava")
    for part in (sound(), of("video_url", encoded(CLIP, "video/mp4"))):
        assert "accepts only text and image." in refused(gateway, asked(part))["message"]


def test_a_uuid_refers_to_an_item_that_was_sent_before(make: Callable[..., Any]) -> None:
    """A part without content and with a known uuid; other modalities, unknown and invalid uuids get 400."""
    gateway = make()
    assert gateway.post(PATH, asked(of("image_url", IMAGE, uuid="cat"), of("image_url", None, uuid="dog")))[0] == 400
    assert gateway.post(PATH, asked(of("image_url", IMAGE, uuid="cat")))[0] == 200
    assert gateway.post(PATH, asked(of("image_url", None, uuid="cat")))[0] == 200
    first, second = gateway.submits
    assert first.media == second.media and first.prompt == second.prompt
    assert gateway.service.media.processed == 1
    for part in (of("video_url", None, uuid="cat"), of("image_url", None, uuid="cow"), of("image_url", None)):
        assert refused(gateway, asked(part))["param"].startswith("messages.0.content.0.")
    assert "uuid must be" in refused(gateway, asked(of("image_url", IMAGE, uuid=3)))["message"]
    assert refused(gateway, asked(of("image_url", None, uuid="cat"), mm_processor_kwargs={"max_pixels": 256}))


def test_uuids_in_responses(make: Callable[..., Any]) -> None:
    gateway = make()
    for url, status in ((None, 400), (IMAGE, 200), (None, 200)):
        part = {"type": "input_image", "image_url": url, "uuid": "cat"}
        body = {"input": [{"role": "user", "content": [part]}]}
        found, reply = gateway.post("/v1/responses", body)
        assert found == status, reply
    first, second = gateway.submits
    assert first.media == second.media


def test_options_change_the_number_of_tokens(make: Callable[..., Any]) -> None:
    """They are part of the cache's key; wrong ones get 400."""
    gateway = make()
    sizes = []
    for options in (None, {"max_pixels": 1024}, None):
        assert gateway.post(PATH, asked(of("image_url", IMAGE), mm_processor_kwargs=options))[0] == 200
        sizes.append(gateway.submits[-1].media[0].spans[0][1])
    assert sizes[0] == sizes[2] > sizes[1] and gateway.service.media.processed == 2
    status, reply = gateway.post("/tokenize", asked(of("image_url", IMAGE), mm_processor_kwargs={"max_pixels": 1024}))
    assert status == 200 and reply["count"] == len(gateway.submits[1].prompt)
    for wrong in ({"patch_size": 2}, {"max_pixels": "x"}, {"size": {"shortest_edge": -1}}, {"max_pixels": 10**30}):
        for parts in ((of("image_url", IMAGE),), ()):
            fault = refused(gateway, asked(*parts, mm_processor_kwargs=wrong))
            assert "mm_processor_kwargs" in fault["message"] and fault["param"] == "mm_processor_kwargs"
    clip = of("video_url", encoded(CLIP, "video/mp4"))
    assert gateway.post(PATH, asked(clip, mm_processor_kwargs={"num_frames": 4}))[0] == 200
    assert gateway.submits[-1].media[0].tensors["video_grid_thw"].data[:8] == (2).to_bytes(8, "little")
    text = {"messages": [{"role": "user", "content": "hello"}], "mm_processor_kwargs": {"fps": 1}}
    assert gateway.post(PATH, text)[0] == 200


def test_anthropic_images_are_refused_by_a_model_of_audio(make: Callable[..., Any]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    block = {"type": "image", "source": source}
    body = {"model": "qwen", "max_tokens": 3, "messages": [{"role": "user", "content": [block]}]}
    status, reply = make("qwen2_audio").post("/v1/messages", body)
    assert status == 400 and "accepts only text and audio" in reply["error"]["message"]


def test_models_lists_the_modalities(make: Callable[..., Any], gateway: Any) -> None:
    def card(gateway: Any) -> dict[str, Any]:
        async def get() -> httpx.Response:
            async with gateway.client() as client:
                return await client.get("/v1/models")

        found: dict[str, Any] = asyncio.run(get()).json()["data"][0]
        return found

    assert card(make())["input_modalities"] == ["text", "image", "video"]
    assert "input_modalities" not in card(gateway)


def test_the_format_of_audio_is_that_of_the_file(make: Callable[..., Any]) -> None:
    gateway = make("qwen2_audio")
    assert gateway.post(PATH, asked(sound(form="WAV")))[0] == 200
    for form, words in (("mp3", "format is 'mp3', but the file is WAV"), ("pcm16", "format 'pcm16' is not supported")):
        fault = refused(gateway, asked(sound(form=form)))
        assert words in fault["message"] and fault["param"] == "messages.0.content.0.input_audio"


def test_media_io_kwargs_select_frames_of_videos(make: Callable[..., Any], models: dict[str, Path]) -> None:
    gateway = make()
    clip = of("video_url", encoded(CLIP, "video/mp4"))
    counts = []
    for options, more in (({"num_frames": 4}, {}), ({"num_frames": -1}, {"fps": 2}), ({"fps": 2}, {})):
        io = {"video": options, "image": {"image_mode": "RGB"}}
        body = asked(clip, of("image_url", IMAGE), media_io_kwargs=io, mm_processor_kwargs=more)
        status, reply = gateway.post(PATH, body)
        assert status == 200, reply
        submit = gateway.submits[-1]
        counts.append(sum(count for _, count in submit.media[0].spans))
        assert submit.media[1].digest == gateway.submits[0].media[1].digest
    frames = {"num_frames": 4}, {"do_sample_frames": False, "fps": 2}, {"fps": 2}
    for count, options in zip(counts, frames, strict=True):
        processor = read_processors(models["qwen2_vl"], options).video
        assert processor is not None
        with open_video(CLIP) as opened:
            assert count == sum(process_video(processor, opened, 128).runs)
    assert counts[0] < counts[1] and counts[2] < counts[1]
    for options, words in (
        ({"video": {"codec": "x"}}, "video.codec is not supported; known: fps, max_frames, num_frames"),
        ({"smell": {}}, "'smell' must be 'image' or 'video' or 'audio'"),
        ({"image": {"image_mode": "RGBA"}}, "image_mode must be RGB"),
        ({"video": {"num_frames": 0}}, "num_frames must be a positive integer"),
    ):
        assert words in refused(gateway, asked(clip, media_io_kwargs=options))["message"]
