"""Requests with the content of an isolated request are refused."""

import pytest

from appliance.server.routing.refused import MOST, REFUSED_S, RefusedContents, content_hash
from engine.api.media import MediaItem
from engine.api.messages import Sampling, Submit

SUBMIT = Submit("x", (1, 2, 3), Sampling(seed=5), 9)
SAME = Submit("y", (1, 2, 3), Sampling(seed=6), 9, priority=3, emitted=(4,), deadline=7.0)
OTHERS = [
    Submit("x", (1, 2), Sampling(seed=5), 9),
    Submit("x", (1, 2, 3), Sampling(seed=5, top_k=3), 9),
    Submit("x", (1, 2, 3), Sampling(seed=5), 8),
    Submit("x", (1, 2, 3), Sampling(seed=5), 9, media=(MediaItem("image", b"digest", ((0, 1),), {}),)),
]


def test_content_is_the_prompt_and_the_parameters_whatever_the_id_and_seed():
    assert content_hash(SUBMIT) == content_hash(SAME)
    assert content_hash(SUBMIT) not in {content_hash(other) for other in OTHERS}


def test_content_is_refused_for_a_while():
    refused = RefusedContents()
    assert refused.seconds_left(SUBMIT, 100.0) == 0.0
    refused.add(SUBMIT, 100.0)
    assert refused.seconds_left(SAME, 160.0) == pytest.approx(REFUSED_S - 60.0)
    assert [refused.seconds_left(other, 100.0) for other in OTHERS] == [0.0] * len(OTHERS)
    assert refused.seconds_left(SAME, 100.0 + REFUSED_S) == 0.0


def test_the_oldest_contents_are_forgotten_first():
    refused = RefusedContents()
    for number in range(MOST + 1):
        refused.add(Submit("x", (number,), Sampling(), 1), 0.0)
    left = [refused.seconds_left(Submit("x", (number,), Sampling(), 1), 0.0) for number in (0, 1, MOST)]
    assert left == [0.0, REFUSED_S, REFUSED_S]
