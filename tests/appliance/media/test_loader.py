"""Decoding and processing in separate processes: hostile files fail their own request, and killed processes are
replaced."""

import asyncio
import base64
import io
import json
import os
import random
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
from PIL import Image

from appliance.config.sections.limits import Media
from appliance.media.job import Job, JobLimits
from appliance.media.loader import Cache, MediaLoader
from appliance.media.media_process import Worker
from appliance.media.part import DONE, REFUSED, MediaPart
from appliance.runtime import limited_processes
from engine.api.errors import RequestError
from engine.api.media import MediaTensor
from engine.media.decode import Limits, decode
from engine.media.families import read_processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import process_audio
from tests.appliance.server.http.image_models import wav
from tests.engine.media.test_videos import encoded, steps
from tests.tiers import thinned

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF")
SEED = 3


def heard() -> dict[str, bytes]:
    """Return a second of noise in several formats."""
    found = {"wav": wav()}
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    for form, options in {"flac": {}, "ogg": {"subtype": "VORBIS"}, "mp3": {}}.items():
        stream = io.BytesIO()
        soundfile.write(stream, samples, 16_000, format=form.upper(), **options)
        found[form] = stream.getvalue()
    return found


HEARD = heard()
MOVING = {
    form: encoded(steps(8), form, codec)
    for form, codec in (("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg"), ("webm", "libvpx"), ("gif", "gif"))
}


def file_of(form: str, mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, form)
    return stream.getvalue()


def mutated(data: bytes, random: random.Random) -> bytes:
    """Return the file cut, or with a few bytes replaced."""
    if random.random() < 0.2:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(random.choice((1, 3, 20))):
        at = random.randrange(min(len(data), 200)) if random.random() < 0.7 else random.randrange(len(data))
        changed[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    return bytes(changed)


@pytest.mark.parametrize("count", thinned((40, 80), (40,)))
@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_give_an_image_or_an_error(form: str, count: int) -> None:
    """No other exception; 40 files of each format, and in nightly tests 80 others."""
    data, source = file_of(form), random.Random(SEED + count)
    assert decode(data).size == ((24, 18) if form == "ICO" else (32, 24))
    for _ in range(count):
        try:
            assert decode(mutated(data, source), Limits(max_pixels=10_000)).mode == "RGB"
        except MediaError as error:
            assert str(error)


@pytest.mark.parametrize("data", [b"", b"\0", b"%!PS-Adobe-3.0 EPSF", b"GIF89a", b"<svg/>", b"%PDF-1.4", b"BM" * 50])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(MediaError):
        decode(data)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few kilobytes with this many black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj()
    data = b"".join(rows.compress(bytes(1 + width)) for _ in range(height)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(101, 100), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_pixels_are_limited_before_they_are_decoded(size: tuple[int, int]) -> None:
    data = bomb(101, 100).replace(struct.pack(">II", 101, 100), struct.pack(">II", *size))
    fixed = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    with pytest.raises(MediaError, match="limit is 10,000 pixels"):
        decode(fixed, Limits(max_pixels=10_000))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    image = '{"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 784, "longest_edge": 3136}}'
    (tmp_path / "preprocessor_config.json").write_text(image)
    return tmp_path


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., MediaLoader]]:
    made = []

    def build(**limits: Any) -> MediaLoader:
        made.append(MediaLoader(str(model), Media(**limits)))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def part(data: bytes, where: str = "image") -> MediaPart:
    return MediaPart("image", "data:x;base64," + base64.b64encode(data).decode(), where)


def loaded(loader: MediaLoader, *files: bytes) -> list[Processed]:
    parts = [part(data, f"image.{at}") for at, data in enumerate(files)]

    async def load() -> list[Processed]:
        images = await loader.load(parts)
        return [images[each] for each in parts]

    return asyncio.run(load())


def test_the_first_faulty_image_is_named(make: Callable[..., MediaLoader]) -> None:
    loader, good = make(), file_of("PNG")
    with pytest.raises(RequestError, match=r"^image\.1: the file is not an image") as caught:
        loaded(loader, good, b"bad", b"worse")
    assert caught.value.param == "image.1"
    assert len(loaded(loader, good)) == 1


