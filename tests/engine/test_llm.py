"""The offline engine: text in, text out, stops, errors, times, structured output."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.api.errors import ConfigError, EngineGone, RequestError
from engine.api.messages import Grammar, Sampling, Thinking
from engine.llm import LLM, Params
from kernels.cpu.library import usable
from tools.demo.template import render

DEMO = Path(__file__).parents[2] / "manifests" / "demo"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, with a token that ends."""
    path = tmp_path_factory.mktemp("llm") / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    config = transformers.LlamaConfig(
        vocab_size=263,  # six more than the tokenizer has
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


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, kv_bytes=1 << 20, block_tokens=4, max_running=8, max_step_tokens=16, threads=1) as made:
        yield made


def test_importing_engine_does_not_load_torch():
    code = "import engine, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
    assert import_module("engine").LLM is LLM


def test_prompts_are_a_text_texts_or_ids_and_replies_keep_their_order(llm):
    letters = tuple(llm.tokenizer.encode("abcdefgh"))  # whole characters: bytes that are none have no text yet
    params = Params(temperature=0.0, max_tokens=5, allowed_token_ids=letters)
    one = llm.generate("abc", params)
    several = llm.generate(["xyz", "abc", [*llm.tokenizer.encode("abc")]], params)
    assert len(one) == 1 and len(several) == 3
    assert one[0].ids == several[1].ids == several[2].ids
    assert several[0].prompt_ids == tuple(llm.tokenizer.encode("xyz"))
    assert one[0].text == llm.tokenizer.decode(one[0].ids)
    assert one[0].finish == "length" and one[0].logprobs == []


def test_params_are_for_all_or_one_each(llm):
    replies = llm.generate(["a", "a"], [Params(max_tokens=2), Sampling(temperature=0.0)])
    assert [len(reply.ids) for reply in replies] == [2, Params().max_tokens]
    with pytest.raises(RequestError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [Params()])


def test_without_a_seed_replies_differ_and_with_one_they_do_not(llm):
    free = llm.generate(["a"] * 4, Params(max_tokens=12))
    fixed = llm.generate(["a"] * 4, Params(max_tokens=12, seed=5))
    assert len({reply.text for reply in free}) > 1 and len({reply.text for reply in fixed}) == 1


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_reply_with_its_tokens_and_logprobs(include, llm):
    letters = tuple(llm.tokenizer.encode("abcdefgh"))
    params = {"seed": 3, "max_tokens": 40, "allowed_token_ids": letters}
    whole = llm.generate("hello", Params(**params))[0]
    stop = whole.text[20:22]
    at = whole.text.index(stop)
    cut = llm.generate("hello", Params(**params, logprobs=0, stop=("never there", stop), include_stop=include))[0]
    assert cut.text == whole.text[: at + 2 if include else at]
    assert (cut.finish, cut.stop_reason) == ("stop", stop)
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) == len(cut.logprobs) < 40


def test_the_end_token_is_in_the_ids_and_not_in_the_text(llm):
    forced = Params(temperature=0.0, logit_bias={256: 100.0})
    reply = llm.generate("a", forced)[0]
    assert reply.ids == [256] and reply.text == "" and (reply.finish, reply.stop_reason) == ("stop", None)
    ignored = llm.generate("a", Params(temperature=0.0, logit_bias={256: 100.0}, ignore_eos=True, max_tokens=3))[0]
    assert ignored.ids == [256] * 3 and ignored.finish == "length"
    as_stop = Params(temperature=0.0, logit_bias={65: 100.0}, stop_token_ids=(65,), min_tokens=2)
    stopped = llm.generate("a", as_stop)[0]
    assert stopped.stop_reason == 65 and len(stopped.ids) == 3 and 65 not in stopped.ids[:2]


