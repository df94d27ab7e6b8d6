"""The step whose memory is measured before the pool is made, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from engine.api.config import EngineConfig
from engine.arguments import engine_config
from engine.layers.model import make_pages
from engine.worker import device_parts
from engine.worker.device_parts import largest_step, measured_pool
from engine.worker.precompile import parts_on
from kernels.fp8 import products_of
from kernels.jit import interpreted

VOCAB = 64
in_interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")


@pytest.fixture
def config(tmp_path) -> EngineConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.LlamaConfig(vocab_size=VOCAB, architectures=["LlamaForCausalLM"], **sizes, **heads).save_pretrained(
        tmp_path
    )
    return engine_config(
        model=str(tmp_path), kv_bytes=1 << 20, max_context=40, max_step_tokens=131, max_running=8, block_tokens=16,
        kernels="triton", invariant=True, load="random",
    )  # fmt: skip


@in_interpreter
def test_a_step_may_have_more_tokens_than_a_prompt_and_all_are_measured(config):
    parts, _ = parts_on(torch.device("cpu"), config, products_of(None, invariant=True))
    pages = make_pages(parts.layout, 1, torch.float32, torch.device("cpu"))
    step = largest_step(parts, pages, 131, 40)
    assert step.query_start.tolist() == [0, 40, 80, 120, 131] and step.lengths.tolist() == [40, 40, 40, 11]
    assert int(step.positions.max()) == 39 and step.spans and not step.singles
    hidden = parts.model.forward(step)
    assert hidden.shape == (131, 32) and hidden.isfinite().all()
    assert not pages.any(), "it writes nothing"


@pytest.mark.parametrize("tokens", [1, 40, 41])
def test_a_last_prompt_of_one_token_is_launched_as_such(config, tokens):
    parts, _ = parts_on(torch.device("cpu"), config, products_of(None, invariant=True))
    step = largest_step(parts, make_pages(parts.layout, 1, torch.float32, torch.device("cpu")), tokens, 40)
    assert (step.spans, step.singles) == (tokens > 1, tokens % 40 == 1)
    assert step.tables.shape == (1, 1, 3), "an indexer has memory for all positions of a table"


def test_the_pool_makes_room_for_the_largest_step_that_there_can_be(config, monkeypatch):
    asked = []

    def measured(parts, tokens, longest, dtype, extra_rows):
        asked.append((tokens, longest, extra_rows))
        return 1000

    monkeypatch.setattr(device_parts, "step_bytes", measured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    model = SimpleNamespace(device=torch.device("cpu"), weight_bytes=10, encoder=None, dtype=torch.float32)
    model.model = SimpleNamespace(media=None)
    parts = SimpleNamespace(table_bytes=5, layout=SimpleNamespace(block_bytes=7), states=SimpleNamespace(nbytes=3))
    assert measured_pool(config, model, parts) == (1 << 20) - 1000 - 18
    assert asked == [(131, 40, 0)]
