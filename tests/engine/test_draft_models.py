"""Speculative decoding with a draft model: replies are those without it, and a perfect draft is accepted whole."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from engine.api.errors import CheckpointError, ConfigError
from engine.api.messages import Output
from engine.core.plan import StepPlan, StepResult
from engine.core.records import PlanMade, read_records
from engine.core.replay import main as replay
from engine.llm import LLM, Generation
from engine.worker.ranked import RankedWorker
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.adapters import random_pairs, write_adapter
from tests.tiers import thinned

KERNELS = ["torch", best()]
TOKENS = 3
PROMPT = lookup.REPEATED[:37]
SHAPE = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
}
path = lookup.path  # fixture


def saved(folder: Path, target: Path, model: type = transformers.LlamaForCausalLM, seed: int = 1, **changes) -> Path:
    """Save a random model with the tokenizer of the target."""
    torch.manual_seed(seed)
    model(model.config_class(**{**SHAPE, **changes})).save_pretrained(folder)
    shutil.copy(target / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def other(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller random model, whose drafts agree with the target only by the noise."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return saved(tmp_path_factory.mktemp("draft") / "other", path, **sizes)


def engine(path: Path, draft: Path | None, kernels: str = "torch", **more) -> LLM:
    own = {} if draft is None else {"draft_model": str(draft)}
    return lookup.engine(path, "off" if draft is None else "draft", kernels, draft_tokens=TOKENS, **own, **more)


@pytest.fixture(scope="module", params=thinned(dict.fromkeys(KERNELS), [best()]) if best() != "torch" else ["torch"])
def plain(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    with engine(path, None, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def perfect(plain: LLM, path: Path) -> Iterator[LLM]:
    with engine(path, path, plain.config.hardware.kernels) as made:
        yield made


@pytest.fixture(scope="module")
def drafting(plain: LLM, path: Path, other: Path) -> Iterator[LLM]:
    with engine(path, other, plain.config.hardware.kernels) as made:
        yield made


Drafts = list[tuple[int, int, tuple[int, ...]]]  # slot, known tokens, drafts


def spied(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Return a list to which the drafts of each row are added."""
    worker = llm._worker._own if isinstance(llm._worker, RankedWorker) else llm._worker
    drafter, made = worker._runner._draft, Drafts()
    run = drafter.run

    def spy(plan: StepPlan, result: StepResult, hidden: torch.Tensor) -> dict[int, tuple[int, ...]]:
        found = run(plan, result, hidden)
        for index, drafts in found.items():
            row = plan.rows[index]
            known = row.first + row.count - len(row.drafts) + len(result.tokens(index))
            made.append((row.slot, known, drafts))
        return found

    monkeypatch.setattr(drafter, "run", spy)
    return made


def check_drafts(
    made: Drafts,
    prompts: list[tuple[int, ...]],
    replies: list[Generation],
    draft: Callable[[list[int], int], list[int]],
) -> int:
    """Compare drafts with a reference. Request i is in slot i. Return the number of compared tokens."""
    texts = [[*prompt, *reply.ids] for prompt, reply in zip(prompts, replies, strict=True)]
    for slot, known, drafts in made:
        assert list(drafts) == draft(texts[slot][:known], len(drafts))
    assert {slot for slot, _, _ in made} == set(range(len(prompts)))
    return sum(len(drafts) for _, _, drafts in made)


def drafted(llm: LLM) -> tuple[int, int]:
    counters = lookup.counters(llm)
    return counters.draft_tokens, counters.accepted_tokens


@pytest.mark.parametrize(
    "name", ["greedy", "sampled", "truncated", "penalties", "min tokens", "stop string", "json", "thinking budget"]
)
@pytest.mark.sampled(2)
def test_replies_with_drafts_are_those_without(name: str, plain: LLM, drafting: LLM):
    wanted = lookup.requests(name, 2)
    expected, before = plain.generate([PROMPT] * 2, wanted), drafted(drafting)
    assert lookup.seen(drafting.generate([PROMPT] * 2, wanted)) == lookup.seen(expected)
    assert drafted(drafting)[0] > before[0], "nothing was drafted, so nothing was tested"


@pytest.mark.parametrize("name", ["greedy", "sampled", "truncated", "penalties", "bad words", "repetition penalty"])
def test_a_perfect_draft_is_accepted_whole(name: str, plain: LLM, perfect: LLM):
    """The draft of the next tokens has the logits, the penalties and the noise of the target."""
    (params,) = lookup.requests(name, 1)
    params = msgspec.structs.replace(params, max_tokens=1 + 5 * (TOKENS + 1))
    before, drafts = drafted(perfect), lookup.counters(perfect).drafts
    (found,) = perfect.generate([PROMPT], params)
    assert found.ids == plain.generate([PROMPT], params)[0].ids
    after = drafted(perfect)
    assert after[0] - before[0] == after[1] - before[1] == 5 * TOKENS
    assert lookup.counters(perfect).drafts - drafts == 5  # each step has k + 1 tokens


