"""Images and recordings of workloads: drawn with a seed, or read from a folder. Written without image libraries."""

import io
import random
import struct
import wave
import zlib
from dataclasses import dataclass
from pathlib import Path

SAMPLE_RATE = 16_000
_BLOCK = 16  # pixels of the side of a block of one colour


@dataclass(frozen=True)
class Audio:
    """A recording to transcribe."""

    name: str
    data: bytes
    seconds: float


def png(generator: random.Random, width: int, height: int) -> bytes:
    """Return a PNG image of blocks in random colours, so that no two images are equal."""
    rows = []
    for top in range(0, height, _BLOCK):
        colours = b"".join(
            bytes(generator.randrange(256) for _ in range(3)) * min(_BLOCK, width - left)
            for left in range(0, width, _BLOCK)
        )
        rows += [b"\0" + colours] * min(_BLOCK, height - top)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def noise(generator: random.Random, seconds: float, name: str) -> Audio:
    """Return a WAV file of quiet noise."""
    frames = max(1, round(seconds * SAMPLE_RATE))
    quiet = generator.randbytes(frames)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
        writer.writeframes(b"".join(byte.to_bytes(1, "little") + b"\0" for byte in quiet))
    return Audio(f"{name}.wav", file.getvalue(), frames / SAMPLE_RATE)


def read_wav(file: Path) -> Audio:
    """Read a WAV file. Raises OSError, or wave.Error or EOFError if it is damaged."""
    data = file.read_bytes()
    with wave.open(io.BytesIO(data), "rb") as reader:
        return Audio(file.name, data, reader.getnframes() / reader.getframerate())
