"""Frames on a stream socket: a little-endian u32 length, then a MessagePack list of messages of that many bytes."""

import struct

import msgspec

from engine.api.messages import FromEngine, ToEngine

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
_decode_from_engine = msgspec.msgpack.Decoder(list[FromEngine]).decode


def encode(messages: list[ToEngine] | list[FromEngine]) -> bytes:
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frames. `feed` returns the bodies of the frames that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        self._buffer += data
        bodies, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"frame of {length} bytes: at most {MAX_FRAME_BYTES} are allowed; the stream is damaged"
                )
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            bodies.append(bytes(self._buffer[at + _LENGTH.size : at + _LENGTH.size + length]))
            at += _LENGTH.size + length
        del self._buffer[:at]
        return bodies


def to_engine(body: bytes) -> list[ToEngine]:
    return _decode_to_engine(body)


def from_engine(body: bytes) -> list[FromEngine]:
    return _decode_from_engine(body)
