"""Angles of tokens with several positions, held against transformers' models that read images."""

from typing import Any

import pytest
import torch
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from kernels.jit import installed
from kernels.rope import ROPE_ANGLES

pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SECTIONS = [10, 6, 4]  # pairs that turn by time, height and width
HALF, THETA = sum(SECTIONS), 5000.0
IN_BLOCKS = [0] * 10 + [1] * 6 + [2] * 4
IN_TURNS = [0, 1, 2] * 4 + [0, 1, 0] * 2 + [0, 0]


def settings(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTIONS, **more}
    return {"hidden_size": 4 * HALF, "num_attention_heads": 2, "head_dim": 2 * HALF, "rope_parameters": rope}


THEIRS = {
    "Qwen2-VL": (lambda: Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**settings())), IN_BLOCKS),
    "Qwen3-VL": (lambda: Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**settings(mrope_interleaved=True))), IN_TURNS),
}
FREQUENCIES = THETA ** -(torch.arange(HALF) / HALF)


def ours(positions: torch.Tensor, axes: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    which = None if axes is None else torch.tensor(axes, dtype=torch.int32, device=DEVICE)
    given = (positions.int().to(DEVICE), FREQUENCIES.to(DEVICE), 1.0, which)
    found = ROPE_ANGLES(*given)
    for one, two in zip(found, ROPE_ANGLES.reference(*given), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    return found[0].cpu(), found[1].cpu()


@pytest.mark.parametrize("name", THEIRS)
def test_each_pair_is_rotated_by_its_own_position(name: str) -> None:
    made, axes = THEIRS[name]
    positions = torch.randint(0, 900, (3, 1, 33), generator=torch.Generator().manual_seed(1))
    wanted = made()(torch.zeros(1), positions)
    for one, two in zip(ours(positions[:, 0].T, axes), wanted, strict=True):
        torch.testing.assert_close(one, two.reshape(33, 2 * HALF)[:, :HALF], rtol=0, atol=1e-4)


@pytest.mark.parametrize("axes", [IN_BLOCKS, IN_TURNS])
def test_text_angles_equal_those_of_one_position(axes: list[int]) -> None:
    positions = torch.tensor([0, 1, 17, 40_000])
    for one, two in zip(ours(positions[:, None].expand(-1, 3), axes), ours(positions, None), strict=True):
        assert torch.equal(one, two)