def test_a_perfect_draft_with_triton_kernels_is_accepted_whole(path: Path, plain: LLM):
    """Drafts are sampled on the host, and the target's tokens on the device, with the same noise."""
    pytest.importorskip("triton")
    (params,) = lookup.requests("repetition penalty", 1)
    params = msgspec.structs.replace(params, max_tokens=2 + TOKENS)
    with engine(path, path, "triton", dtype="float32") as llm:
        (found,) = llm.generate([PROMPT[:9]], params)
        assert found.ids == plain.generate([PROMPT[:9]], params)[0].ids
        assert drafted(llm) == (TOKENS, TOKENS)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(2)
def test_drafts_follow_chunks_of_prompts_cached_prefixes_and_preemption(kernels: str, path: Path):
    """Every draft of the same model is accepted, so the draft model has the keys and values of all tokens."""
    wanted = [*lookup.requests("sampled", 5), *lookup.requests("greedy", 1)]
    prompts = [(*lookup.REPEATED[: 9 * number + 5], 120) for number in range(len(wanted))]
    with engine(path, None, kernels) as llm:
        expected = lookup.seen(llm.generate(prompts, wanted))
    block = 2 * 2 * 2 * 4 * 2 * 8 * 4  # target and draft, layers, keys and values, tokens, heads, elements, bytes
    with engine(path, path, kernels, kv_bytes=42 * block, max_context=140, max_step_tokens=11, max_running=4) as llm:
        assert lookup.seen(llm.generate(prompts, wanted)) == expected
        assert lookup.counters(llm).preemptions > 0
        again = llm.generate(prompts[-1:], wanted[-1:])
        assert lookup.seen(again) == expected[-1:] and again[0].timing.cached_tokens >= 40
        assert drafted(llm)[0] == drafted(llm)[1] > 60


