"""Replies with speculative decoding: they are those without it, token for token."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.api.messages import Grammar, Thinking
from engine.core.records import PlanMade, Proposed, Started, read_records
from engine.core.replay import main as replay
from engine.llm import LLM, Params
from kernels.cpu.library import best, usable
from tests.engine.adapters import random_pairs, write_adapter
from tests.tiers import thinned

KERNELS = ["torch", *usable()]
SIZES = {"kv_bytes": 1 << 20, "block_tokens": 4, "max_running": 8, "max_step_tokens": 32, "threads": 1}
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer", "maximum": 99}, "condition": {"enum": ["clear", "rain"]}},
    "required": ["temperature", "condition"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
REPEATED = tuple(b"the cat sat on the mat; the cat sat on the hat; the cat sat on the ")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes. Its greedy replies soon repeat, so drafts are accepted and rejected."""
    path = tmp_path_factory.mktemp("speculation") / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    config = transformers.LlamaConfig(
        vocab_size=263,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def engine(path, method, kernels=None, **more):
    return LLM(path, kernels=kernels or best(), speculation=method, **{**SIZES, **more})


@pytest.fixture(scope="module")
def plain(path) -> Iterator[LLM]:
    with engine(path, "off") as made:
        yield made


@pytest.fixture(scope="module")
def ngram(path) -> Iterator[LLM]:
    with engine(path, "ngram") as made:
        yield made


@pytest.fixture(scope="module")
def suffix(path) -> Iterator[LLM]:
    with engine(path, "suffix") as made:
        yield made


@pytest.fixture(scope="module")
def jumping(path) -> Iterator[LLM]:
    with engine(path, "jump-ahead") as made:
        yield made


def counters(llm):
    """Counters of the scheduler itself: the engine sends them with a delay."""
    return llm._loop.scheduler.counters


def seen(replies):
    return [(reply.ids, reply.text, reply.finish, reply.stop_reason, reply.error) for reply in replies]


def likely(*words):
    """Logit bias that makes the letters of these words likely, so that sampled replies repeat n-grams."""
    return dict.fromkeys(b"".join(word.encode() for word in words), 6.0)


OPTIONS = {
    "greedy": {"temperature": 0.0},
    "greedy to the limit of the context": {"temperature": 0.0, "max_tokens": 440},
    "sampled": {"logit_bias": likely("abc")},
    "truncated": {"logit_bias": likely("ab"), "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.05},
    "penalties": {"logit_bias": likely("abc"), "presence_penalty": 0.5, "frequency_penalty": 0.05},
    "bad words": {"logit_bias": likely("ab"), "bad_words": (tuple(b"aba"), tuple(b"b"))},
    "allowed tokens": {"allowed_token_ids": (97, 98)},
    "min tokens": {"logit_bias": {256: 9.0, **likely("ab")}, "min_tokens": 20, "ignore_eos": False},
    "end token": {"logit_bias": {256: 4.0, **likely("ab")}, "ignore_eos": False},
    "stop token": {"logit_bias": {122: 2.5, **likely("ab")}, "stop_token_ids": (122,)},
    "stop string": {"logit_bias": likely("ab"), "stop": ("abba", "bbbb")},
    "grammar": {"grammar": Grammar("regex", "(abc|abd){20,30}")},
    "json": {"grammar": JSON, "logit_bias": {32: -9.0, 10: -9.0, 13: -9.0, 9: -9.0}},
    "greedy grammar": {"grammar": Grammar("regex", "(abc|abd){20,30}"), "temperature": 0.0},
    "thinking budget": {
        "thinking": Thinking(5, tuple(b"]]now the reply:"), ("[[",), ("]]",), begun=True, open=True),
        "logit_bias": likely("ab"),
    },
    "thinking budget and grammar": {
        "thinking": Thinking(5, tuple(b"]]"), ("[[",), ("]]",), begun=True, open=True),
        "grammar": Grammar("lark", 'start: t "a fixed text" /[0-9]/ \nt[lazy]: /(?s:.*)\\]\\]/'),
        "logit_bias": likely("ab"),
    },
}


def requests(name, count=2):
    options = {"max_tokens": 60, "ignore_eos": True, **OPTIONS[name]}
    return [Params(seed=seed, **options) for seed in range(count)]


@pytest.mark.parametrize("name", OPTIONS)
def test_replies_with_ngram_drafts_are_those_without(name, plain, ngram):
    wanted = requests(name)
    expected = plain.generate([REPEATED] * len(wanted), wanted)
    drafted = counters(ngram).draft_tokens
    assert seen(ngram.generate([REPEATED] * len(wanted), wanted)) == seen(expected)
    assert counters(ngram).draft_tokens > drafted, "nothing was drafted, so nothing was tested"


@pytest.mark.parametrize("name", thinned(OPTIONS, ["greedy", "sampled", "stop string", "json", "thinking budget"]))
def test_replies_with_suffix_drafts_are_those_without(name, plain, suffix):
    """Each request comes twice, so that the second one has drafts from the reply of the first."""
    wanted = requests(name)
    expected = plain.generate([REPEATED] * len(wanted), wanted)
    for _ in range(2):
        before = counters(suffix).accepted_tokens
        assert seen(suffix.generate([REPEATED] * len(wanted), wanted)) == seen(expected)
    assert counters(suffix).accepted_tokens > before, "the second time, drafts come from equal replies"


def test_a_second_equal_request_takes_few_steps_unless_its_cache_salt_differs(path):
    params = Params(seed=5, max_tokens=60, ignore_eos=True)  # does not repeat itself
    with engine(path, "suffix") as llm:
        scheduler, steps = llm._loop.scheduler, []
        for forget in (False, False, True):
            if forget:
                scheduler.reset_prefix_cache()
            before = scheduler.step
            llm.generate([tuple(range(40))], params)
            steps.append(scheduler.step - before)
    assert steps[1] < steps[0] / 2 < steps[2]


def test_adaptive_drafts_keep_every_reply(path, plain):
    wanted = [params for name in ("greedy", "sampled", "json", "penalties") for params in requests(name, 5)]
    prompts = [(*REPEATED[: 3 * number], 120) for number in range(len(wanted))]
    expected = plain.generate(prompts, wanted)
    with engine(path, "suffix", adaptive_drafts=True, max_running=5) as llm:
        assert seen(llm.generate(prompts, wanted)) == seen(expected)
        assert counters(llm).accepted_tokens > 0


def test_replies_with_an_adapter_are_those_without_drafts(path, tmp_path):
    """Equal prompts with and without an adapter, so that replies of one must not be drafts of the other."""
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    adapters = {"a": write_adapter(tmp_path / "a", random_pairs(model, ("q_proj", "v_proj", "down_proj"), size=0.5))}
    wanted = [msgspec.structs.replace(params, adapter=name) for params in requests("sampled") for name in ("", "a")]
    replies = []
    for method in ("off", "suffix"):
        with engine(path, method, adapters=adapters) as llm:
            for _ in range(2):
                replies.append(seen(llm.generate([REPEATED] * len(wanted), wanted)))
            scopes = llm._loop.scheduler.drafting.replies.state()
            accepted = counters(llm).accepted_tokens
    assert replies[0] == replies[1] == replies[2] == replies[3] and accepted
    assert replies[0][0] != replies[0][1], "the adapter changes nothing"
    assert [one.adapter for one in scopes] == [-1, 0] or [one.adapter for one in scopes] == [0, -1]


@pytest.mark.parametrize(
    "name", [name for name in OPTIONS if "grammar" in OPTIONS[name] or "thinking" in OPTIONS[name]]
)
def test_replies_with_jump_ahead_are_those_without(name, plain, jumping):
    wanted = requests(name)
    expected = plain.generate(["x"] * len(wanted), wanted)
    accepted = counters(jumping).accepted_tokens
    assert seen(jumping.generate(["x"] * len(wanted), wanted)) == seen(expected)
    assert counters(jumping).accepted_tokens > accepted


def test_jump_ahead_drafts_nothing_for_a_request_without_a_grammar(jumping):
    before = counters(jumping).draft_tokens
    jumping.generate([REPEATED], Params(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert counters(jumping).draft_tokens == before


def test_forced_text_takes_few_steps(plain, jumping):
    params = Params(temperature=0.0, max_tokens=64, grammar=Grammar("regex", "a text that is known beforehand[ab]"))
    steps = []
    for llm in (plain, jumping):
        before = llm._loop.scheduler.step
        (reply,) = llm.generate("x", params)
        steps.append(llm._loop.scheduler.step - before)
    length = len(reply.ids)
    assert length == 32 and steps[0] >= length
    assert steps[1] <= 1 + -(-length // 8)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", thinned(["greedy", "truncated", "penalties", "json"], ["truncated", "json"]))
def test_replies_of_all_kernels_are_those_without_drafts(kernels, name, path):
    wanted = requests(name)
    replies = []
    for method in ("off", "ngram"):
        with engine(path, method, kernels) as llm:
            replies.append(seen(llm.generate([REPEATED] * len(wanted), wanted)))
            drafted = counters(llm).draft_tokens
    assert drafted and replies[0] == replies[1]


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_target(mode, temperature, plain, ngram):
    params = Params(
        temperature=temperature,
        seed=1,
        max_tokens=60,
        ignore_eos=True,
        logprobs=3,
        logprobs_mode=mode,
        logit_bias=likely("ab"),
        top_k=50,
    )
    expected, found = (llm.generate([REPEATED], params)[0] for llm in (plain, ngram))
    assert found.ids == expected.ids
    assert len(found.logprobs) == len(found.ids)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert (one.token, one.rank, one.top_ids) == (other.token, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_prompts_in_chunks_and_more_requests_than_places_keep_every_reply(path, plain):
    wanted = [params for name in ("greedy", "sampled", "json", "penalties") for params in requests(name, 5)]
    prompts = [(*REPEATED[: 3 * number], 120) for number in range(len(wanted))]
    expected = plain.generate(prompts, wanted)
    with engine(path, "ngram", max_step_tokens=11, max_running=5) as llm:
        assert seen(llm.generate(prompts, wanted)) == seen(expected)
        assert counters(llm).accepted_tokens > 20


def test_preempted_requests_keep_their_replies(path, plain):
    wanted = requests("sampled", 8)
    prompts = [REPEATED[:20]] * 8
    expected = plain.generate(prompts, wanted)
    block = 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, elements, bytes
    with engine(path, "ngram", kv_bytes=60 * block, max_context=120) as llm:
        found = llm.generate(prompts, wanted)
        assert counters(llm).preemptions > 0 and counters(llm).accepted_tokens > 0
    assert seen(found) == seen(expected)


def test_a_prefix_that_was_cached_by_a_request_with_drafts_is_correct(path, plain):
    """Keys and values of rejected drafts must not be found by another request."""
    with engine(path, "ngram") as llm:
        for params in requests("sampled", 6):
            (first,) = llm.generate([REPEATED], params)
            again = (*first.prompt_ids, *first.ids)
            follow = Params(temperature=0.0, max_tokens=8, ignore_eos=True)
            (found,) = llm.generate([again], follow)
            assert found.timing.cached_tokens > len(REPEATED)
            assert found.ids == plain.generate([again], follow)[0].ids
        assert counters(llm).draft_tokens > counters(llm).accepted_tokens > 0


@pytest.mark.parametrize(
    "options", [{"method": "ngram"}, {"method": "suffix"}, {"method": "suffix", "adaptive_drafts": True}], ids=str
)
def test_a_recording_with_drafts_replays_exactly(options, path, tmp_path, capsys):
    """The recording begins with the state of a scheduler that has drafted, because its first file is full."""
    file = tmp_path / "record"
    with engine(path, record=str(file), record_size=1 << 15, **options) as llm:
        for name in ("greedy", "sampled", "json", "sampled", "json"):  # again, with drafts from equal replies
            llm.generate([REPEATED] * 3, requests(name, 3))
    records = list(read_records(file))
    assert any(row.drafts for one in records if isinstance(one, PlanMade) and one.plan for row in one.plan.rows)
    assert any(isinstance(one, Proposed) for one in records)
    assert replay([str(file)]) == 0
    assert "all plans equal" in capsys.readouterr().out
    states = [one.state for one in records if isinstance(one, Started) and one.state is not None]
    assert states and (options["method"] == "ngram" or any(state.replies for state in states))
    assert any(state.control.levels for state in states) == ("adaptive_drafts" in options)


def test_counters_agree_with_one_another(path):
    with engine(path, "ngram", draft_tokens=3) as llm:
        replies = llm.generate([REPEATED] * 3, requests("greedy", 3))
        stats = counters(llm)
    assert 0 < stats.accepted_tokens <= stats.draft_tokens <= 3 * stats.drafts
    assert sum(stats.accepted_at) == stats.accepted_tokens and len(stats.accepted_at) <= 3
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert sum(reply.timing.accepted_tokens for reply in replies) == stats.accepted_tokens
    assert sum(reply.timing.rejected_tokens for reply in replies) == stats.draft_tokens - stats.accepted_tokens


def test_a_perfect_draft_returns_its_tokens_and_one_more(path, plain):
    """The acceptance length is tokens + 1, and lower with a wrong token in each draft."""
    params = Params(temperature=0.0, max_tokens=41, ignore_eos=True)
    (expected,) = plain.generate([REPEATED], params)
    text, lengths = [*REPEATED, *expected.ids], []
    for wrong in (None, 2):

        def search(sequence, count, wrong=wrong):
            draft = text[len(sequence.ids) : len(sequence.ids) + count]
            return tuple(token ^ (at == wrong) for at, token in enumerate(draft))

        with engine(path, "ngram", draft_tokens=4) as llm:
            llm._loop.scheduler.drafting.search = search
            assert llm.generate([REPEATED], params)[0].ids == expected.ids
            counts = counters(llm)
        assert sum(counts.accepted_at) == counts.accepted_tokens
        lengths.append(1 + counts.accepted_tokens / counts.drafts)
    assert lengths[0] == 5 and 2 < lengths[1] <= 3


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.sampled(2)
def test_two_ranks_give_the_replies_of_one(kernels, path):
    wanted = [*requests("sampled"), *requests("json")]
    replies = []
    for ranks, method in ((1, "off"), (2, "suffix")):
        with engine(path, method, kernels, tensor=ranks) as llm:
            replies.append(seen(llm.generate([REPEATED] * len(wanted), wanted)))
            accepted = counters(llm).accepted_tokens
    assert replies[0] == replies[1] and accepted