def test_timings_are_monotonic(llm):
    for reply in llm.generate(["abc" * n for n in (1, 9, 30)], Params(max_tokens=4)):
        times = reply.timing
        assert 0 < times.arrived <= times.scheduled <= times.first_token <= times.last_token


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], Params(), "prompt"),
        ([263], Params(), "prompt"),
        ([1] * 512, Params(), "prompt"),
        ([1], Params(logit_bias={9999: 1.0}), "logit_bias"),
        ([1], Params(grammar=Grammar("regex", "[")), "grammar"),
    ],
)
def test_failed_request_does_not_stop_the_engine(prompt, params, param, llm):
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2], prompt], [Params(max_tokens=400), params])
    assert caught.value.param == param
    assert len(llm.generate("a", Params(max_tokens=3, ignore_eos=True))[0].ids) == 3


def test_closed_engine_raises(path):
    with LLM(path, kv_bytes=1 << 20) as made:
        pass
    for _ in range(2):
        with pytest.raises(EngineGone, match="closed"):
            made.generate("a")


def test_no_prompts_give_no_replies(llm):
    assert llm.generate([]) == []


@pytest.mark.parametrize("kernels", ["torch", *usable()])
def test_demo_model_adds_numbers_with_every_kernel(kernels):
    prompt = render(({"role": "user", "content": "What is 17 + 25?"},))
    with LLM(DEMO, kernels=kernels) as llm:
        (reply,) = llm.generate(prompt, Params(temperature=0.0, max_tokens=60))
    assert reply.text.endswith("= 42")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_demo_model_adds_up_with_rounded_weights_from_a_first_and_a_second_start(weights, tmp_path):
    prompt = render(({"role": "user", "content": "What is 17 + 25?"},))
    texts = []
    for _ in range(2):
        with LLM(DEMO, weights=weights, weight_cache=str(tmp_path)) as llm:
            texts.append(llm.generate(prompt, Params(temperature=0.0, max_tokens=60))[0].text)
    assert texts[0].endswith("= 42") and texts[0] == texts[1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kernels": "sse9"}, "compiled kernels 'sse9': usable here are"),
        (
            {"kernels": "base", "dtype": "bfloat16"},
            "kernels=base: supported is float32 on a CPU, not bfloat16 on cpu",
        ),
        ({"kernels": "torch", "kv_dtype": "fp8"}, "kv_dtype=fp8: torch kernels support .* float16, int8, int4$"),
        (
            {"kernels": "base", "kv_dtype": "fp8"},
            "kv_dtype=fp8: base kernels support .* bfloat16, float16, int8, int4$",
        ),
        ({"kernels": "torch", "weights": "int8"}, "supported only by compiled and triton kernels, not by torch"),
    ],
)
def test_unsupported_kernel_settings_are_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(DEMO, **settings)


def test_an_unknown_setting_is_named_with_those_that_exist(path):
    with pytest.raises(ConfigError, match=r"max_contxt.*max_context"):
        LLM(path, max_contxt=3)


def test_defaults_follow_from_the_checkpoint_and_the_machine(path):
    with LLM(path) as made:
        assert made.config.model.max_context == 512 and made.config.model.dtype == "float32"
        assert made.config.memory.kv_cache >= 512 * made._worker.layout.block_bytes // made.config.cache.block_tokens


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": ["x", "é", "好"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = r"(你|好|😀|a){2,5}-[0-9]{1,3}"
LARK = 'start: "<" ("yes" | "no" | start) ">"'


def in_schema(text: str) -> bool:
    return jsonschema.validate(json.loads(text), SCHEMA) is None


def in_lark(text: str) -> bool:
    whole = re.fullmatch(r"(<+)(yes|no)(>+)", text)
    return whole is not None and len(whole[1]) == len(whole[3])


