"""Models that pool against transformers in float32: the same checkpoint and tokens, everything within 1e-4.

Checkpoints are tiny, random, and saved by transformers.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from engine.api.messages import Pooling
from engine.distributed.world import SINGLE, World
from engine.kv.layout import layout
from engine.layers.model import TextModel, make_pages
from engine.layers.pooler import Gathered
from engine.models.checkpoint import read_checkpoint
from engine.models.families import POOLED
from engine.worker.batch import build_batch
from kernels.cpu.program import Team

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {**GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 24, "layer_types": KINDS}
LOCAL = {"local_attention": 6, "layer_types": [KINDS[2], KINDS[0], KINDS[0]]}
THREE = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
ONE = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}

# name: class of transformers, what its configuration has beside SIZES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-odd": ("BertModel", {"hidden_size": 40, "num_attention_heads": 5, "hidden_act": "gelu_new"}),
    "bert-classifier": ("BertForSequenceClassification", THREE),
    "bert-score": ("BertForSequenceClassification", ONE),
    "bert-tokens": ("BertForTokenClassification", THREE),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "roberta-classifier": ("RobertaForSequenceClassification", {**THREE, "pad_token_id": 1}),
    "roberta-tokens": ("RobertaForTokenClassification", {**THREE, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**ONE, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-tokens": ("XLMRobertaForTokenClassification", {**THREE, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", LOCAL),
    "modernbert-biases": ("ModernBertModel", {**LOCAL, "attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "modernbert-classifier": ("ModernBertForSequenceClassification", {**LOCAL, **THREE}),
    "modernbert-mean": ("ModernBertForSequenceClassification", {**LOCAL, **ONE, "classifier_pooling": "mean",
                                                                "classifier_bias": True, "norm_bias": True}),
    "modernbert-tokens": ("ModernBertForTokenClassification", {**LOCAL, **THREE}),
    "nomic": ("NomicBertModel", {}),
    "nomic-classifier": ("NomicBertForSequenceClassification", THREE),
    "nomic-tokens": ("NomicBertForTokenClassification", THREE),
    "gemma3-both-ways": ("Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True}),
    "gemma3": ("Gemma3TextModel", GEMMA),
    "gemma3-classifier": ("Gemma3TextForSequenceClassification", {**GEMMA, **THREE}),
    "gemma2": ("Gemma2Model", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma2-classifier": ("Gemma2ForSequenceClassification", {**GEMMA, **THREE}),
    "qwen3": ("Qwen3Model", GROUPED),
    "qwen3-score": ("Qwen3ForSequenceClassification", {**GROUPED, **ONE}),
    "qwen2": ("Qwen2Model", {"num_key_value_heads": 2}),
    "qwen2-classifier": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
    "llama": ("LlamaModel", {"num_key_value_heads": 2}),
    "llama-classifier": ("LlamaForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
    "mistral": ("MistralModel", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral-classifier": ("MistralForSequenceClassification", {"num_key_value_heads": 2, **THREE}),
}  # fmt: skip
WHOLE = [name for name, (kind, more) in CASES.items() if "ert" in kind or "use_bidirectional_attention" in more]


@dataclass(eq=False)
class Saved:
    path: Path
    kind: str

    @cache  # noqa: B019  # lives as long as the session
    def model(self) -> Any:
        kind = getattr(transformers, self.kind)
        return kind.from_pretrained(self.path, attn_implementation="eager", dtype=torch.float32).eval()

    def output(self, ids: list[int], segments: list[int] | None = None) -> Tensor:
        """Hidden states [tokens, hidden], or logits."""
        more = {} if segments is None else {"token_type_ids": torch.tensor([segments])}
        with torch.no_grad():
            made = self.model()(torch.tensor([ids]), **more)
        return (made.logits if hasattr(made, "logits") else made.last_hidden_state)[0]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    made: dict[str, Saved] = {}

    def get(name: str) -> Saved:
        if name not in made:
            kind, more = CASES[name]
            classed = getattr(transformers, kind)
            torch.manual_seed(len(name))
            config = classed.config_class(**{**SIZES, **more})
            model = classed(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
            path = tmp_path_factory.mktemp("pooled") / name
            model.save_pretrained(path)
            made[name] = Saved(path, kind)
        return made[name]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Runner:
    """Runs whole prompts through a model, and pools them."""

    path: Path
    kernels: str = "torch"
    world: World = SINGLE
    threads: int = 2
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = read_checkpoint(self.path, **self.settings)
        form = layout(self.checkpoint.model, block_tokens=16, element_bytes=4, ranks=self.world.size)
        self.form = form
        team = None if self.kernels == "torch" else Team(self.kernels, self.threads)
        self.model = TextModel(self.checkpoint.model, form, self.world, torch.float32, "cpu", team)
        self.model.load(self.checkpoint)
        self.pages = make_pages(form, 64, torch.float32, torch.device("cpu"))

    def hidden(self, prompts: list[list[int]], segments: list[list[int]] | None = None) -> list[Tensor]:
        """Of each prompt [tokens, hidden], all in one step."""
        count = np.array([len(ids) for ids in prompts])
        tokens = np.zeros((len(prompts), count.max()), np.int32)
        each = -(-int(count.max()) // 16)
        tables = [np.arange(1, 1 + len(prompts) * each).reshape(-1, each) for _ in self.form.groups]
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
        batch = build_batch(
            np.arange(len(prompts)),
            np.zeros(len(prompts), np.int64),
            count,
            tokens=tokens,
            rope_lengths=count,
            tables=tables,
            block_tokens=16,
            segments=None if segments is None else np.concatenate(segments),
        )
        return list(self.model.forward(batch, self.pages).clone().split(count.tolist()))

    def pooled(self, prompts: list[list[int]], pooling: Pooling, cuts: tuple[int, ...] = ()) -> list[Tensor]:
        """cuts: where the states are given in pieces."""
        found = []
        for hidden in self.hidden(prompts):
            gathered = Gathered()
            for piece in hidden.tensor_split(cuts):
                if len(piece):
                    self.model.pooler.gather(gathered, piece, pooling)
            found.append(self.model.pooler.finish(gathered, pooling))
        return found


def task_of(kind: str) -> str:
    if "TokenClassification" in kind:
        return "token_classify"
    return "classify" if "Classification" in kind else "token_embed"


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_every_architecture_that_pools_has_a_case():
    assert {kind for kind, _ in CASES.values()} == {name for family in POOLED for name in family.ARCHITECTURES}


@pytest.mark.parametrize("name", CASES)
def test_prompts_in_one_step_equal_transformers(name, kernels, saved):
    checkpoint = saved(name)
    prompts = [prompt(length, length) for length in (37, 1, 16, 23)]
    got = Runner(checkpoint.path, kernels).pooled(prompts, Pooling(task_of(checkpoint.kind), activate=False))
    for ids, one in zip(prompts, got, strict=True):
        close(one, checkpoint.output(ids))


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_the_same_bit_for_bit_whatever_stands_beside_it(name, compiled, saved):
    pooling = Pooling(task_of(CASES[name][0]))
    prompts = [prompt(length, length) for length in (5, 41, 18, 1, 33)]
    runner = Runner(saved(name).path, compiled)
    together = runner.pooled(prompts, pooling)
    for ids, one in zip(prompts, together, strict=True):
        assert torch.equal(runner.pooled([ids], pooling)[0], one)
    assert torch.equal(Runner(saved(name).path, compiled, threads=1).pooled(prompts[1:2], pooling)[0], together[1])


@pytest.mark.parametrize("name", ["bert", "bert-score", "nomic"])
def test_segments_have_rows_of_their_own(name, kernels, saved):
    ids, other, numbers = prompt(21, 4), prompt(9, 5), [0] * 8 + [1] * 13
    runner = Runner(saved(name).path, kernels)
    hidden = runner.hidden([other, ids], [[0] * 9, numbers])[1]
    got = hidden
    if name == "bert-score":
        gathered, pooling = Gathered(), Pooling("classify", activate=False)
        runner.model.pooler.gather(gathered, hidden, pooling)
        got = runner.model.pooler.finish(gathered, pooling)
    close(got, saved(name).output(ids, numbers))


@pytest.mark.parametrize("name", WHOLE)
def test_a_later_token_changes_an_earlier_one(name, kernels, saved):
    ids = prompt(4, 9)
    runner = Runner(saved(name).path, kernels)
    assert runner.form.groups == ()
    before, after = runner.hidden([ids, [*ids[:-1], ids[-1] + 1 if ids[-1] < VOCAB - 1 else 3]])
    assert not torch.allclose(before[0], after[0], atol=1e-3)


@pytest.mark.parametrize("name", ["bert-score", "modernbert", "gemma3-both-ways"])
def test_two_ranks_compute_what_one_computes(name, kernels, saved, on_ranks):
    ids, path = prompt(19, 5), saved(name).path
    pooling = Pooling(task_of(CASES[name][0]), activate=False)

    def work(world):
        return Runner(path, kernels, world, threads=1).pooled([ids], pooling)[0]

    for got in on_ranks(2, work, kernels):
        close(got, saved(name).output(ids))
