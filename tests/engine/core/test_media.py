"""Media in the scheduler: chunks, block hashes, refusals, recordings."""

import msgspec
import pytest
from scheduler_simulation import Device, expected, make_layout

from engine.api.errors import RequestError
from engine.api.hashes import extend, root_hash
from engine.api.media import MediaItem, MediaTensor
from engine.api.messages import Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.media import MediaLimits, StepPart, block_marks, step_part
from engine.core.recorder import Recorder
from engine.core.records import read_records
from engine.core.replay import replay
from engine.core.scheduler import Scheduler
from engine.core.snapshot import SchedulerState, restore, snapshot

CAUSAL = MediaLimits(modalities=("image",), step_tokens=10)
ITEM = MediaLimits(modalities=("image",), step_tokens=10, attention="item")
PREFIX = MediaLimits(modalities=("image",), step_tokens=10, attention="prefix")
PIXELS = MediaTensor("float32", (3,), b"pixels of it")


def image(first, count, digest=b"one"):
    return MediaItem("image", digest, ((first, count),), {"pixel_values": PIXELS})


def submit(length, *items, name="r", reply=3):
    return Submit(name, tuple(i % 5 for i in range(length)), Sampling(), reply, ignore_eos=True, media=items)


@pytest.mark.parametrize(
    ("limits", "positions", "room", "enters", "part"),
    [
        (CAUSAL, (0, 5), 10, True, (5, 6)),  # a chunk may end inside of an image, which is computed completely
        (CAUSAL, (0, 20), 10, True, (12, 6)),  # the next image exceeds the limit
        (CAUSAL, (0, 20), 12, True, (20, 12)),
        (CAUSAL, (5, 20), 6, False, (20, 6)),  # the image that an earlier step began costs nothing
        (CAUSAL, (5, 20), 6, True, (12, 6)),  # after a prefix hit, it does
        (CAUSAL, (0, 2), 0, True, (2, 0)),
        (CAUSAL, (2, 9), 4, True, (2, 0)),  # other requests have used the limit
        (ITEM, (0, 5), 10, True, (2, 0)),  # an image is computed in one step
        (ITEM, (5, 7), 10, True, (5, 0)),
        (ITEM, (5, 8), 10, True, (8, 6)),
        (PREFIX, (0, 19), 0, True, (0, 0)),  # and so is a prompt
        (PREFIX, (3, 20), 0, True, (20, 12)),
    ],
)
def test_chunk_ends_where_media_permit(limits, positions, room, enters, part):
    request = submit(20, image(2, 6), image(12, 6, b"two"))
    assert step_part(limits, request, positions, room, enters=enters) == StepPart(*part)


def test_single_item_may_exceed_the_limit():
    request = submit(40, image(1, 30))
    assert step_part(CAUSAL, request, (0, 40), 10, enters=True) == StepPart(40, 30)
    assert step_part(CAUSAL, request, (0, 40), 9, enters=True) == StepPart(1, 0)


def hashes(request, limits=CAUSAL):
    chain = []
    root = root_hash(b"", *limits.root(request))
    extend(chain, root, request.prompt, 4, block_marks(request, 4))
    return chain


def shared(one, other, limits=CAUSAL):
    """The number of blocks that two requests with the same tokens share."""
    assert one.prompt == other.prompt
    return sum(a == b for a, b in zip(hashes(one, limits), hashes(other, limits), strict=True))


def test_blocks_depend_on_the_media_up_to_their_end():
    plain = submit(20)
    assert shared(plain, submit(20, image(9, 4))) == 2
    assert shared(submit(20, image(9, 4)), submit(20, image(9, 4))) == 5
    assert shared(submit(20, image(9, 4)), submit(20, image(9, 4, b"two"))) == 2
    assert shared(submit(20, image(8, 4)), submit(20, image(9, 4))) == 2
    assert shared(submit(20, image(9, 4)), submit(20, image(9, 5))) == 2, "bidirectional attention reads all of a span"
    assert shared(submit(20, image(1, 2), image(9, 4)), submit(20, image(1, 2), image(10, 4))) == 2
    assert shared(submit(20, image(9, 4)), submit(20, image(9, 4), image(17, 1))) == 4


def test_the_token_before_a_video_or_clip_depends_on_it():
    """Its position is another one if the item is a piece of a video with its sound."""
    plain = submit(20)
    for modality, same in (("image", 2), ("video", 1), ("audio", 1)):
        item = msgspec.structs.replace(image(8, 4), modality=modality)
        assert shared(plain, submit(20, item)) == same
        assert shared(submit(20, item), submit(20, item)) == 5
    first = msgspec.structs.replace(image(0, 4), modality="video")
    assert shared(plain, submit(20, first)) == 0


def test_blocks_of_a_bidirectional_prompt_depend_on_all_of_it():
    one = submit(20, image(1, 2))
    assert shared(one, submit(20, image(1, 2)), PREFIX) == 5
    assert shared(one, submit(20, image(1, 2), image(18, 1)), PREFIX) == 0
    longer = msgspec.structs.replace(one, prompt=(*one.prompt, 1))
    assert not set(hashes(one, PREFIX)) & set(hashes(longer, PREFIX))