def test_an_image_beyond_the_memory_is_refused_and_others_are_served(make: Callable[..., MediaLoader]) -> None:
    loader = make(memory=64 << 20)
    with pytest.raises(RequestError, match="too much memory"):
        loaded(loader, bomb(7000, 7000))
    assert len(loaded(loader, file_of("PNG"))) == 1


def test_an_image_beyond_the_time_is_refused_and_others_are_served(make: Callable[..., MediaLoader]) -> None:
    loader = make(time=0.05)
    with pytest.raises(RequestError, match=r"computes for more than 0\.05 s"):
        loaded(loader, bomb(7000, 7000))
    assert len(loaded(loader, file_of("PNG"))) == 1


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    (folder / "config.json").write_text('{"model_type": "qwen2_audio"}')
    (folder / "preprocessor_config.json").write_text('{"feature_size": 16, "chunk_length": 4}')
    return folder


@pytest.mark.parametrize("count", thinned((6, 30), (6,)))
@pytest.mark.parametrize("kind", ["video", "audio"])
def test_damaged_videos_and_audio_fail_only_their_request(
    make: Callable[..., MediaLoader], hearing: Path, kind: str, count: int
) -> None:
    """Five containers of each kind; whatever a decoder does happens in its process."""
    loader = make() if kind == "video" else MediaLoader(str(hearing), Media())
    files = MOVING if kind == "video" else HEARD
    source, results = random.Random(SEED), list[bool]()
    for form, data in files.items():
        assert loads(loader, kind, data), form
        results += [loads(loader, kind, mutated(data, source)) for _ in range(count)]
    assert False in results, "some files are damaged"
    assert loads(loader, kind, next(iter(files.values())))
    loader.close()


def loads(loader: MediaLoader, kind: Any, data: bytes) -> bool:
    url = "data:x;base64," + base64.b64encode(data).decode()
    try:
        return len(asyncio.run(loader.load([MediaPart(kind, url, "x")]))) == 1
    except RequestError as error:
        assert error.param == "x" and str(error).startswith("x: ")
        return False


def test_a_longer_recording_after_a_reload_gets_more_memory(hearing: Path) -> None:
    loader = MediaLoader(str(hearing), Media(memory=64 << 20), max_audio_seconds=0.1)
    recording = wav(600 * 16_000)
    try:
        assert len(asyncio.run(loader.samples(wav(1000), 0.1))) == 1000
        assert len(asyncio.run(loader.samples(recording, 1200.0))) == 600 * 16_000
        assert len(children()) == 1, "the processes with the old limits end"
    finally:
        loader.close()


