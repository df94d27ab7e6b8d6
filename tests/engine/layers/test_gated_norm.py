"""Gated norms over several ranks equal the norm of one rank with all columns."""

import pytest
import torch

from engine.layers.norm import gated_norm_of_ranks
from engine.lowering.operations import (
    Columns,
    GatedNorm,
    RecurrentParameter,
    Value,
)
from engine.models.parts import Parameter, Rows
from kernels.recurrent.gated_norm import GATED_NORM


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("gate_first", [True, False])
def test_mean_is_over_the_ranks_that_share_a_group(ranks, groups, gate_first, on_ranks):
    own = 5  # columns of a rank
    x, gate = (torch.randn(7, ranks * own, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    weight = torch.rand(ranks * own, generator=torch.Generator().manual_seed(3)) + 0.5
    value = Value(name="mixed", width=own)
    parameter = RecurrentParameter(parameter=Parameter(rows=(Rows(source="norm.weight", units=ranks * own),)), path="")
    op = GatedNorm(
        x=value,
        gate=Columns(value=Value(name="z", width=own), first=0, width=own),
        y=value,
        weight=parameter,
        eps=1e-5,
        groups=1,
        gate_first=gate_first,
        all_groups=groups,
    )

    def work(world):
        columns = slice(world.rank * own, (world.rank + 1) * own)
        return gated_norm_of_ranks(op, x[:, columns], gate[:, columns], weight[columns], world)

    want = GATED_NORM.reference(x, gate, weight, 1e-5, gate_first, "silu", groups)
    torch.testing.assert_close(torch.cat(on_ranks(ranks, work), 1), want, atol=1e-5, rtol=1e-5)
