"""Decoding of video files with PyAV, and of lists of frames, with limits.

Only containers that store all of their data are opened: playlists (HLS, DASH, concat) name further files.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np

from engine.media.clip import Array, Clip
from engine.media.decode import Limits, decode
from engine.media.pixels import channels
from engine.media.processed import MediaError

CONTAINERS: Final = ("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "gif", "ogg", "flv", "asf")
"""Containers by their first name in FFmpeg: MP4 and QuickTime, Matroska and WebM, …"""
MAX_MISSING: Final = 0.02
"""Share of frames that a file may announce and not have, as files with edit lists do. The last frame replaces them."""


@dataclass(frozen=True)
class VideoLimits:
    """Limits of one video."""

    seconds: float = 600.0
    frames: int = 128
    """Frames that are read."""
    image: Limits = Limits()
    """Limits of the file, and of the pixels of a frame."""


@contextmanager
def opened(data: bytes) -> Iterator[Any]:
    """Open a container, of video or audio. Raises MediaError for an unknown or damaged file."""
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "", "max_streams": "32"}
    try:
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="ignore") as container:
            yield container
    except MediaError:
        raise
    except (MemoryError, av.error.MemoryError):
        raise MediaError("decoding the file takes too much memory") from None
    except (av.error.InvalidDataError, av.error.ArgumentError):
        raise MediaError("the file is damaged, or not in a known format (MP4, WebM, Matroska, AVI, GIF, …)") from None
    except (av.error.FFmpegError, ValueError, TypeError, ArithmeticError, LookupError, OSError) as error:
        raise MediaError(f"the file is damaged ({type(error).__name__})") from error


@contextmanager
def open_video(data: bytes, limits: VideoLimits = VideoLimits()) -> Iterator[Clip]:
    """Open a video file. Raises MediaError, also while frames are read."""
    if len(data) > limits.image.max_bytes:
        raise MediaError(f"the file has {len(data):,} bytes; the limit is {limits.image.max_bytes:,}")
    with opened(data) as container:
        yield _clip(container, limits)


def _clip(container: Any, limits: VideoLimits) -> Clip:
    if not container.streams.video:
        raise MediaError("the file has no video")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise MediaError("the codec of the video is not supported")
    stream.thread_type = "NONE"
    stored = int(stream.width or 0), int(stream.height or 0)
    _check_size(*stored, limits)
    rate = stream.average_rate or stream.guessed_rate
    if not rate or rate <= 0:
        raise MediaError("the video has no frame rate")
    frames = int(stream.frames) or _count(container, stream)
    if frames < 1:
        raise MediaError("the video has no frames")
    if Fraction(frames) / rate > limits.seconds:
        raise MediaError(
            f"the video has a duration of {float(frames / rate):,.1f} s; the limit is {limits.seconds:g} s"
        )
    turns = _quarter_turns(container)
    width, height = stored[::-1] if turns % 2 else stored
    return Clip(frames, float(rate), width, height, lambda chosen: _decoded(container, chosen, stored, frames, turns))


def _quarter_turns(container: Any) -> int:
    """Return the number of quarter turns, anticlockwise, by which players rotate the frames. Phones store frames as the
    sensor reads them, and the rotation in the metadata."""
    container.seek(0)
    frame = next(iter(container.decode(video=0)), None)
    return 0 if frame is None else round(frame.rotation / 90) % 4


def _check_size(width: int, height: int, limits: VideoLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError("the video has no pixels")
    if width * height > limits.image.max_pixels:
        raise MediaError(
            f"the video has {width} x {height} pixels; the limit is {limits.image.max_pixels:,} pixels of a frame"
        )


def _count(container: Any, stream: Any) -> int:
    """Return the number of packets of the stream, for containers that do not announce the number of frames."""
    return sum(1 for packet in container.demux(stream) if packet.size)


def _decoded(
    container: Any, chosen: Sequence[int], size: tuple[int, int], announced: int, turns: int = 0
) -> Iterator[Array]:
    container.seek(0)
    at, last, number = 0, None, -1
    for number, frame in enumerate(container.decode(video=0)):
        if (frame.width, frame.height) != size:
            raise MediaError("the frames of the video have several sizes")
        while at < len(chosen) and chosen[at] == number:
            last = np.moveaxis(np.rot90(frame.to_ndarray(format="rgb24"), turns), -1, 0)
            yield last
            at += 1
        if at == len(chosen):
            return
    missing = announced - number - 1
    if last is None or missing > max(1, int(MAX_MISSING * announced)):
        raise MediaError(f"the video ends after {number + 1} of {announced} frames; the file is damaged")
    for _ in chosen[at:]:
        yield last


def frame_list(files: Sequence[bytes], limits: VideoLimits = VideoLimits()) -> Clip:
    """Return a clip of image files, whose times are unknown. Raises MediaError."""
    if len(files) > limits.frames:
        raise MediaError(f"the video has {len(files)} frames; the limit is {limits.frames}")
    images = [decode(data, limits.image) for data in files]
    width, height = images[0].size
    if any(image.size != (width, height) for image in images):
        raise MediaError("the frames of the video have several sizes")
    return Clip(len(images), None, width, height, lambda chosen: (channels(images[number]) for number in chosen))
