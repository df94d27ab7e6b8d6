"""Products of routed experts' adapters with Triton kernels, compared with the product of each pair by itself."""

import pytest
import torch

from engine.layers.lora import AdapterRows, LoraLayer
from kernels.jit import interpreted
from kernels.lora_expand import spans_of

ADAPTERS, EXPERTS, RANK, TOP_K = 2, 3, 3, 2
PIECES = ((0, 5, 0), (5, 4, 1))


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("gathered", [True, False])
def test_pairs_get_the_product_of_their_adapter_and_expert(gathered: bool):
    """Rows of x for tokens and for pairs, with scales of the pairs. The first token has no adapter."""
    made = torch.Generator().manual_seed(0)
    a = torch.randn(ADAPTERS, EXPERTS, 7, 16, generator=made)
    b = torch.randn(ADAPTERS, EXPERTS, RANK, 9, generator=made)
    ranks = torch.full((ADAPTERS, EXPERTS, 2), RANK, dtype=torch.int32)
    ranks[1, 2, 0], b[1, 2, :, :5] = 0, 0.0
    layer = LoraLayer(a, b, ranks, PIECES, torch.tensor(spans_of(PIECES), dtype=torch.int32))
    adapters = torch.tensor([ADAPTERS, 0, 1, 1, 0], dtype=torch.int32)
    experts = torch.tensor([[0, 1], [2, 0], [2, 1], [0, 2], [1, 2]], dtype=torch.int32)
    scales = torch.rand(5, TOP_K, generator=made)
    x = torch.randn(5 if gathered else 5 * TOP_K, 7, generator=made)
    y = torch.randn(5 * TOP_K, 9, generator=made)
    right = y.clone()
    for pair in range(5 * TOP_K):
        token, expert = divmod(pair, TOP_K)[0], int(experts.flatten()[pair])
        row = x[token if gathered else pair] * scales.flatten()[pair]
        own = adapters[token : token + 1] if adapters[token] < ADAPTERS else torch.tensor([-1])
        right[pair] += layer.of_expert(expert).delta(row[None], own)[0]
    groups = (adapters[:, None] * EXPERTS + experts).clamp(max=ADAPTERS * EXPERTS)
    rows = AdapterRows.of(groups, ADAPTERS * EXPERTS)
    layer.add_routed(x, y, rows, TOP_K if gathered else 1, scales)
    torch.testing.assert_close(y, right, atol=1e-5, rtol=1e-5)
    assert torch.equal(y[:TOP_K], right[:TOP_K])
