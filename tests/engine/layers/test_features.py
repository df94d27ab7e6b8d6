"""Tests that the models which `make test` runs in Triton's interpreter have every part of all test models."""

import pytest
import transformers

from engine.models.parts import Attention, Rope
from tests.engine.layers import conftest, pooled_cases
from tests.engine.layers.features import declare, features

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' configurations


def decoder(name):
    kind, more = conftest.CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**conftest.SIZES, **conftest.spelled(more)})
    return declare(f"{kind.removesuffix('Text')}ForCausalLM", config)


def pooled(name):
    kind, more = pooled_cases.CASES[name]
    config = pooled_cases.reference(kind).config_class(**{**pooled_cases.SIZES, **more})
    config.update(pooled_cases.own_settings(kind))
    return declare(kind, config)


def union(made, names):
    return set().union(*(features(made(name)) for name in names))


@pytest.mark.parametrize(("made", "cases"), [(decoder, conftest), (pooled, pooled_cases)], ids=["decoders", "pooled"])
def test_chosen_cases_have_every_part_of_all_cases(made, cases):
    assert union(made, cases.CASES) - union(made, cases.EACH_PART) == set()


@pytest.mark.parametrize(("made", "cases"), [(decoder, conftest), (pooled, pooled_cases)], ids=["decoders", "pooled"])
def test_no_chosen_case_is_superfluous(made, cases):
    for name in cases.EACH_PART:
        others = [other for other in cases.EACH_PART if other != name]
        assert union(made, cases.EACH_PART) != union(made, others), name


def test_features_are_types_switches_and_numbers_that_are_not_defaults():
    rope = Rope(dim=4, theta=1e4, interleaved=True)
    found = set(features(Attention(hidden=8, heads=4, kv_heads=2, head_dim=8, rope=rope, window=3)))
    assert {"Attention", "Rope", "Attention.rope: Rope", "Rope.interleaved = True", "Attention.causal = True"} <= found
    assert {"Attention.window", "no Attention.softcap", "shared KV heads", "partial rotation"} <= found
    assert not any("hidden" in one or "name" in one or "sources" in one for one in found)