class MediaDevice(Device):
    """Device whose contents depend on media, as a model's: token ids at their places are replaced by numbers that their
    embeddings would determine."""

    def run(self, plan, salts):
        new = tuple(msgspec.structs.replace(one, ids=seen(one.ids, one.media)) for one in plan.new)
        return super().run(msgspec.structs.replace(plan, new=new), salts)


def seen(ids, media):
    found = list(ids)
    for item in media:
        for first, count in item.spans:
            found[first : first + count] = [7 + (13 * item.digest[0] + 3 * i) % 97 for i in range(count)]
    return tuple(found)


@pytest.mark.parametrize(("windows", "blocks"), [((None,), 23), ((9,), 40)])
@pytest.mark.parametrize("step_tokens", [5, 16])
@pytest.mark.parametrize("prefix", [True, False])
def test_requests_read_only_blocks_of_their_own_media(windows, blocks, step_tokens, prefix):
    """Requests with the same tokens and three images, few blocks, small steps and a limit of embeddings."""
    config = SchedulerConfig(
        layout=make_layout(windows),
        blocks=blocks,
        max_context=60,
        max_running=4,
        max_step_tokens=step_tokens,
        prefix_cache=prefix,
        media=CAUSAL,
    )
    scheduler, device = Scheduler(config), MediaDevice(config.layout, blocks, 4, step_tokens)
    streams, wanted = {}, {}
    for number in range(12):
        items = (image(3, 6, bytes([number % 3])), image(13, 7, bytes([number % 2])))[: 2 - (number == 5)]
        request = submit(26, *items, name=f"r{number}", reply=24)
        if number % 4 == 3:
            request = msgspec.structs.replace(request, emitted=(1, 2))
        assert scheduler.submit(request, float(number)) is None
        streams[request.id] = list(request.emitted)
        wanted[request.id] = expected(msgspec.structs.replace(request, prompt=seen(request.prompt, items)), 60)[0]
    steps = 0
    while (planned := scheduler.plan(100.0 + steps)) is not None:
        result = device.run(planned.plan, [""] * len(planned.plan.rows))
        for delta in scheduler.apply(result, 100.5 + steps).deltas:
            streams[delta.id] += delta.ids
        steps += 1
        assert steps < 600
    assert streams == wanted
    assert (scheduler.counters.prefix_hits > 0) == prefix
    assert windows != (None,) or scheduler.counters.preemptions


@pytest.mark.parametrize(
    ("media", "items", "words"),
    [
        (None, (image(1, 2),), "reads only text; remove the image"),
        (CAUSAL, (msgspec.structs.replace(image(1, 2), modality="audio"),), "no input of audio"),
        (CAUSAL, (image(1, 2), image(2, 2)), "after those of earlier spans"),
        (CAUSAL, (image(18, 3),), "before the end of the prompt"),
        (CAUSAL, (image(1, 0),), "at least one position"),
        (CAUSAL, (msgspec.structs.replace(image(1, 2), digest=b""),), "has no digest"),
        (CAUSAL, (msgspec.structs.replace(image(1, 2), spans=()),), "has no spans"),
        (
            CAUSAL,
            (msgspec.structs.replace(image(1, 2), tensors={"x": MediaTensor("int64", (2,), bytes(15))}),),
            "x of shape [2] has 15 bytes, not 16",
        ),
        (ITEM, (image(1, 14),), "computed in one step, which has room for 13"),
        (PREFIX, (image(1, 2),), "20 tokens attend to one another"),
        (MediaLimits(modalities=("image",), step_tokens=9, attention="item", window=5), (image(1, 6),), "window has 5"),
    ],
)
def test_invalid_media_are_refused(media, items, words):
    config = SchedulerConfig(
        layout=make_layout((None,)), blocks=40, max_context=60, max_running=4, max_step_tokens=16, media=media
    )
    with pytest.raises(RequestError, match="media|attend") as found:
        config.check(submit(20, *items))
    assert words in str(found.value)


def test_recording_has_no_tensors_and_can_be_replayed(tmp_path):
    config = SchedulerConfig(layout=make_layout((None,)), blocks=40, max_context=60, max_step_tokens=16, media=CAUSAL)
    path = tmp_path / "recording"
    recorder, device = Recorder(config, str(path), 4096), MediaDevice(config.layout, 40, 256, 16)
    for number in range(8):
        recorder.submit(submit(26, image(3, 6), name=f"r{number}"), float(number))
        while (planned := recorder.plan(number + 0.1)) is not None:
            assert all(one.media[0].tensors for one in planned.plan.new), "the worker needs them"
            recorder.apply(device.run(planned.plan, [""] * len(planned.plan.rows)), number + 0.2)
        recorder.on_idle()
    recorder.submit(submit(26, image(3, 6), name="open"), 9.0)
    recorder.plan(9.0)
    restored = Scheduler(config)
    restore(restored, msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot(recorder)), type=SchedulerState))
    marks = [one._by_id["open"].tables.marks for one in (recorder, restored)]
    assert marks[0] and marks[0] == marks[1]
    recorder._turn_over()
    recorder.flush()
    files = list(tmp_path.iterdir())
    assert len(files) == 2, "the second file begins with a state"
    assert all(PIXELS.data not in file.read_bytes() for file in files)
    outcome = replay(read_records(path))
    assert outcome.steps and outcome.difference is None
