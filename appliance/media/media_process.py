"""Process that decodes and processes media, a child of a `ProcessPool`:
`python -m appliance.media.media_process MEMORY CPU_S MODEL LIMITS`.

LIMITS is a `JobLimits` in JSON. A job is a `Job` in MessagePack. A reply is a byte, and the result (0), an error for
the client (1) or an error after which the process ends (2).
"""

import json
import socket
import sys
from functools import lru_cache, partial

import av
import msgspec
from PIL import Image

from appliance.media.job import Job, JobLimits
from appliance.media.part import DONE, EXHAUSTED, REFUSED
from appliance.runtime.limited_processes import limit_resources, serve
from engine.api.media import Modality
from engine.media.audio import AudioError, TooLong, read_audio, read_sound
from engine.media.decode import Limits, decode
from engine.media.embeddings import Outline, SizeLimits, outline_of, read
from engine.media.families import Processors, read_processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import process, process_audio, process_video
from engine.media.video import VideoLimits, frame_list, open_video

IMAGES = (b"\xff\xd8\xff", b"\x89PNG")
"""Beginnings of image files, as the only frame of a video."""
LIMITS = {
    "samples": "The server's limit is limits.max_audio_seconds.",
    "audio": "The limit is that of the model, or limits.media.seconds.",
    "video": "The limit is that of the model, or limits.media.seconds.",
}


class Worker:
    """Decodes and processes files for the model in a folder."""

    def __init__(self, model: str, limits: JobLimits) -> None:
        self._limits = limits
        image = Limits(limits.max_bytes, limits.max_pixels)
        self._video = VideoLimits(limits.seconds, limits.frames, image)
        self._processors = lru_cache(maxsize=8)(lambda options: _processors(model, options))
        self._outlines = lru_cache(maxsize=64)(self._outline)

    def reply(self, message: bytes) -> bytes:
        job = msgspec.msgpack.decode(message, type=Job)
        try:
            return DONE + self._result(job)
        except TooLong as error:
            return REFUSED + f"{error} {LIMITS[job.kind]}".encode()
        except (MediaError, AudioError) as error:
            return REFUSED + str(error).encode()
        except MemoryError:
            return EXHAUSTED + b"processing the file takes too much memory"

    def _result(self, job: Job) -> bytes:
        if job.kind == "samples":
            return read_audio(job.files[0], max_seconds=job.seconds).astype("<f4", copy=False).tobytes()
        return msgspec.msgpack.encode(self._processed(job))

    def _processed(self, job: Job) -> Processed:
        processors: Processors = self._processors(job.options)
        if job.embeddings and job.kind != "samples":
            limits = self._limits
            sizes = SizeLimits(limits.width, limits.max_pixels, limits.frames, limits.seconds)
            return read(job.files[0], job.kind, sizes, partial(self._outlines, job.options))
        match job.kind:
            case "video":
                assert processors.video is not None, "the gateway refuses videos otherwise"
                if len(job.files) > 1 or job.files[0].startswith(IMAGES):
                    return process_video(processors.video, frame_list(job.files, self._video), self._limits.frames)
                with open_video(job.files[0], self._video) as clip:
                    video = process_video(processors.video, clip, self._limits.frames)
                if processors.sound is None:
                    return video
                most = min(self._limits.seconds, processors.sound.audio.max_seconds)
                samples = read_sound(job.files[0], max_seconds=most)
                return video if samples is None else processors.sound.joined(video, samples)
            case "audio":
                assert processors.audio is not None, "the gateway refuses audio otherwise"
                most = min(job.seconds or self._limits.seconds, processors.audio.max_seconds)
                return process_audio(processors.audio, read_audio(job.files[0], max_seconds=most))
        assert processors.image is not None, "the gateway refuses images otherwise"
        return process(processors.image, decode(job.files[0], self._video.image))

    def _outline(self, options: str, kind: Modality, size: tuple[int, ...], fps: float | None) -> Outline:
        return outline_of(self._processors(options), kind, size, fps, self._limits.frames)


def _processors(model: str, options: str) -> Processors:
    return read_processors(model, json.loads(options) if options else None)


def main(arguments: list[str]) -> None:
    memory, cpu_s, model = int(arguments[0]), float(arguments[1]), arguments[2]
    worker = Worker(model, msgspec.json.decode(arguments[3], type=JobLimits))
    _processors(model, "")  # loads the modules before memory is limited
    Image.MAX_IMAGE_PIXELS = None  # `Limits` has the limit
    Image.init()  # load all decoders before memory is limited
    av.logging.set_level(None)  # of damaged files
    limit_resources(memory)
    serve(socket.socket(fileno=0), cpu_s, worker.reply)


if __name__ == "__main__":
    main(sys.argv[1:])
