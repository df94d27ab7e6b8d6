"""Prompts with images through the whole engine: the same tokens and log probabilities as transformers."""

import msgspec
import pytest

from engine.api.errors import RequestError
from engine.llm import MediaPrompt
from kernels.cpu.library import best
from tests.engine.media_models import REPLY, check, counts, greedy, llava, llava_picture, opened

KERNELS = ("torch", best())
ONE, OTHER = llava_picture(1), llava_picture(2)
PROMPTS = ((11,), (3, ONE, 5), (ONE, 2, OTHER, 1), (2, OTHER, ONE, 4))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def replies(family):
    return {parts: family.reply(*parts) for parts in PROMPTS}


@pytest.mark.parametrize("kernels", KERNELS)
def test_prompts_with_zero_to_two_images_run_together(family, replies, kernels):
    with opened(family, kernels) as llm:
        found = llm.generate([family.prompt(*parts) for parts in PROMPTS], greedy())
        assert counts(llm) == (2, 3), "each image is computed once"
    for parts, generation in zip(PROMPTS, found, strict=True):
        check(generation, replies[parts])
    assert len({tuple(one.ids) for one in found}) == len(found), "the images change the replies"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("step", [1, 5, 16])
def test_chunks_may_end_inside_of_an_image(family, replies, kernels, step):
    with opened(family, kernels, max_step_tokens=step, max_running=2) as llm:
        for parts, generation in zip(
            PROMPTS, llm.generate([family.prompt(*one) for one in PROMPTS], greedy()), strict=True
        ):
            check(generation, replies[parts])


@pytest.mark.parametrize("kernels", KERNELS)
def test_prefix_cache_tells_images_apart_and_finds_them_again(family, replies, kernels):
    first, other = (3, ONE, 5), (3, OTHER, 5)
    with opened(family, kernels) as llm:
        prompts = [family.prompt(*parts) for parts in (first, other, first)]
        cold, changed, again = (llm.generate(prompt, greedy())[0] for prompt in prompts)
        assert counts(llm) == (2, 0), "16 cached tokens include the image"
    assert prompts[0].ids == prompts[1].ids
    check(cold, replies[first])
    check(changed, family.reply(*other))
    check(again, replies[first])
    assert [one.timing.cached_tokens for one in (cold, changed, again)] == [0, 0, 16]


def test_prefix_hit_may_end_inside_of_an_image(family, replies):
    """The image is at positions 2 to 10, and only the blocks before position 8 are equal."""
    parts, shorter = (2, OTHER, ONE, 4), (2, OTHER, 7)
    with opened(family, "torch") as llm:
        llm.generate(family.prompt(*parts), greedy(1))
        again = llm.generate(family.prompt(*shorter), greedy())[0]
        assert counts(llm) == (2, 1)
    check(again, family.reply(*shorter))
    assert again.timing.cached_tokens == 8


@pytest.mark.parametrize("kernels", KERNELS)
def test_preempted_prompts_are_computed_again(family, replies, kernels):
    room = 12 * 4 * 3 * 2 * 2 * 8 * 4  # bytes of 12 blocks
    with opened(family, kernels, kv_bytes=room, max_context=40, max_running=4, prefix_cache=False) as llm:
        count = 14
        found = llm.generate([family.prompt(*parts) for parts in PROMPTS], greedy(count))
    assert sum(one.timing.preemptions for one in found)
    for parts, generation in zip(PROMPTS, found, strict=True):
        check(generation, family.reply(*parts, count=count))


@pytest.mark.parametrize("kernels", KERNELS)
def test_another_engine_resumes_a_reply(family, replies, kernels):
    parts = (2, OTHER, ONE, 4)
    ids, logprobs = replies[parts]
    with opened(family, kernels) as llm:
        submit, reply = llm._submit(family.prompt(*parts), greedy())
        submit = msgspec.structs.replace(submit, emitted=tuple(ids[:2]))
        llm._loop.post([submit])
        llm._collect({submit.id: reply})
    check(reply.generation, (ids[2:], logprobs[2:]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(2)
def test_two_ranks_return_the_same_replies(family, replies, kernels):
    with opened(family, kernels, tensor=2, max_step_tokens=7, max_running=4) as llm:
        found = llm.generate([family.prompt(*parts) for parts in PROMPTS], greedy())
    for parts, generation in zip(PROMPTS, found, strict=True):
        check(generation, replies[parts])


def test_repeated_image_is_computed_once_within_the_budget(family, replies):
    """The embeddings of an image are 9 · 32 float32. Without room for one, it is kept until its prompt has passed."""
    parts = (3, ONE, 5)
    for budget, encoded in ((0, 2), (9 * 32 * 4, 1)):
        with opened(family, "torch", prefix_cache=False, media_cache=budget, max_step_tokens=6, max_running=2) as llm:
            for _ in range(2):
                check(llm.generate(family.prompt(*parts), greedy())[0], replies[parts])
            assert counts(llm) == (encoded, 2 - encoded)


def test_step_has_a_limit_of_embeddings(family, replies):
    with opened(family, "torch", max_media_tokens=9) as llm:
        for parts, one in zip(
            PROMPTS, llm.generate([family.prompt(*parts) for parts in PROMPTS], greedy()), strict=True
        ):
            check(one, replies[parts])


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (((3, 20),), "before the end of the prompt"),
        (((3, 0),), "at least one position"),
        (((3, 4), (5, 2)), "after those of earlier spans"),
        ((), "has no spans"),
        (((3, 8),), "9 embeddings, but 8 tokens"),
    ],
)
def test_wrong_places_are_refused(family, spans, words):
    prompt = family.prompt(3, ONE, 5)
    wrong = MediaPrompt(prompt.ids, (msgspec.structs.replace(prompt.media[0], spans=spans),))
    with opened(family, "torch") as llm:
        try:
            message = llm.generate(wrong, greedy())[0].error
        except RequestError as error:
            assert error.param == "media"
            message = str(error)
        assert words in (message or "")
        assert len(llm.generate(prompt, greedy())[0].ids) == REPLY


def test_item_that_the_tower_cannot_read_fails_alone(family, replies):
    """Both images enter the same step."""
    parts = (3, ONE, 5)
    whole, broken = family.prompt(*parts), family.prompt(3, OTHER, 5)
    item = broken.media[0]
    renamed = msgspec.structs.replace(item, tensors={"other": item.tensors["pixel_values"]}, digest=b"other")
    with opened(family, "torch") as llm:
        failed, reply = llm.generate([MediaPrompt(broken.ids, (renamed,)), whole], greedy())
    assert "the tower reads pixel_values" in (failed.error or "")
    check(reply, replies[parts])
