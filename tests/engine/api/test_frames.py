"""The frame format: whatever way the bytes arrive, the messages are those that were sent."""

import random

import pytest

from engine.api.frames import MAX_FRAME_BYTES, FrameReader, encode, from_engine, to_engine
from engine.api.messages import Abort, Control, Delta, Failed, Loading, Output, Sampling, Stats, Submit

TO_ENGINE = [
    [Submit("a", tuple(range(300)), Sampling(seed=2**63, logit_bias={3: -1.5}, bad_words=((1, 2),)), 7, salt="s")],
    [Abort(("a", "b")), Control("drain")],
    [],
]
FROM_ENGINE = [
    [Loading("loading", 0.5)],
    [Output(3, (Delta("a", (1,), finish="stop"),)), Failed("b", "request", "no", "n")],
    [Stats()],
]


def test_messages_round_trip():
    assert [to_engine(body) for m in TO_ENGINE for body in FrameReader().feed(encode(m))] == TO_ENGINE
    assert [from_engine(body) for m in FROM_ENGINE for body in FrameReader().feed(encode(m))] == FROM_ENGINE


def test_any_split_into_two_pieces_gives_the_same_frames():
    data = b"".join(encode(messages) for messages in TO_ENGINE)
    for cut in range(len(data) + 1):
        reader = FrameReader()
        bodies = reader.feed(data[:cut]) + reader.feed(data[cut:])
        assert [to_engine(body) for body in bodies] == TO_ENGINE


@pytest.mark.parametrize("seed", range(5))
def test_random_pieces_give_the_same_frames(seed):
    rng, reader, got = random.Random(seed), FrameReader(), []
    data = b"".join(encode(messages) for messages in TO_ENGINE * 3)
    while data:
        size = rng.choice((0, 1, 2, 3, 5, 700))
        got += reader.feed(data[:size])
        data = data[size:]
    assert [to_engine(body) for body in got] == TO_ENGINE * 3


def test_invalid_frame_length_is_an_error():
    with pytest.raises(ValueError, match="the stream is damaged"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
