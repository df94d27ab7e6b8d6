"""Process that decodes and processes images, a child of a `ProcessPool`:
`python -m appliance.images.image_process MEMORY CPU_S MODEL BYTES PIXELS`.

A job is an image file. A reply is a byte, and the processed image in MessagePack (0), an error for the client (1) or
an error after which the process ends (2).
"""

import socket
import sys

import msgspec
from PIL import Image

from appliance.images.part import DONE, EXHAUSTED, REFUSED
from appliance.runtime.limited_processes import limit_resources, serve
from engine.media.decode import Limits, decode
from engine.media.families import read_processor
from engine.media.processed import ImageError
from engine.media.processor import Processor, process


def _reply(job: bytes, processor: Processor, limits: Limits) -> bytes:
    try:
        return DONE + msgspec.msgpack.encode(process(processor, decode(job, limits)))
    except ImageError as error:
        return REFUSED + str(error).encode()
    except MemoryError:
        return EXHAUSTED + b"processing the image takes too much memory"


def main(arguments: list[str]) -> None:
    memory, cpu_s, model = int(arguments[0]), float(arguments[1]), arguments[2]
    limits = Limits(max_bytes=int(arguments[3]), max_pixels=int(arguments[4]))
    processor = read_processor(model)
    assert processor is not None, "the gateway has read it before"
    Image.MAX_IMAGE_PIXELS = None  # `Limits` has the limit
    Image.init()  # load all decoders before memory is limited
    limit_resources(memory)
    serve(socket.socket(fileno=0), cpu_s, lambda job: _reply(job, processor, limits))


if __name__ == "__main__":
    main(sys.argv[1:])
