"""Speculative decoding of models with recurrent state: rejected drafts leave it as they found it."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from engine.core.records import PlanMade, read_records
from engine.core.replay import main as replay
from engine.kv import snapshots
from engine.llm import LLM, Params
from kernels.cpu.library import best
from tests.engine import test_speculation as lookup
from tests.engine.layers.families import random_family, save_family
from tests.engine.test_speculation import REPEATED, counters, engine, requests, seen
from tests.tiers import thinned

path = lookup.path  # fixture
EACH_KIND = ("qwen3_5", "kimi_linear", "mamba2", "mamba", "recurrent-gemma", "lfm2", "minimax", "falcon-h1")
SIZES = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 256}
PROMPTS = [REPEATED, REPEATED[:33], REPEATED[:18]]


def recurrent(name: str, folder: Path, tokenizer: Path) -> Path:
    save_family(name, random_family(name, SIZES), folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def delta(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model with gated DeltaNet."""
    return recurrent("qwen3_5", tmp_path_factory.mktemp("recurrent") / "delta", path)


def mixed() -> list:
    return [*requests("greedy", 1), *requests("sampled", 1), *requests("penalties", 1)]


def half_right(llm: LLM, text: list[int]) -> None:
    """Take the first token of each draft from the text, and make the others wrong."""

    def search(sequence, count):
        draft = text[len(sequence.ids) : len(sequence.ids) + count]
        return tuple(token ^ (at > 0) for at, token in enumerate(draft))

    llm._loop.scheduler.drafting.search = search


@pytest.mark.parametrize("name", thinned(EACH_KIND, ("qwen3_5", "mamba2", "recurrent-gemma")))
def test_replies_with_drafts_are_those_without(name: str, path: Path, tmp_path: Path):
    folder = recurrent(name, tmp_path / name, path)
    with engine(folder, "off", best()) as llm:
        expected = seen(llm.generate(PROMPTS, mixed()))
    with engine(folder, "ngram", best(), max_step_tokens=16, max_running=2) as llm:
        assert seen(llm.generate(PROMPTS, mixed())) == expected
        assert counters(llm).draft_tokens > counters(llm).accepted_tokens > 0


@pytest.mark.parametrize("method", ["suffix", "jump-ahead"])
def test_forced_text_and_adaptive_drafts_keep_every_reply(method: str, delta: Path):
    wanted = [*requests("json", 2), *requests("sampled", 2)]
    with engine(delta, "off", "torch") as llm:
        expected = seen(llm.generate([REPEATED] * 4, wanted))
    with engine(delta, method, "torch", adaptive_drafts=method == "suffix") as llm:
        assert seen(llm.generate([REPEATED] * 4, wanted)) == expected
        assert counters(llm).draft_tokens > counters(llm).accepted_tokens > 0


def test_triton_kernels_give_the_replies_without_drafts(delta: Path):
    pytest.importorskip("triton")
    params = Params(temperature=0.0, max_tokens=8, ignore_eos=True)
    replies = []
    for method, kernels in (("off", best()), ("ngram", "triton")):
        with engine(delta, method, kernels, dtype="float32", draft_tokens=2) as llm:
            if replies:
                half_right(llm, [*REPEATED[:30], *replies[0][0][0]])
            replies.append(seen(llm.generate([REPEATED[:30]], params)))
            counts = counters(llm)
    assert replies[0] == replies[1] and counts.draft_tokens > counts.accepted_tokens > 0


def test_rejected_drafts_leave_the_state_of_a_run_without_drafts(delta: Path):
    """Bit for bit: the state after the last token that was computed."""
    params, found = Params(temperature=0.0, max_tokens=24, ignore_eos=True), []
    for method in ("off", "ngram"):
        with engine(delta, method, best(), draft_tokens=3) as llm:
            if found:
                half_right(llm, [*REPEATED, *found[0][0]])
            (reply,) = llm.generate([REPEATED], params)
            found.append((reply.ids, llm._worker._runner._states.slots[0].clone()))
            counts = counters(llm)
    assert found[0][0] == found[1][0] and counts.draft_tokens > counts.accepted_tokens > 0
    assert torch.equal(found[0][1], found[1][1])


def test_prefixes_of_requests_with_drafts_are_correct(delta: Path, monkeypatch: pytest.MonkeyPatch):
    """Snapshots are due every 8 tokens. One of a state with rejected drafts would be found by the next request."""
    monkeypatch.setattr(snapshots, "INTERVAL", 8)
    with engine(delta, "off", best()) as plain, engine(delta, "ngram", best()) as llm:
        cached = 0
        for params in requests("sampled", 4):
            (first,) = llm.generate([REPEATED], params)
            again = (*first.prompt_ids, *first.ids)
            follow = Params(temperature=0.0, max_tokens=8, ignore_eos=True)
            (found,) = llm.generate([again], follow)
            cached = max(cached, found.timing.cached_tokens)
            assert found.ids == plain.generate([again], follow)[0].ids
        assert cached > len(REPEATED), "no snapshot of a reply was found"
        assert counters(llm).draft_tokens > counters(llm).accepted_tokens > 0


def test_another_engine_resumes_a_reply(delta: Path):
    """After a crash, the gateway sends the tokens that the client has received."""
    params = requests("sampled", 1)[0]
    with engine(delta, "off", best()) as llm:
        (expected,) = llm.generate([REPEATED], params)
    with engine(delta, "ngram", best()) as llm:
        for kept in (1, 17):
            submit, reply = llm._submit(REPEATED, params)
            llm._loop.post([msgspec.structs.replace(submit, emitted=tuple(expected.ids[:kept]))])
            llm._collect({submit.id: reply})
            assert reply.generation.ids == expected.ids[kept:]
        assert counters(llm).draft_tokens > counters(llm).accepted_tokens > 0


def test_preempted_requests_keep_their_replies(delta: Path):
    wanted, prompts = requests("sampled", 6), [REPEATED[:20]] * 6
    with engine(delta, "off", best()) as llm:
        expected = seen(llm.generate(prompts, wanted))
        block = llm._worker.layout.block_bytes
    with engine(delta, "ngram", best(), kv_bytes=40 * block, max_context=120) as llm:
        assert seen(llm.generate(prompts, wanted)) == expected
        assert counters(llm).preemptions > 0 and counters(llm).accepted_tokens > 0


@pytest.mark.sampled(2)
def test_two_ranks_give_the_replies_of_one(path: Path, tmp_path: Path):
    folder = recurrent("mamba2", tmp_path / "mamba2", path)
    replies = []
    for ranks, method in ((1, "off"), (2, "ngram")):
        with engine(folder, method, best(), tensor=ranks) as llm:
            replies.append(seen(llm.generate(PROMPTS, mixed())))
            counts = counters(llm)
    assert replies[0] == replies[1] and counts.draft_tokens > counts.accepted_tokens > 0


def test_a_recording_with_returned_states_replays_exactly(delta: Path, tmp_path: Path, capsys):
    file = tmp_path / "record"
    with engine(delta, "ngram", best(), record=str(file), record_size=1 << 15) as llm:
        for name in ("greedy", "sampled", "greedy"):
            llm.generate([REPEATED] * 3, requests(name, 3))
    plans = [one.plan for one in read_records(file) if isinstance(one, PlanMade) and one.plan]
    assert any(plan.kept for plan in plans) and any(plan.returned for plan in plans)
    assert replay([str(file)]) == 0
    assert "all plans equal" in capsys.readouterr().out
