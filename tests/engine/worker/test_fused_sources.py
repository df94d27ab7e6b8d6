"""The worker on models with an encoder in front, by fused kernels: the tokens of transformers, steps of padded sizes, the
same numbers in any batch; in Triton's interpreter, and on a GPU captured too."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine.api.config import EngineConfig, graph_ladder
from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.worker.build import build_worker
from kernels.jit import interpreted
from tests.engine.worker.generating import BLOCK, GREEDY, VOCAB, Requests, silent

ON_GPU = torch.cuda.is_available()
in_interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 128,
}
# Norms behind each sum and learned positions; norms in front of bodies, one at the end, and sines.
CONFIGS = {"bart": transformers.BartConfig, "m2m100": transformers.M2M100Config}
START = 2  # transformers has it in front of every reply
LENGTHS, SOURCES = [45, 10, 21], [40, 9, 1]  # replies that begin with five tokens, one, and many


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="no CUDA device")(test))


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    config = CONFIGS[request.param](**SIZES, scale_embedding=request.param == "m2m100")
    torch.manual_seed(3)
    made = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter if parameter.ndim == 1 else 0))
        made.get_input_embeddings().weight.mul_(5.0)  # so that a token changes what follows it
    made.generation_config = transformers.GenerationConfig(decoder_start_token_id=START, pad_token_id=1)
    return made


@pytest.fixture(scope="module")
def config(model: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("sources") / "model"
    model.save_pretrained(path)
    return EngineConfig(
        model=str(path),
        device="cuda" if ON_GPU else "cpu",
        kv_bytes=1 << 24,
        max_context=256,
        block_tokens=BLOCK,
        max_running=32,
        max_step_tokens=256,
        kernels="triton",
    )


def started(config: EngineConfig, **changed: Any) -> Any:
    return build_worker(msgspec.structs.replace(config, **changed), silent)


def replies(worker: Any, lengths: list[int], sources: list[int], sampling: Sampling = GREEDY) -> Requests:
    requests = Requests(worker, lengths, sampling, sources)
    for ids, source in zip(requests.ids, sources, strict=True):
        ids[source] = START
    return requests


def wanted(model: Any, ids: list[int], source: int, count: int) -> list[int]:
    made = model.generate(
        torch.tensor([ids[:source]]),
        attention_mask=torch.ones(1, source, dtype=torch.long),
        decoder_input_ids=torch.tensor([ids[source:]]),
        max_new_tokens=count,
        do_sample=False,
    )
    return made[0, len(ids) - source :].tolist()


def check_tokens(worker: Any, model: Any, steps: int) -> None:
    requests = replies(worker, LENGTHS, SOURCES)
    found = requests.generate(steps)
    worker.close()
    for ids, source, tokens in zip(requests.ids, SOURCES, found, strict=True):
        assert tokens == wanted(model, ids, source, steps + 1)


@in_interpreter
@pytest.mark.parametrize("invariant", [True, False])
def test_tokens_are_those_of_transformers_in_steps_of_padded_sizes(config, model, invariant):
    """Three requests in a step of four rows. A library multiplies where sums may depend on the batch."""
    check_tokens(started(config, graph_sizes=(1, 4), invariant=invariant), model, 4)