def test_a_process_may_use_its_cpu_time(make: Callable[..., MediaLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of elapsed time is longer."""
    monkeypatch.setattr(limited_processes, "WALL_S", 0.0)
    assert len(loaded(make(time=30.0), file_of("PNG"))) == 1


def polyglot() -> bytes:
    """Return an image file that continues as a video file."""
    return file_of("PNG") + MOVING["mp4"]


def test_a_file_is_read_only_as_its_field_says(make: Callable[..., MediaLoader]) -> None:
    loader = make()
    assert loads(loader, "image", polyglot()) and not loads(loader, "image", MOVING["mp4"])
    assert not loads(loader, "video", HEARD["wav"])


def children() -> list[int]:
    mine = [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]
    return [int(child) for child in mine if b"media_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_killed_process_is_replaced(make: Callable[..., MediaLoader]) -> None:
    loader = make()
    loaded(loader, file_of("PNG"))
    before = children()
    for child in before:
        os.kill(child, signal.SIGKILL)
    assert len(loaded(loader, file_of("BMP"))) == 1
    assert len(children()) == 1 and not {*before} & {*children()}


def test_the_cache_drops_the_least_recently_used() -> None:
    def image(size: int) -> Processed:
        return Processed(b"", "", (), {"x": MediaTensor("float32", (size // 4,), bytes(size))})

    def key(name: bytes) -> tuple[bytes, str, str]:
        return name, "image", ""

    cache = Cache(100)
    for name in (b"a", b"b"):
        cache.put(key(name), image(40))
    assert cache.get(key(b"a")) is not None
    cache.put(key(b"c"), image(40))
    assert [name for name in (b"a", b"b", b"c") if cache.get(key(name))] == [b"a", b"c"]
    cache.put(key(b"d"), image(104))
    assert cache.get(key(b"d")) is None and cache.get(key(b"a")) is not None
    cache.put(key(b"e"), image(100))
    assert [name for name in (b"a", b"c", b"e") if cache.get(key(name))] == [b"e"]


def test_uuids_of_another_key_are_not_known(make: Callable[..., MediaLoader]) -> None:
    loader = make()
    sent = MediaPart("image", part(file_of("PNG")).url, "x", uuid="cat")
    reference = MediaPart("image", "", "x", uuid="cat")
    asyncio.run(loader.load([sent], "alice"))
    assert reference in asyncio.run(loader.load([reference], "alice"))
    with pytest.raises(RequestError, match="no image with the uuid 'cat'"):
        asyncio.run(loader.load([reference], "bob"))


@pytest.mark.parametrize("form", ["matroska", "avi", "asf"])
def test_sound_of_a_video_is_read_if_the_request_wants_it(form: str, tmp_path: Path) -> None:
    """Qwen2.5-Omni: pieces of 2 s of frames and of sound take turns; a silent video has none."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni_thinker"}))
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "feature_size": 128}')
    worker = Worker(str(tmp_path), JobLimits(1 << 24, 1 << 24, 64, 60.0))
    noise = (np.random.default_rng(1).normal(0, 1000, 40_000)).astype(np.int16)
    codec = {"matroska": "mpeg4", "avi": "mjpeg", "asf": "mpeg4"}[form]
    loud, silent = encoded(steps(50), form, codec, sound=noise), encoded(steps(50), form, codec)

    def read(data: bytes, options: str = "") -> Processed:
        reply = worker.reply(msgspec.msgpack.encode(Job("video", (data,), options)))
        assert reply[:1] == DONE, reply
        return msgspec.msgpack.decode(reply[1:], type=Processed)

    wanted = '{"use_audio_in_video": true}'
    plain, found = read(loud), read(loud, wanted)
    assert not plain.parts and plain.text == "<|VIDEO|>" and read(silent, wanted) == read(silent)
    for samples in (0, 1, 320):  # a stream of sound without samples, and sounds that are shorter than a token
        short = encoded(steps(50), form, codec, sound=noise[:samples])
        assert read(short, wanted) == read(short)
    assert len(read(encoded(steps(50), form, codec, sound=noise[:321]), wanted).parts) == 4
    # The video has 5 pairs of frames in 5 s, 2 in each piece. The sound has 62 tokens in 2.5 s.
    assert found.text == "<|audio_bos|><|VIDEO|><|AUDIO|><|VIDEO|><|AUDIO|><|VIDEO|><|audio_eos|>"
    each = plain.runs[0] // 5
    assert found.runs == (2 * each, 50, 2 * each, 12, each)
    pixels = b"".join(part.tensors["pixel_values_videos"].data for part in found.parts[::2])
    assert pixels == plain.tensors["pixel_values_videos"].data and found.size > plain.size
    heard = read_processors(tmp_path).audio
    assert heard is not None
    whole = process_audio(heard, noise.astype(np.float32) / 32768).tensors["input_features"]
    one, other = (part.tensors["input_features"] for part in found.parts[1::2])
    joined = np.concatenate([np.frombuffer(part.data, "<f4").reshape(part.shape) for part in (one, other)], 1)
    np.testing.assert_allclose(joined, np.frombuffer(whole.data, "<f4").reshape(whole.shape), atol=1e-5)
    long = worker.reply(msgspec.msgpack.encode(Job("video", (encoded(steps(5), form, codec, sound=noise),), wanted)))
    assert long[:1] == DONE


def test_sound_of_videos_needs_a_model_that_reads_both(tmp_path: Path) -> None:
    for kind, message in (("qwen2_5_vl", "reads videos and audio"), ("qwen3_omni_moe", "supported for Qwen2.5-Omni")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "feature_size": 128}')
        worker = Worker(str(tmp_path), JobLimits(1 << 24, 1 << 24, 64, 60.0))
        job = Job("video", (encoded(steps(8)),), '{"use_audio_in_video": true}')
        reply = worker.reply(msgspec.msgpack.encode(job))
        assert reply[:1] == REFUSED and message in reply.decode()
