"""Tiny random checkpoints saved by transformers, and a driver that runs our model over them step by step."""

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from engine.api.config import EmbeddingBits, HeadBits, WeightBits
from engine.distributed.shared import Shared
from engine.distributed.world import SINGLE, World
from engine.kv.layout import layout, page_sizes
from engine.layers.fused.model import FusedModel
from engine.layers.fused.step import DeviceStep
from engine.layers.model import TextModel, make_pages
from engine.layers.states import layer_states, make_states
from engine.models.checkpoint import read_checkpoint
from engine.models.kv_scales import KVScales
from engine.weights.packed import PackedFile
from engine.worker.batch import build_batch
from engine.worker.build import DTYPES
from kernels.cpu.library import best, usable
from kernels.cpu.program import Team
from kernels.cpu.shm_collective import CollectiveAborted, ShmCollective
from kernels.fp8 import Fp8Products
from kernels.step_inputs import STEP_INPUTS
from tests.tiers import NIGHTLY, thinned

transformers_logging.disable_progress_bar()

VOCAB = 97
SLOTS = 64  # state slots: most requests of a driver
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ODD = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.5, 5.0, 9.0],
}


QWEN3_NEXT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 30,
    "mlp_only_layers": [2],
}

# transformers' own loops, which know no sizes that they cannot multiply; before 5 there was no other for experts.
EAGER = {"attn_implementation": "eager"}
if int(transformers.__version__.partition(".")[0]) >= 5:
    EAGER["experts_implementation"] = "eager"


def plain(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


# name -> configuration class, settings in addition to SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-odd-heads-biases": ("Llama", {**ODD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-own-head-size": ("Llama", {"head_dim": 24, "num_key_value_heads": 6}),
    "llama-linear": ("Llama", {"rope_parameters": plain("linear", factor=2.5)}),
    "llama-dynamic": ("Llama", {"max_position_embeddings": 16, "rope_parameters": plain("dynamic", factor=2.0)}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"head_dim": 16, "rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7,
                                                        "truncate": False}}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 8.0}}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-windows": ("Qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4,
                                "max_window_layers": 2}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-long": ("Phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "phi3-partial": ("Phi3", {"rope_parameters": plain("default", partial_rotary_factor=0.75)}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "layer_types": KINDS}),
    "gemma3-scaled": ("Gemma3Text", {"head_dim": 16, "sliding_window": 6, "layer_types": KINDS, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.3, "embedding_multiplier": 3.0,
                            "logits_scaling": 2.0, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "starcoder2-no-bias": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
                               "moe_intermediate_size": 22, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3-moe-some-layers": ("Qwen3Moe", {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 3,
                                           "moe_intermediate_size": 34, "decoder_sparse_step": 2,
                                           "attention_bias": True, "use_sliding_window": True, "sliding_window": 6}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 18,
                               "shared_expert_intermediate_size": 30}),
    "qwen2-moe-windows": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 20,
                                       "shared_expert_intermediate_size": 26, "norm_topk_prob": True,
                                       "use_sliding_window": True, "sliding_window": 8, "qkv_bias": False}),
    "olmoe": ("Olmoe", {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 12}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                             "topk_group": 2, "moe_intermediate_size": 18, "first_k_dense_replace": 1,
                             "routed_scaling_factor": 1.5, "rope_parameters": plain("default")}),
    "qwen3-next": ("Qwen3Next", {"num_hidden_layers": 3, "head_dim": 16, **QWEN3_NEXT}),
}  # fmt: skip
# Together they have every part of all cases (test_features.py).
EACH_PART = (
    *("llama-odd-heads-biases", "llama-own-head-size", "llama-linear", "llama-dynamic", "llama-llama3"),
    *("llama-yarn-mscale", "llama-yarn-attention", "phi3-long", "gemma2", "olmo2", "granite", "starcoder2"),
    *("cohere-qk-norm", "qwen3-moe", "qwen2-moe", "glm4-moe", "qwen3-next"),
)