@torch.no_grad()
def test_drafts_are_the_most_likely_tokens_of_the_draft_model(
    path: Path, other: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Keys and values of rejected drafts are not read again. Some drafts are accepted: the prompt is a reply."""
    model = transformers.LlamaForCausalLM.from_pretrained(other)

    def draft(ids: list[int], count: int) -> list[int]:
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        return ids[-count:]

    params = lookup.requests("greedy", 1)[0]
    prompts = [PROMPT, PROMPT[3:20]]
    expected = plain.generate(prompts, params)
    with engine(path, other, plain.config.hardware.kernels, max_step_tokens=16) as llm:
        made = spied(llm, monkeypatch)
        assert lookup.seen(llm.generate(prompts, params)) == lookup.seen(expected)
    assert check_drafts(made, prompts, expected, draft) > 120


def test_drafts_end_where_the_grammar_does_not_allow_them(drafting: LLM):
    """Without that, drafts that choose neither of two letters would be verified and rejected."""
    before, wanted = drafted(drafting), lookup.requests("grammar", 2)
    drafting.generate([PROMPT] * 2, wanted)
    after = drafted(drafting)
    assert after[0] - before[0] == after[1] - before[1] > 30


def test_rejected_drafts_leave_no_trace(path: Path, other: Path, plain: LLM, drafting: LLM):
    """A prefix that a request with rejected drafts has cached gives right replies, and right drafts of this model."""
    params = lookup.requests("sampled", 1)[0]
    (first,) = drafting.generate([PROMPT], params)
    prompt = (*first.prompt_ids, *first.ids)
    (found,) = drafting.generate([prompt], params)
    assert found.timing.cached_tokens > len(PROMPT) and drafted(drafting)[0] > drafted(drafting)[1]
    assert found.ids == plain.generate([prompt], params)[0].ids
    with engine(path, other, plain.config.hardware.kernels, prefix_cache=False) as fresh:
        (uncached,) = fresh.generate([prompt], params)
    assert found.timing.accepted_tokens == uncached.timing.accepted_tokens
    assert found.timing.rejected_tokens == uncached.timing.rejected_tokens


def test_an_interrupted_reply_resumes_with_drafts(plain: LLM, perfect: LLM):
    """The gateway submits a request of an engine that was killed to another one, with the tokens so far."""
    params = lookup.requests("sampled", 1)[0]
    whole = plain.generate([PROMPT], params)[0].ids
    submit, _ = perfect._submit(PROMPT, params)
    perfect._loop.post([msgspec.structs.replace(submit, emitted=tuple(whole[:23]))])
    before, ids = drafted(perfect), []
    while True:
        deltas = [one for got in perfect._received() if isinstance(got, Output) for one in got.deltas]
        ids += [token for delta in deltas for token in delta.ids]
        if any(delta.finish for delta in deltas):
            break
    assert ids == whole[23:]
    assert drafted(perfect)[0] - before[0] == drafted(perfect)[1] - before[1] > 20


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (transformers.MistralForCausalLM, {"sliding_window": 9}),
        (
            transformers.Gemma3ForCausalLM,
            {"sliding_window": 9, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
             "num_hidden_layers": 4},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(3)
def test_attention_windows_of_a_draft_model(model: type, changes: dict, kernels: str, path: Path, tmp_path: Path):
    """A draft model whose layers have windows uses the block table of the target's widest layers."""
    own = saved(tmp_path / "model", path, model, **changes)
    params = lookup.requests("sampled", 1)[0]
    with engine(own, None, kernels) as llm:
        expected = llm.generate([PROMPT], params)[0].ids
    with engine(own, own, kernels) as llm:
        assert llm.generate([PROMPT], params)[0].ids == expected
        assert drafted(llm)[0] == drafted(llm)[1] > 30


def test_adapters_of_the_target_keep_their_replies(path: Path, tmp_path: Path, plain: LLM):
    kernels = plain.config.hardware.kernels
    base = transformers.LlamaForCausalLM.from_pretrained(path)
    folder = write_adapter(tmp_path / "adapter", random_pairs(base, ["q_proj", "down_proj"], size=0.5))
    params = msgspec.structs.replace(lookup.requests("greedy", 1)[0], max_tokens=24, adapter="own")
    found = []
    for draft in (None, path):
        with engine(path, draft, kernels, adapters={"own": str(folder)}) as llm:
            found.append(lookup.seen(llm.generate([PROMPT], params)))
    assert found[0] == found[1] != lookup.seen(plain.generate([PROMPT], msgspec.structs.replace(params, adapter="")))


def test_a_recording_with_a_draft_model_replays_exactly(path: Path, other: Path, tmp_path: Path, capsys):
    file = tmp_path / "record"
    with engine(path, other, record=str(file), record_size=1 << 18) as llm:
        llm.generate([PROMPT] * 3, [*lookup.requests("json", 1), *lookup.requests("sampled", 2)])
    rows = [row for one in read_records(file) if isinstance(one, PlanMade) and one.plan for row in one.plan.rows]
    assert any(row.lookahead for row in rows) and any(row.drafts for row in rows)
    assert replay([str(file)]) == 0
    assert "all plans equal" in capsys.readouterr().out


def test_ranks_share_the_drafts_of_rank_0(path: Path, plain: LLM):
    wanted = lookup.requests("sampled", 2)
    with engine(path, path, plain.config.hardware.kernels, tensor=2) as llm:
        assert lookup.seen(llm.generate([PROMPT] * 2, wanted)) == lookup.seen(plain.generate([PROMPT] * 2, wanted))
        assert drafted(llm)[1] > 50


def test_a_vocabulary_with_more_unused_ids_may_draft(path: Path, tmp_path: Path, plain: LLM):
    """Vocabularies of one family differ in their padding; fewer and more ids than the target's both work."""
    for vocab in (258, 271):
        draft = saved(tmp_path / str(vocab), path, vocab_size=vocab)
        with engine(path, draft, plain.config.hardware.kernels) as llm:
            prompt = (*PROMPT, 262)  # an id that the smaller vocabulary does not have
            params = lookup.requests("sampled", 1)[0]
            assert llm.generate([prompt], params)[0].ids == plain.generate([prompt], params)[0].ids
            assert drafted(llm)[1] > 0


def test_models_that_cannot_draft_are_refused(path: Path, other: Path, tmp_path: Path):
    draft = saved(tmp_path / "vocabulary", path)
    text = (draft / "tokenizer.json").read_text()
    for old, new in (('"a":', '"other":'), ('"b":', '"a":'), ('"other":', '"b":')):
        text = text.replace(old, new)
    (draft / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"vocabulary is not the target's: token \d+ is '[ab]', and '[ab]'"):
        engine(path, draft)
    (draft / "tokenizer.json").unlink()
    assert (draft / "config.json").exists()
    saved(tmp_path / "sizes", path, vocab_size=300)
    (tmp_path / "sizes" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="it has 300 token ids, and the target has 263"):
        engine(path, tmp_path / "sizes")
    short = saved(tmp_path / "short", path, max_position_embeddings=64)
    with pytest.raises(ConfigError, match="supports 64 tokens, fewer than max_context=512"):
        engine(path, short)
    vectors = tmp_path / "vectors"
    transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)).save_pretrained(vectors)
    with pytest.raises(CheckpointError, match="must be a decoder that generates text"):
        engine(path, vectors)
    recurrent = tmp_path / "recurrent"
    transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=263, hidden_size=16, state_size=4, num_hidden_layers=1)
    ).save_pretrained(recurrent)
    with pytest.raises(CheckpointError, match="cannot have recurrent layers"):
        engine(path, recurrent)
    narrow = saved(tmp_path / "narrow", path, transformers.MistralForCausalLM, sliding_window=9)
    with pytest.raises(ConfigError, match="attends to more tokens than the target keeps"):
        engine(narrow, path)
    with pytest.raises(ConfigError, match="the methods draft, eagle, eagle3 need draft_model"):
        lookup.engine(path, "draft")
    with pytest.raises(ConfigError, match="no other method has one"):
        lookup.engine(path, "ngram", draft_model=str(path))
