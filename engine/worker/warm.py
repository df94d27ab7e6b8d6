"""Warm-up steps of a worker, so that no request waits for initialisation or compilation on first use.

They write to the null block and leave the table unchanged.
"""

from collections.abc import Iterator
from itertools import product

import msgspec

from engine.api.config import EngineConfig
from engine.api.messages import Pooling, PoolingTask, Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.formats.load_time import load_formats
from engine.formats.native import E4M3, GgmlBlocks, Groups
from engine.kv.layout import NULL_BLOCK, Layout, blocks_of
from engine.models.checkpoint import Checkpoint
from engine.models.parts import Model, has_experts
from kernels.integer_matmul import MOST_COLUMNS
from kernels.product_tiles import LARGE_ROWS

_PLAIN = (Sampling(temperature=0.0), Sampling())
MOST_SIZED = max(MOST_COLUMNS, LARGE_ROWS)  # rows from which the kernels of products do not change
# Other tasks launch the same kernels as one of these.
_POOLED: tuple[PoolingTask, ...] = ("token_embed", "embed")


def warm(checkpoint: Checkpoint, layout: Layout, config: EngineConfig, *, compiling: bool) -> Iterator[StepPlan]:
    """Yield the warm-up steps for this model. compiling: kernels are compiled on first use."""
    model = checkpoint.model
    steps = warm_steps if model.pooler is None else warm_prompts
    return steps(layout, model, config, compiling=compiling, by_size=_by_size(checkpoint, config))


def _by_size(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Return whether the kernels of products depend on the number of rows: those of packed integers, blocks,
    fp8 and batch-invariant products."""
    formats = () if checkpoint.quantization is None else checkpoint.quantization.formats.values()
    integers = load_formats("compiled")
    at_load = config.quantization.weights in integers or config.quantization.head in integers
    own = at_load or config.hardware.batch_invariant or config.quantization.weights == "fp8"
    return own or any(isinstance(one.on("triton"), Groups | E4M3 | GgmlBlocks) for one in formats)


def warm_steps(
    layout: Layout, model: Model, config: EngineConfig, *, compiling: bool, by_size: bool = False
) -> Iterator[StepPlan]:
    """Yield a greedy and a random step of one token. If kernels are compiled on first use, also a long step, a mixed
    one,
    and one for each stage of sampling.

    For a model with experts or LoRA adapters, also a step for every power of two of tokens, and for the maximum: the
    tile size depends on the number of tokens, and each of its ranges contains one of these (kernels/experts). by_size:
    products depend on the number of rows in the same way (kernels/integer_matmul.py), and so does the head's on that of
    requests."""
    vocab, slots = model.embed.vocab, config.scheduling.slots
    samplings = [*_PLAIN, *(_stages(vocab) if compiling else ())]
    source = model.max_encoder_input
    # One encoder token and one decoder token; an encoder of audio reads a whole window.
    least = 1 if not source else source + 1 if model.audio is not None else 2
    for step, sampling in enumerate(samplings):
        yield _step(step, layout, sampling, (least,), source)
    if compiling:
        several = slots > 1
        longest = min(config.scheduling.max_step_tokens, config.model.max_context) - 1
        if (by_size or _has_tiles(model, config)) and longest > least:
            for tokens in _doubled(min(config.scheduling.max_step_tokens, slots * longest)):
                if tokens > least:
                    yield _step(0, layout, Sampling(), _prompts(tokens, longest), source)
        if by_size:
            for requests in _doubled(min(slots, config.scheduling.max_step_tokens // least, MOST_SIZED + 1)):
                yield _step(0, layout, Sampling(), (least,) * requests, source)
        if longest > least:
            yield _step(0, layout, Sampling(), (longest,), source)
        if several and longest > least + 1:
            yield _step(0, layout, Sampling(), (longest - least, least), source)
        if several:
            yield _step(0, layout, Sampling(top_p=0.9), (least, least), source)
        if source and longest > least:  # a reply may begin with several tokens, unlike in the steps above
            yield _step(0, layout, Sampling(), (least + 1,), 1)
    used = slots if compiling and (by_size or _has_tiles(model, config)) else min(slots, 2)
    yield StepPlan(0, (), tuple(range(used)), ())


def _has_tiles(model: Model, config: EngineConfig) -> bool:
    """Return whether kernels divide the tokens of a step into tiles."""
    return has_experts(model) or bool(config.adapters) or config.adapter_loading.max_active is not None


def _doubled(most: int) -> Iterator[int]:
    """Yield the powers of two from 2 up to `most`, then `most`."""
    yield from (1 << power for power in range(1, (most - 1).bit_length()))
    yield most


def _prompts(tokens: int, longest: int) -> tuple[int, ...]:
    """Divide this many tokens into prompts of at most `longest`."""
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + ((rest,) if rest else ())


def warm_prompts(
    layout: Layout, model: Model, config: EngineConfig, *, compiling: bool, by_size: bool = False
) -> Iterator[StepPlan]:
    """Yield the warm-up steps of a pooling model: a prompt of one token and, if kernels are compiled on first use, a
    long one, each with both kinds of tasks. For a model with experts, adapters or integers, every power of two of
    tokens, as in `warm_steps`."""
    longest = min(config.scheduling.max_step_tokens, config.model.max_context)
    several = (1, *_doubled(longest)) if by_size or _has_tiles(model, config) else (1, longest)
    counts = several if compiling else (1,)
    for step, (count, task) in enumerate(product(counts, _POOLED if compiling else _POOLED[:1])):
        plan = _step(step, layout, Sampling(), (count,))
        new = tuple(msgspec.structs.replace(one, pooling=Pooling(task)) for one in plan.new)
        rows = tuple(msgspec.structs.replace(row, sample=False) for row in plan.rows)
        yield msgspec.structs.replace(plan, new=new, rows=rows)
    yield StepPlan(0, (), (0,), ())


def _stages(vocab: int) -> Iterator[Sampling]:
    yield Sampling(top_p=0.9, top_k=20, min_p=0.01)
    yield Sampling(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)
    yield Sampling(logprobs=min(5, vocab))
    yield Sampling(logit_bias={0: 1.0}, allowed_token_ids=(0, 1))
    yield Sampling(bad_words=((0, 1),), min_tokens=1)


def _step(step: int, layout: Layout, sampling: Sampling, counts: tuple[int, ...], source: int = 0) -> StepPlan:
    """Return a step of new requests of these lengths in the first slots. Up to `source` tokens of each, but not the
    last
    token, are encoder input."""
    new = tuple(
        NewRow(slot, (0,) * count, count, sampling, (0,), count, source=min(source, count - 1))
        for slot, count in enumerate(counts)
    )
    rows = tuple(
        Row(slot, 0, count, True, tuple((NULL_BLOCK,) * blocks_of(count, layout.block_tokens) for _ in layout.groups))
        for slot, count in enumerate(counts)
    )
    return StepPlan(step, new, (), rows)