def spelled(more: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for the installed transformers: releases before 5 have no `rope_parameters`."""
    rope = more.get("rope_parameters")
    if rope is None or int(transformers.__version__.partition(".")[0]) >= 5:
        return more
    words = {key: value for key, value in more.items() if key != "rope_parameters"}
    if "full_attention" in rope:
        words["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = dict(rope)
    words["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        words["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if scaling["rope_type"] == "longrope":
        scaling["type"] = scaling.pop("rope_type")  # Phi3 checks for exactly three keys
    if scaling != {"rope_type": "default"}:
        words["rope_scaling"] = scaling
    return words


def random_model(name: str) -> Any:
    kind, more = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **spelled(more)})
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Convolutions with small weights have small outputs, whose rounding norms of queries and keys would raise.
            scale = 0.5 if "conv" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
    return model


@dataclass
class Saved:
    """A checkpoint directory and the logits of transformers for it."""

    path: Path
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    read: dict[Any, Any] = field(default_factory=dict)  # transformers' model, by the times of its files

    def transformers(self) -> Any:
        """A fresh model: dynamic rope keeps state between calls. Copying takes a tenth of the time of reading."""
        times = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in self.path.iterdir()))
        if times not in self.read:
            kind = transformers.AutoModelForCausalLM
            self.read = {times: kind.from_pretrained(self.path, **EAGER, dtype=torch.float32).eval()}
        return copy.deepcopy(self.read[times])

    def logits(self, ids: list[int]) -> Tensor:
        """transformers' logits for each position of one sequence."""
        key = tuple(ids)
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.transformers()(torch.tensor([ids])).logits[0]
        return self.known[key]

    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def rewrite(self, config: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def case_names() -> list[str]:
    return list(CASES)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """The saved checkpoint of a case, made once a session. Do not change it; see `own_checkpoint`."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            path = tmp_path_factory.mktemp("checkpoint") / name
            random_model(name).save_pretrained(path, max_shard_size="30KB")
            made[name] = Saved(path)
        return made[name]

    return get


@pytest.fixture(scope="session")
def bf16_checkpoint(
    checkpoint: Callable[[str], Saved], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Saved]:
    """The checkpoint of a case with its weights rounded to bf16, as most are published."""
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            path = tmp_path_factory.mktemp("bf16") / name
            checkpoint(name).transformers().to(torch.bfloat16).save_pretrained(path)
            made[name] = Saved(path)
        return made[name]

    return get


@pytest.fixture
def own_checkpoint(tmp_path: Path) -> Callable[[str], Saved]:
    """A checkpoint that the test may change."""

    def get(name: str) -> Saved:
        random_model(name).save_pretrained(tmp_path / name)
        return Saved(tmp_path / name)

    return get


@dataclass
class Request:
    """A sequence whose tokens are all known. `rope_length`: length of its prompt."""

    ids: list[int]
    rope_length: int
    tables: list[list[int]]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def result(self) -> Tensor:
        return torch.cat(self.logits)


class Driver:
    """Runs requests through a model in given steps, with shuffled block ids and poisoned unused pages."""

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 4,
        blocks: int = 160,
        seed: int = 0,
        world: World = SINGLE,
        kernels: str = "torch",
        threads: int = 2,
        page_dtype: torch.dtype = torch.float32,
        bits: WeightBits = "stored",
        known: PackedFile | None = None,
        scales: KVScales | None = None,
        fp8: Fp8Products | None = None,
        group: int = 0,
        head: HeadBits = "auto",
        embedding: EmbeddingBits = "stored",
    ):
        """kernels: torch, triton (in its interpreter) or a compiled variant. fp8: how triton multiplies by fp8."""
        self.checkpoint = read_checkpoint(path)
        self.layout = layout(
            self.checkpoint.model,
            block_tokens=block_tokens,
            **page_sizes(next(name for name, dtype in DTYPES.items() if dtype == page_dtype)),
            ranks=world.size,
        )
        fused = kernels == "triton"
        team = None if fused or kernels == "torch" else Team(kernels, threads)
        self.model = TextModel(
            self.checkpoint.model,
            self.layout,
            world,
            torch.float32,
            torch.device("cpu"),
            team,
            bits,
            invariant=fused,
            stacked=fused,
            fp8=(fp8 or Fp8Products()) if fused else None,
            group=group,
            head=head,
            embedding=embedding,
        )
        self.model.load(self.checkpoint, known=known)
        self.pages = make_pages(self.layout, blocks, page_dtype, torch.device("cpu"))
        # Finite values in unwritten page entries must not affect results.
        self.pages.fill_(3.0)
        self.states = layer_states(self.model.states, make_states(self.model.states, SLOTS, torch.device("cpu")))
        for state in (one for layer in self.states for one in layer):
            state.fill_(float("nan"))  # a sequence begins with zeros, whatever is in its slot
        self.fused = FusedModel(self.model, scales) if fused else None
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, blocks)))
        self.requests: list[Request] = []

    def add(self, ids: list[int], rope_length: int | None = None) -> Request:
        need = -(-len(ids) // self.layout.block_tokens)
        tables = [[int(self.free.pop()) for _ in range(need)] for _ in self.layout.groups]
        request = Request(ids, len(ids) if rope_length is None else rope_length, tables)
        self.requests.append(request)
        return request

    def step(self, rows: list[tuple[Request, int]]) -> None:
        """One step: each of these requests gets its next positions, this many. Positions that a window no longer needs
        lose their block first, as the scheduler does it."""
        slots = np.array([self.requests.index(request) for request, _ in rows])
        width = max(len(request.ids) for request in self.requests)
        tokens = np.zeros((len(self.requests), width), np.int32)
        tables = [
            np.zeros((len(self.requests), -(-width // self.layout.block_tokens)), np.int32) for _ in self.layout.groups
        ]
        for number, request in enumerate(self.requests):
            tokens[number, : len(request.ids)] = request.ids
            for table, blocks, group in zip(tables, request.tables, self.layout.groups, strict=True):
                released = group.needed_from(request.done) // self.layout.block_tokens
                table[number, : len(blocks)] = [0] * released + blocks[released:]
        if self.fused is not None:
            self._take(rows, self._fused_logits(self.fused, slots, rows, tokens, tables))
            return
        batch = build_batch(
            slots,
            np.array([request.done for request, _ in rows]),
            np.array([count for _, count in rows]),
            tokens=tokens,
            rope_lengths=np.array([request.rope_length for request in self.requests]),
            tables=tables,
            block_tokens=self.layout.block_tokens,
        )
        # valid until the next step
        self._take(rows, self.model.logits(self.model.forward(batch, self.pages, self.states)).clone())

    def _take(self, rows: list[tuple[Request, int]], logits: Tensor) -> None:
        for (request, count), piece in zip(rows, logits.split([count for _, count in rows]), strict=True):
            request.logits.append(piece)
            request.done += count

    def _fused_logits(
        self,
        model: FusedModel,
        slots: np.ndarray,
        rows: list[tuple[Request, int]],
        tokens: np.ndarray,
        tables: list[np.ndarray],
    ) -> Tensor:
        """Run a step with a padding row at the end, as in a captured step."""

        def integers(values: Any) -> Tensor:
            return torch.tensor(np.array(values), dtype=torch.int32)

        counts = [count for _, count in rows]
        slot, query_start = integers([*slots, 0]), integers(np.cumsum([0, *counts, 0]))
        table = torch.stack([integers(one) for one in tables])
        ids, positions, token_rope_lengths, lengths, slot_mapping = STEP_INPUTS(
            integers(tokens),
            integers([request.rope_length for request in self.requests]),
            table,
            slot,
            integers([*(request.done for request, _ in rows), 0]),
            query_start,
            sum(counts) + 1,
            self.layout.block_tokens,
        )
        step = DeviceStep(
            ids=ids,
            positions=positions,
            rope_lengths=token_rope_lengths,
            slot_mapping=slot_mapping,
            slot=slot,
            query_start=query_start,
            lengths=lengths,
            tables=table,
            pages=self.pages,
            first=integers([*(request.done for request, _ in rows), 0]),
            states=self.states,
            singles=1 in counts,
            spans=max(counts) > 1,
        )
        with torch.inference_mode():
            return model.logits(model.forward(step)[:-1]).clone()

    def run(self, ids: list[int], chunk: int, rope_length: int | None = None) -> Tensor:
        """Logits of every position, computed in chunks of this size."""
        request = self.add(ids, rope_length)
        while request.done < len(ids):
            self.step([(request, min(chunk, len(ids) - request.done))])
        return request.result


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver


@pytest.fixture
def ids() -> Callable[[int, int], list[int]]:
    def make(length: int, seed: int = 0) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


class Threads:
    """A World whose ranks are threads of this process that meet at a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor | None] = [None] * size

    def rank(self, rank: int) -> "ThreadWorld":
        return ThreadWorld(self, rank, len(self.slots))


@dataclass
class ThreadWorld:
    threads: Threads
    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        self.threads.slots[self.rank] = x.clone()
        self.threads.barrier.wait(100)
        result = torch.stack([slot for slot in self.threads.slots if slot is not None])
        self.threads.barrier.wait(100)
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)


