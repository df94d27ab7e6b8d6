"""The worker on encoder-decoder models, by fused kernels: the tokens of transformers, steps of padded sizes,
the same numbers in any batch; in Triton's interpreter, and on a GPU captured too."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.config import EngineConfig, graph_ladder
from engine.api.errors import NOT_FINITE
from engine.api.messages import Sampling
from engine.arguments import engine_config
from engine.core.plan import NewRow, Row, StepPlan
from engine.layers.model import make_pages
from engine.worker.build import build_worker
from engine.worker.device_parts import largest_step
from engine.worker.precompile import parts_on
from kernels.fp8 import products_of
from kernels.jit import interpreted
from tests.engine.configs import with_arguments
from tests.engine.worker.generating import BLOCK, GREEDY, VOCAB, Requests, silent
from tests.tiers import NIGHTLY, thinned

ON_GPU = torch.cuda.is_available()
in_interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 128,
}
T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 80,
    "num_layers": 1,
    "num_heads": 3,
    "n_positions": 128,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 30,
    "feed_forward_proj": "gated-gelu",
}
# Norms behind each sum and learned positions; norms in front of bodies, one at the end, and sines; biases of distances.
CONFIGS = {
    "bart": transformers.BartConfig(**SIZES),
    "m2m100": transformers.M2M100Config(**SIZES, scale_embedding=True),
    "t5": transformers.T5Config(**T5_SIZES),
    "mbart": transformers.MBartConfig(**SIZES),
    "mt5": transformers.MT5Config(**T5_SIZES),
    "umt5": transformers.UMT5Config(**T5_SIZES),
    "pegasus": transformers.PegasusConfig(**SIZES, scale_embedding=True),
    "marian": transformers.MarianConfig(**SIZES, activation_function="swish", pad_token_id=1),
}
START = 2  # transformers has it in front of every reply
LENGTHS, SOURCES = [45, 10, 21], [40, 9, 1]  # replies that begin with five tokens, one, and many


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not ON_GPU, reason="no CUDA device")(test))


@pytest.fixture(scope="module", params=thinned(CONFIGS, ["bart"]))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    made = transformers.AutoModelForSeq2SeqLM.from_config(CONFIGS[request.param], dtype=torch.float32).eval()
    sines = {id(one.weight) for one in made.modules() if "Sinusoidal" in type(one).__name__ and hasattr(one, "weight")}
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if id(parameter) in sines:  # computed
                continue
            scale = 1.0 if "relative" in name else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
        made.get_input_embeddings().weight.mul_(5.0)  # large embeddings, so that each token affects the next ones
    made.generation_config = transformers.GenerationConfig(decoder_start_token_id=START, pad_token_id=1)
    return made


@pytest.fixture(scope="module")
def config(model: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("sources") / "model"
    model.save_pretrained(path)
    return engine_config(
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
    return build_worker(with_arguments(config, **changed), silent)


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
@pytest.mark.parametrize(
    ("model", "invariant"),
    [
        pytest.param("bart", True, marks=NIGHTLY),
        pytest.param("bart", False, marks=NIGHTLY),
        ("t5", True),
        *(pytest.param("m2m100", invariant, marks=NIGHTLY) for invariant in (True, False)),
        *(pytest.param(name, True, marks=NIGHTLY) for name in ("mbart", "mt5", "umt5", "pegasus", "marian")),
    ],
    indirect=["model"],
)
def test_tokens_are_those_of_transformers_in_steps_of_padded_sizes(config, model, invariant, shows):
    """Three requests in a step of four rows. A library multiplies where sums may depend on the batch."""
    check_tokens(started(config, graph_sizes=(1, 4), invariant=invariant), model, 4)
    shows(Path(config.model.path), "Triton interpreted")


@in_interpreter
@pytest.mark.parametrize("model", thinned(["bart", "t5", "m2m100"], ["t5"]), indirect=True)
def test_a_reply_that_begins_in_chunks_is_the_same(config, model):
    """A reply's own tokens come in several steps, the source in the first one."""
    worker = started(config, invariant=True)
    requests = replies(worker, [40], [20])
    ids = tuple(requests.ids[0])
    new = NewRow(0, ids, len(ids), GREEDY, (), len(ids), source=20)
    found = []
    for step, (first, count, blocks) in enumerate(((0, 22, (1, 2)), (22, 5, ()), (27, 13, (3,)))):
        row = Row(0, first, count, first + count == 40, (blocks,))
        found.append(worker.start(StepPlan(step + 1, () if first else (new,), (), (row,)), {}).result())
    at_once = requests.prefill().result()
    worker.close()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:20]]), decoder_input_ids=torch.tensor([ids[20:]])).logits[0, -1]
    token, logprob = int(logits.argmax()), float(logits.log_softmax(0).max())
    assert found[-1].sampled == at_once.sampled == (token,)
    assert at_once.logprobs[0][0].logprob == found[-1].logprobs[0][0].logprob == pytest.approx(logprob, abs=1e-4)