LANGUAGES = {
    "schema": (Grammar("json_schema", json.dumps(SCHEMA)), in_schema),
    "regex": (Grammar("regex", REGEX), lambda text: re.fullmatch(REGEX, text)),
    "lark": (Grammar("lark", LARK), in_lark),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_grammar_holds_beside_free_requests(language, temperature, llm):
    """SO-01 SO-05"""
    grammar, accepts = LANGUAGES[language]
    # a random model often samples whitespace and brackets: a bias lets its reply end
    bias = {llm.tokenizer.encode(text)[0]: -6.0 for text in (" ", "\n", "\t", "\r", "<", "0")}
    held = [
        Params(temperature=temperature, seed=seed, max_tokens=300, grammar=grammar, logit_bias=bias)
        for seed in range(5 if temperature else 1)
    ]
    free = Params(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    replies = llm.generate(["x"] * (len(held) + 2), [free, *held, free])
    assert [len(reply.ids) for reply in (replies[0], replies[-1])] == [20, 20]
    assert replies[0].ids == replies[-1].ids == llm.generate("x", free)[0].ids
    for reply in replies[1:-1]:
        assert reply.finish == "stop", reply.text
        assert accepts(reply.text), reply.text


def test_a_reply_cut_by_its_length_is_a_prefix_of_the_language(llm):
    """SO-03, second half: the reply ends by length, and its text can still be completed to a sentence."""
    grammar = Grammar("regex", "(abc){50}")
    for count in (1, 7):
        reply = llm.generate("x", Params(seed=count, max_tokens=count, grammar=grammar))[0]
        assert reply.text == ("abc" * 9)[:count] and reply.finish == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_comes_when_the_language_accepts_and_not_before(temperature, llm):
    """SO-03 a model that wants nothing but to end ends with the shortest sentence"""
    eager = {256: 100.0}
    for regex, shortest in (("(ab){2,3}", "abab"), ("a|b{4}c*", None), ("x+y?", "x")):
        params = Params(
            temperature=temperature, seed=5, max_tokens=30, grammar=Grammar("regex", regex), logit_bias=eager
        )
        reply = llm.generate("x", params)[0]
        assert reply.finish == "stop" and re.fullmatch(regex, reply.text)
        assert reply.text == shortest or (shortest is None and reply.text in ("a", "bbbb"))


def _mixed(llm):
    """Constrained and free requests of all lengths, more than run at once, so that slots change hands between steps."""
    bias = {llm.tokenizer.encode(text)[0]: -6.0 for text in (" ", "\n", "\t", "\r", "<", "0")}
    wanted = []
    for number in range(15):
        grammar = [None, *(grammar for grammar, _ in LANGUAGES.values())][number % 4]
        tokens = 3 + 7 * number % 29 if grammar is None else 300
        wanted.append(Params(temperature=1.0, seed=number, max_tokens=tokens, grammar=grammar, logit_bias=bias))
    return wanted


def test_masks_stay_with_their_request_while_slots_change_hands(llm):
    """SO-05: each reply of a mixed batch equals the reply to the same request alone."""
    wanted = _mixed(llm)
    together = llm.generate(["x"] * len(wanted), wanted)
    for params, reply in zip(wanted, together, strict=True):
        assert reply.ids == llm.generate("x", params)[0].ids


def test_steps_planned_ahead_keep_every_guarantee_of_a_grammar(path, llm):
    """SO-04 async scheduling: the same replies as without, each in its language, ended or a prefix"""
    wanted = _mixed(llm)
    ahead = llm.generate(["x"] * len(wanted), wanted)
    with LLM(
        path, kv_bytes=1 << 20, block_tokens=4, max_running=8, max_step_tokens=16, threads=1, overlap=False
    ) as waiting:
        behind = waiting.generate(["x"] * len(wanted), wanted)
    assert llm.config.scheduling.overlap and not waiting.config.scheduling.overlap
    assert [(reply.ids, reply.finish) for reply in ahead] == [(reply.ids, reply.finish) for reply in behind]
    accepting = dict(LANGUAGES.values())
    for params, reply in zip(wanted, ahead, strict=True):
        if params.grammar is not None:
            assert reply.finish == "stop" and accepting[params.grammar](reply.text), reply.text


@pytest.mark.parametrize("prompt", ["x", "a prompt that takes several steps and blocks"])
def test_a_reply_scored_as_a_prompt_has_the_logprobs_that_it_was_given(prompt, llm):
    """LP-03 also where the prompt is computed in chunks, and whatever is cached of it"""
    made = llm.generate(prompt, Params(temperature=1.0, seed=3, max_tokens=21, ignore_eos=True, logprobs=2))[0]
    whole = (*made.prompt_ids, *made.ids)
    scored = llm.generate([whole], Params(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert scored is not None and len(scored) == len(whole)
    for token, given, again in zip(made.ids, made.logprobs, scored[len(made.prompt_ids) :], strict=True):
        assert given.token == again.token == token
        assert again.logprob == pytest.approx(given.logprob, abs=1e-4)
        assert again.top_logprobs == pytest.approx(given.top_logprobs, abs=1e-4)


def test_a_dead_end_ends_its_own_request_only(llm):
    letters = tuple(llm.tokenizer.encode(letter)[0] for letter in "ab")
    dead = Params(grammar=Grammar("regex", "a+Z"), allowed_token_ids=letters, max_tokens=30, seed=3)
    never = Params(grammar=Grammar("regex", "[0-9]"), allowed_token_ids=letters, max_tokens=30)
    free = Params(max_tokens=30, ignore_eos=True, seed=1)
    replies = llm.generate(["x", "x", "x"], [dead, never, free])
    assert replies[0].finish == "length" and set(replies[0].text) == {"a"}
    assert replies[1].finish == "error" and "no token is possible" in replies[1].error
    assert len(replies[2].ids) == 30 and replies[2].finish == "length"


THINKS = Thinking(
    5, tuple(b"]]"), ("[[",), ("]]",), begun=True, open=True
)  # markers of two tokens each, of single bytes


@pytest.mark.parametrize("grammar", [None, Grammar("lark", 'start: t "!"\nt[lazy]: /(?s:.*)\\]\\]/')])
def test_a_thinking_budget_is_exact_alone_in_a_crowd_and_under_a_grammar(grammar, llm):
    """C.9: five tokens, then the end marker byte by byte, also in a batch with other requests."""
    letters = tuple(range(97, 123))
    ids = llm.tokenizer.encode
    allowed = tuple(ids(bytes(letters).decode())) + tuple(ids("]!"))
    close = tuple(ids("]]"))
    for seed in range(2):
        params = Params(
            seed=seed,
            max_tokens=12,
            allowed_token_ids=allowed,
            logit_bias={ids("]")[0]: -90.0},
            thinking=msgspec.structs.replace(THINKS, close=close),
            grammar=grammar,
        )
        free = Params(seed=seed, max_tokens=12, allowed_token_ids=allowed, logit_bias={ids("]")[0]: -90.0})
        alone = llm.generate("hello", params)[0]
        crowd = llm.generate(["hello", "hello", "other"], [params, free, params])
        assert tuple(alone.ids[5:7]) == close and "]" not in alone.text[:5]
        assert crowd[0].ids == alone.ids
        assert alone.ids[:5] == crowd[1].ids[:5], "until then nothing is changed"
        assert tuple(crowd[2].ids[5:7]) == close
        if grammar is not None:
            assert alone.text[7:] == "!" and alone.finish == "stop"


AB = Grammar("regex", "(ab){1,4}")


def test_a_stop_string_cuts_a_sentence_and_one_beyond_its_end_does_not(llm):
    whole = Grammar("regex", "abbc")
    for stop, text, reason in (("bb", "a", "bb"), ("c", "abb", "c"), ("abbc", "", "abbc"), ("cd", "abbc", None)):
        reply = llm.generate("x", Params(seed=1, max_tokens=9, grammar=whole, stop=(stop,)))[0]
        assert (reply.text, reply.finish, reply.stop_reason) == (text, "stop", reason), stop


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (3, "abab"), (6, "ababab"), (8, "abababab"), (30, "abababab")])
def test_min_tokens_keeps_a_sentence_going_as_long_as_it_can(least, text, temperature, llm):
    """The model prefers to end. After the longest sentence the grammar overrides min_tokens, and nothing hangs."""
    eager = {256: 100.0}
    params = Params(temperature=temperature, seed=1, max_tokens=40, min_tokens=least, grammar=AB, logit_bias=eager)
    reply = llm.generate("x", params)[0]
    assert (reply.text, reply.finish) == (text, "stop")


def test_a_sentence_that_is_over_ends_the_reply_though_ends_are_ignored(llm):
    reply = llm.generate("x", Params(seed=1, max_tokens=40, ignore_eos=True, logit_bias={256: 100.0}, grammar=AB))[0]
    assert (reply.text, reply.finish) == ("abababab", "stop")
    endless = Grammar("regex", "a+")
    reply = llm.generate("x", Params(seed=1, max_tokens=9, ignore_eos=True, logit_bias={256: 100.0}, grammar=endless))[
        0
    ]
    assert (reply.text, reply.finish) == ("a" * 9, "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_of_a_constrained_token_are_of_what_was_possible(temperature, llm):
    """They sum to one over the tokens that the grammar allows, and no others have any."""
    params = Params(temperature=temperature, seed=2, max_tokens=9, grammar=Grammar("regex", "[abc]{3}d"), logprobs=5)
    reply = llm.generate("x", params)[0]
    for number, scored in enumerate(reply.logprobs):
        possible = {value for value in scored.top_logprobs if value > -math.inf}
        allowed = set(llm.tokenizer.encode("abc" if number < 3 else "d"))
        found = {token for token, value in zip(scored.top_ids, scored.top_logprobs, strict=True) if value > -math.inf}
        assert found == allowed and scored.token in allowed
        assert sum(map(math.exp, possible)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_sampling_options_stay_within_the_grammar(temperature, llm):
    """Test penalties, biases against allowed and for forbidden tokens, truncation, and bad words."""
    a, b, c, z = (llm.tokenizer.encode(letter)[0] for letter in "abcz")
    changes = [
        {"logit_bias": {z: 100.0, a: -100.0, b: -100.0, c: -100.0}},
        {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 0.1, "frequency_penalty": -2.0},
        {"top_k": 1},
        {"top_p": 0.01, "min_p": 0.5},
        {"bad_words": ((a, a), (b, b), (c, c), (z,))},
        {"allowed_token_ids": (a, b, z)},
        {"min_tokens": 12, "stop_token_ids": (z,)},
    ]
    grammar = Grammar("regex", "[abc]{4,6}")
    asked = [
        Params(temperature=temperature, seed=seed, max_tokens=12, grammar=grammar, **change)
        for change in changes
        for seed in range(3)
    ]
    for params, reply in zip(asked, llm.generate(["x"] * len(asked), asked), strict=True):
        assert reply.finish == "stop" and re.fullmatch("[abc]{4,6}", reply.text), (params, reply.text, reply.error)
        if params.bad_words:
            assert not re.search("aa|bb|cc", reply.text)
        if params.allowed_token_ids:
            assert "c" not in reply.text
        if params.min_tokens:
            assert len(reply.text) == 6


def test_contradictory_options_fail_only_their_request(llm):
    a, b = (llm.tokenizer.encode(letter)[0] for letter in "ab")
    sentence = Grammar("regex", "ab")
    wishes = [
        Params(max_tokens=9, grammar=sentence, bad_words=((a,),)),
        Params(max_tokens=9, grammar=sentence, bad_words=((a, b),)),
        Params(max_tokens=9, grammar=sentence, allowed_token_ids=(b,)),
        Params(max_tokens=9, grammar=sentence, allowed_token_ids=(a,), logprobs=3, seed=1),
    ]
    *replies, free = llm.generate(["x"] * 5, [*wishes, Params(seed=1, max_tokens=20, ignore_eos=True)])
    for reply, text in zip(replies, ("", "a", "", "a"), strict=True):
        assert (reply.finish, reply.text) == ("error", text) and "no token is possible" in reply.error
    assert free.finish == "length" and len(free.ids) == 20
    assert llm.generate("x", Params(grammar=sentence, max_tokens=9))[0].text == "ab"
