"""Tests of the sizes of a lowered program."""

import pytest

from engine.lowering.lower import lower
from engine.lowering.measures import widest_sum
from engine.models.families import declaration

MAMBA = {"architectures": ["MambaForCausalLM"], "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(("state", "width"), [(4, 32), (40, 82)])
def test_widest_sum_of_ranks_can_exceed_the_hidden_states(state: int, width: int) -> None:
    model = declaration("MambaForCausalLM")({**MAMBA, "state_size": state})
    assert widest_sum(lower(model, 2)) == width
    assert widest_sum(lower(model)) == 0