@in_interpreter
@pytest.mark.parametrize("model", ["bart", pytest.param("m2m100", marks=NIGHTLY)], indirect=True)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_source_that_is_not_finite_fails_its_own_request(config):
    worker = started(config, invariant=True)
    with torch.inference_mode():
        worker._runner._model.parts.weights.by_name["encoder tables"].position_rows[7] = torch.inf
    requests = replies(worker, [8, 9, 13], [7, 8, 10])
    result = requests.prefill().result()
    worker.close()
    assert result.failed == {1: NOT_FINITE, 2: NOT_FINITE}


@in_interpreter
def test_the_step_that_is_measured_may_have_more_tokens_than_there_are_positions(config, tmp_path):
    short = transformers.BartConfig(**{**SIZES, "max_position_embeddings": 30})
    transformers.AutoModelForSeq2SeqLM.from_config(short, dtype=torch.float32).save_pretrained(tmp_path)
    config = with_arguments(config, model=str(tmp_path), max_context=60)
    parts, _ = parts_on(torch.device("cpu"), config, products_of(None, invariant=True))
    pages = make_pages(parts.layout, 1, torch.float32, torch.device("cpu"))
    step = largest_step(parts, pages, 33, 16)
    assert len(step.ids) == len(step.encoder_inputs.ids) == 33
    for made in (parts.model.encode_inputs(step.encoder_inputs), parts.model.forward(step)):
        assert made.shape == (33, SIZES["d_model"])
    assert not pages.any(), "it writes nothing"


def scores(worker: Any, others: int, steps: int, source: int = 37) -> list[float]:
    """Return the logprobs of one request that runs with `others` other requests, each with its own encoder input."""
    requests = replies(
        worker, [source + 1] + [5 + 3 * other for other in range(others)], [source, *range(3, 3 + others)]
    )
    requests.ids[0] = [*range(10, 10 + source), START]
    handles = [requests.prefill(), *(requests.decode() for _ in range(steps))]
    return [handle.result().logprobs[0][0].logprob for handle in handles]


@in_interpreter
def test_an_invariant_reply_is_the_same_in_any_batch_bit_for_bit(config):
    worker = started(config, invariant=True, graph_sizes=(1, 2, 4))
    assert scores(worker, 0, 2) == scores(worker, 2, 2)
    worker.close()


@on_gpu
def test_on_a_gpu_tokens_are_those_of_transformers(config, model):
    check_tokens(started(config, invariant=True, graph_sizes=graph_ladder(32), graph_bytes=1 << 30), model, 20)


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_too_bit_for_bit(config, dtype):
    changed = {"dtype": dtype, "kv_dtype": dtype, "max_step_tokens": 4096, "graph_sizes": graph_ladder(32)}
    worker = started(config, invariant=True, graph_bytes=1 << 30, **changed)
    assert scores(worker, 0, 6) == scores(worker, 1, 6) == scores(worker, 7, 6) == scores(worker, 31, 6)
    worker.close()


@on_gpu
@pytest.mark.parametrize("sources", [[3], [3, 90, 20], [5] * 9])
def test_a_captured_step_is_the_step_itself(config, sources):
    """A captured step gives eager results, also after replays of other sizes with other encoder inputs."""
    found = []
    for sizes in (graph_ladder(32), ()):
        worker = started(config, graph_sizes=sizes, graph_bytes=1 << 30, invariant=True)
        replies(worker, [12] * 5, [11] * 5).generate(2)
        requests = replies(worker, [source + 1 for source in sources], sources, Sampling(seed=5, logprobs=0))
        found.append(requests.generate(12))
        worker.close()
    assert found[0] == found[1]


@on_gpu
@pytest.mark.parametrize("invariant", [True, False])
def test_no_step_waits_for_the_device_or_compiles(config, invariant):
    """Nor one in which sources enter."""
    import triton

    worker = started(config, dtype="bfloat16", kv_dtype="bfloat16", invariant=invariant, graph_sizes=graph_ladder(32))
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    try:
        for sources in ([9] * 7, [1], [2, 30], [90], [4] * 31):
            replies(worker, [source + 3 for source in sources], sources).prefill().result()
            requests = replies(worker, [source + 1 for source in sources], sources)
            torch.cuda.synchronize()
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "error").result()
            handles = [requests.prefill(), *(requests.decode() for _ in range(4))]
            for handle in handles:
                handle.started.result()
            worker._thread.submit(torch.cuda.set_sync_debug_mode, "default").result()
            for handle in handles:
                handle.result()
    finally:
        triton.knobs.compilation.listener = None
        worker.close()
    assert not compiled


@on_gpu
def test_a_measured_pool_fits_beside_what_was_measured(config):
    free, _ = torch.cuda.mem_get_info()
    sized = {"kv_measured": True, "kv_bytes": free, "weight_bytes": 1 << 28, "workspace_bytes": 1 << 29}
    worker = started(config, max_step_tokens=4096, **sized)
    assert 0.5 * free < worker.kv_bytes < free
    replies(worker, [129] * 31, [128] * 31).generate(3)
    worker.close()