ROOM = 1 << 16  # floats that a rank can bring to a meeting at once


def shared_worlds(size: int, variant: str) -> list[Shared]:
    """Return worlds for ranks in threads that use shared memory like processes, each with its own mapping."""
    file = os.memfd_create("ranks")
    try:
        return [Shared(ShmCollective(variant, file, rank, size, ROOM)) for rank in range(size)]
    finally:
        os.close(file)


@pytest.fixture
def on_ranks() -> Iterator[Callable[..., list[Tensor]]]:
    """Runs a function once for each of `size` ranks, in threads, and gives back all results. kernels: torch, or
    compiled ones, whose ranks share memory."""

    def run(size: int, work: Callable[[World], Tensor], kernels: str = "torch") -> list[Tensor]:
        threads, results, errors = Threads(size), [torch.empty(0)] * size, []
        shared = [] if kernels == "torch" else shared_worlds(size, kernels)

        def one(rank: int) -> None:
            try:
                results[rank] = work(shared[rank] if shared else threads.rank(rank))
            except Exception as error:
                errors.append(error)
                threads.barrier.abort()
                for world in shared:
                    world.collective.abort()

        workers = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError | CollectiveAborted)]
        if real:
            raise real[0]
        assert not errors
        return results

    yield run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by their arguments.

    case       every case
    part_case  every case; `make test` runs those of EACH_PART
    kernels    torch and each compiled variant
    compiled   each compiled variant
    """
    names = metafunc.fixturenames
    if "case" in names and "kernels" in names and metafunc.definition.get_closest_marker("sampled") is None:
        metafunc.parametrize(("case", "kernels"), cases_and_kernels(torch_first="chunk" not in names))
        return
    if "case" in names:
        metafunc.parametrize("case", list(CASES))
    if "part_case" in names:
        metafunc.parametrize("part_case", thinned(CASES, EACH_PART))
    if "kernels" in names:
        metafunc.parametrize("kernels", ["torch", *usable()])
    if "compiled" in names:
        metafunc.parametrize("compiled", usable())


def cases_and_kernels(*, torch_first: bool) -> list[Any]:
    """Return every case with torch and with each compiled variant. `make test` alternates between torch and the best
    variant; a test of prompts in chunks begins with the other one than a test of whole prompts."""
    pair = ["torch", best()] if torch_first else [best(), "torch"]
    return [
        pytest.param(case, kernels, marks=NIGHTLY if kernels in pair and kernels != pair[number % 2] else ())
        for number, case in enumerate(CASES)
        for kernels in ("torch", *usable())
    ]
