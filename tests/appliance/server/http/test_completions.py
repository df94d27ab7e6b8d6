"""/v1/completions (docs/http.md): every id against scripted engines."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

PATH = "/v1/completions"


def choice(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {"prompt": "hello", **body})
    assert status == 200, reply
    only: dict[str, Any] = reply["choices"][0]
    return only


def error(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {"prompt": "hello", **body})
    assert status == 400, reply
    assert not gateway.submits
    fault: dict[str, Any] = reply["error"]
    return fault


def texts(records: list[Any], index: int = 0) -> list[str]:
    return [each["text"] for record in records for each in record["choices"] if each["index"] == index]


@pytest.mark.parametrize("rank,sizes", [(1, {0: 1, 1: 1, 5: 5}), (9, {0: 1, 1: 2, 5: 6})])
def test_logprobs_give_k_entries_and_one_more_if_the_token_is_not_among_them(
    gateway: Any, rank: int, sizes: dict[int, int]
) -> None:
    """CO-01: 0 gives exactly the token, null gives null."""
    gateway.rank = rank
    # The synthetic neighbours of each token need distinct texts, so ids come from the plain part of the vocabulary.
    gateway.gives([100, 120, 140])
    for count, size in sizes.items():
        found = choice(gateway, {"logprobs": count})["logprobs"]
        assert [len(top) for top in found["top_logprobs"]] == [size] * 3
    assert choice(gateway, {})["logprobs"] is None


def test_echo_with_logprobs_covers_the_prompt_from_offset_zero(gateway: Any) -> None:
    """CO-02: the first token has no score, offsets grow by the tokens' lengths."""
    prompt = gateway.ids("hello world is 42")
    found = choice(gateway.says(" yes"), {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 8})
    lists = found["logprobs"]
    assert found["text"] == "hello world is 42 yes"
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert None not in lists["token_logprobs"][1:]
    assert {len(values) for values in lists.values()} == {len(prompt) + len(gateway.ids(" yes")) + 1}
    lengths = [len(token) for token in lists["tokens"]]
    assert lists["text_offset"] == [sum(lengths[:at]) for at in range(len(lengths))]
    assert "".join(lists["tokens"]) == "hello world is 42 yes<|im_end|>"


def test_echo_without_a_reply_only_scores_the_prompt(gateway: Any) -> None:
    """CO-03: max_tokens 0 shows no token, and none is counted."""
    prompt = gateway.ids("hello world")
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    status, reply = gateway.says(" more", finish="length").post(PATH, body)
    assert status == 200
    found = reply["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("hello world", "length")
    assert len(found["logprobs"]["tokens"]) == len(prompt)
    assert reply["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt)}


@pytest.mark.parametrize("rank", [1, 3])
def test_lm_eval_reads_greedy_from_equal_floats(gateway: Any, rank: int) -> None:
    """CO-04: the prompt's token and the most likely one are both there, with bit-identical floats."""
    gateway.rank = rank
    prompt = gateway.ids("hello world 42")
    lists = choice(
        gateway.says("x", finish="length"),
        {"prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0},
    )["logprobs"]
    assert len(lists["token_logprobs"]) == len(prompt) + 1
    for value, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
        assert value in top.values()
        assert (max(top.values()) != value) == (rank != 1)


@pytest.mark.parametrize("rank,count,size", [(1, 0, 1), (1, 3, 3), (7, 0, 1), (7, 3, 4)])
def test_prompt_logprobs_map_ids_to_scores(gateway: Any, rank: int, count: int, size: int) -> None:
    """CO-05: null first, then k entries, one more if the actual token is not among them."""
    gateway.rank = rank
    prompt = gateway.ids("hello world")
    found = choice(gateway.says("x"), {"prompt": prompt, "prompt_logprobs": count})["prompt_logprobs"]
    assert found[0] is None
    for token, scores in zip(prompt[1:], found[1:], strict=True):
        assert len(scores) == size
        assert scores[str(token)] == {
            "logprob": -0.5 if rank == 1 else -7.25,
            "rank": rank,
            "decoded_token": gateway.tokenizer.decode([token]),
        }


def test_the_whole_vocabulary_needs_a_limit_of_minus_one(gateway: Any, make_gateway: Callable[..., Any]) -> None:
    """CO-05: -1 is refused unless limits.max_logprobs is -1."""
    assert "prompt logprobs" in error(gateway, {"prompt_logprobs": -1})["message"]
    free = make_gateway(**{"limits.max_logprobs": -1})
    found = choice(free.says("x"), {"prompt": "ab cd", "prompt_logprobs": -1, "logprobs": -1})
    assert len(found["prompt_logprobs"][1]) == 420
    assert free.submits[0].sampling.logprobs == free.submits[0].sampling.prompt_logprobs == -1


def test_too_many_logprobs_are_refused_and_the_next_request_is_served(gateway: Any) -> None:
    """CO-06"""
    fault = error(gateway, {"logprobs": 21})
    assert fault["message"] == "Requested sample logprobs of 21, which is greater than max allowed: 20"
    assert choice(gateway.says("ok"), {"logprobs": 20})["text"] == "ok"


def test_a_prompt_of_ids_equals_its_text(gateway: Any) -> None:
    """CO-07"""
    ids = gateway.ids("hello world")
    gateway.says("ok")
    replies = [gateway.post(PATH, {"prompt": prompt})[1] for prompt in ("hello world", ids)]
    assert gateway.submits[0].prompt == gateway.submits[1].prompt == tuple(ids)
    assert (
        replies[0]["usage"]
        == replies[1]["usage"]
        == {
            "prompt_tokens": len(ids),
            "completion_tokens": len(gateway.ids("ok")) + 1,
            "total_tokens": len(ids) + len(gateway.ids("ok")) + 1,
        }
    )


@pytest.mark.parametrize("prompt", [["a b", "a b"], [[70, 71], [70, 71]]])
def test_several_prompts_are_choices_in_their_order(gateway: Any, prompt: list[Any]) -> None:
    """CO-08"""
    status, reply = gateway.says("one").post(PATH, {"prompt": prompt, "temperature": 0})
    assert [(each["index"], each["text"]) for each in reply["choices"]] == [(0, "one"), (1, "one")]
    assert gateway.submits[0].prompt == gateway.submits[1].prompt
    assert reply["usage"]["prompt_tokens"] == 2 * len(gateway.submits[0].prompt)


def test_choices_have_consecutive_seeds_and_the_prompt_counts_once(gateway: Any) -> None:
    """CO-09: child i of seed s has seed s + i, as signed 64 bit; texts end at their own lengths."""
    body = {"prompt": "hello", "n": 3, "seed": 42, "temperature": 1}
    status, reply = gateway.says("a", "b c d", "e f").post(PATH, body)
    assert [each["text"] for each in reply["choices"]] == ["a", "b c d", "e f"]
    assert [submit.sampling.seed for submit in gateway.submits] == [42, 43, 44]
    assert reply["usage"]["prompt_tokens"] == len(gateway.ids("hello"))
    gateway.post(PATH, {**body, "seed": 2**63 - 1})
    assert [submit.sampling.seed for submit in gateway.submits[3:]] == [2**63 - 1, -(2**63), -(2**63) + 1]


@pytest.mark.parametrize(
    "path,prompt",
    [(PATH, {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_choice_is_the_request_that_its_own_seed_makes_alone(gateway: Any, path: str, prompt: dict[str, Any]) -> None:
    """SA-06: child i of seed s is submitted as a single request of seed s + i is, all but the id."""
    body = {**prompt, "temperature": 1, "logit_bias": {"70": 1}, "max_tokens": 5}
    gateway.says("a").post(path, {**body, "n": 3, "seed": 42})
    for index in range(3):
        gateway.post(path, {**body, "seed": 42 + index})
    children, singles = gateway.submits[:3], gateway.submits[3:]
    assert [msgspec.structs.replace(each, id="") for each in children] == [
        msgspec.structs.replace(each, id="") for each in singles
    ]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_each_request_has_its_own(gateway: Any, seed: int | None) -> None:
    gateway.says("a")
    for _ in range(2):
        choice(gateway, {"seed": seed, "n": 2, "temperature": 1})
    seeds = [submit.sampling.seed for submit in gateway.submits]
    assert seeds[1] == seeds[0] + 1 and seeds[0] != seeds[2]


def test_finish_and_stop_reasons(gateway: Any) -> None:
    """CO-10 ST-04: a string for a stop string, an id for a stop token, null for the end token and for length."""
    gateway.says("one two stop three", finish="length")
    found = choice(gateway, {"stop": ["stop", "never"]})
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("one two ", "stop", "stop")
    found = choice(gateway.says("one"), {})
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("one", "stop", None)
    found = choice(gateway.gives([*gateway.ids("one"), 77], "stop", reason=77), {"stop_token_ids": [77]})
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("one", "stop", 77)
    found = choice(gateway.says("one", finish="length"), {})
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("one", "length", None)


@pytest.mark.parametrize("side,kept", [("right", slice(None, 4)), ("left", slice(-4, None))])
def test_the_prompt_is_truncated_at_the_side_that_is_asked(gateway: Any, side: str, kept: slice) -> None:
    """CO-11"""
    ids = list(range(60, 71))
    body = {"prompt": ids, "truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    assert choice(gateway.says("x"), body)["prompt_token_ids"] == ids[kept]


def test_truncation_to_the_window_leaves_room_for_the_reply(gateway: Any) -> None:
    body = {"prompt": [70] * 300, "truncate_prompt_tokens": -1, "max_tokens": 16}
    choice(gateway.says("x"), body)
    assert (len(gateway.submits[0].prompt), gateway.submits[0].max_tokens) == (240, 16)


def test_beam_search_is_rejected_also_in_a_stream(gateway: Any) -> None:
    """CO-12"""
    fault = error(gateway, {"stream": True, "use_beam_search": True})
    assert fault["message"] == "Streaming is not currently supported with beam search"
    assert error(gateway, {"use_beam_search": True})["param"] == "use_beam_search"


@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("each", [1, 2, 100])
def test_the_last_chunk_of_a_choice_has_its_finish_and_its_last_text(gateway: Any, finish: str, each: int) -> None:
    """CO-20 CO-21: exactly one finish per choice, one choice a chunk, texts add up to the whole."""
    text = "hello world 中文 🎉 stop"
    gateway.says(text, finish=finish, each=each)
    body = {"prompt": "hello", "n": 2, "temperature": 1}
    whole = gateway.post(PATH, body)[1]["choices"]
    records = gateway.stream(PATH, body)
    assert all(len(record["choices"]) == 1 for record in records)
    for index in range(2):
        own = [record["choices"][0] for record in records if record["choices"][0]["index"] == index]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [finish]
        assert "".join(part["text"] for part in own) == whole[index]["text"] == text
        assert all("stop_reason" not in part for part in own[:-1]) and own[-1]["stop_reason"] is None
        assert own[-1]["text"] or finish == "stop"


def test_buffered_text_is_never_withdrawn(gateway: Any) -> None:
    """CO-22: the text ends exactly before the stop string."""
    gateway.says("one EN two END three", finish="length")
    records = gateway.stream(PATH, {"prompt": "a", "stop": "END"})
    assert "".join(texts(records)) == "one EN two "
    assert records[-1]["choices"][0]["stop_reason"] == "END"
    assert gateway.router.generations[0].stopped


def test_unfinished_characters_are_empty_chunks(gateway: Any) -> None:
    """CO-23: no U+FFFD is sent before the complete character."""
    gateway.says("🎉👩‍👩‍👧", finish="length")
    found = texts(gateway.stream(PATH, {"prompt": "a"}))
    assert "".join(found) == "🎉👩‍👩‍👧"
    assert "" in found and not any("\ufffd" in text for text in found)


def test_an_unfinished_character_at_the_end_is_not_sent(gateway: Any) -> None:
    ids = gateway.ids("a🎉")
    assert choice(gateway.gives(ids[:-1]), {})["text"] == "a"


def test_echo_comes_in_the_first_chunk_of_each_choice(gateway: Any) -> None:
    """CO-24: offsets continue from chunk to chunk."""
    gateway.says(" big world", finish="length")
    records = gateway.stream(PATH, {"prompt": "hello", "echo": True, "n": 2, "temperature": 1, "logprobs": 1})
    for index in range(2):
        own = [record["choices"][0] for record in records if record["choices"][0]["index"] == index]
        assert own[0]["text"].startswith("hello")
        assert "".join(part["text"] for part in own) == "hello big world"
        tokens = [token for part in own for token in part["logprobs"]["tokens"]]
        offsets = [offset for part in own for offset in part["logprobs"]["text_offset"]]
        assert offsets == [sum(map(len, tokens[:at])) for at in range(len(tokens))]


def test_a_faulty_streaming_request_is_a_plain_error(gateway: Any) -> None:
    """CO-25"""
    assert error(gateway, {"stream": True, "temperature": 3})["param"] == "temperature"


def test_a_failure_in_a_stream_is_a_record_and_the_terminator(gateway: Any) -> None:
    """ER-17"""
    gateway.says("one", finish="length").router.failure = RuntimeError("secret")
    gateway.router.reply = lambda submit: []
    lines = gateway.lines(PATH, {"prompt": "a"})
    assert lines[-1] == "data: [DONE]"
    fault = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert fault["code"] == 500 and "secret" not in fault["message"]


@pytest.mark.parametrize(
    "options,every,last",
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
def test_stream_options_say_which_chunks_have_usage(
    gateway: Any, options: dict[str, Any] | None, every: bool, last: bool
) -> None:
    """The usage chunk is the last one and has no choices."""
    gateway.says("one two three")
    records = gateway.stream(PATH, {"prompt": "hello", "stream_options": options})
    assert [("usage" in record) for record in records[:-1]] == [every] * (len(records) - 1)
    assert ("usage" in records[-1]) == last and (records[-1]["choices"] == []) == last
    if every:
        counts = [record["usage"]["completion_tokens"] for record in records[:-1]]
        assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("options", [{}, {"include_usage": None}, {"include_usage": True}])
def test_stream_options_without_a_stream_are_refused(gateway: Any, options: dict[str, Any]) -> None:
    assert error(gateway, {"stream_options": options})["param"] == "stream_options"


@pytest.mark.parametrize("compat", ["openai", "vllm"])
def test_usage_details_follow_the_profile(make_gateway: Callable[..., Any], compat: str) -> None:
    """Cached tokens are reported even if they are 0, and in a stream only in the usage chunk."""
    gateway = make_gateway(**{"endpoints.compat": compat})
    for cached in (0, 3):
        body = {"prompt": "hello world", "n": 2, "temperature": 1}
        usage = gateway.says("x", cached_tokens=cached).post(PATH, body)[1]["usage"]
        details = (
            {"prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0}} if compat == "openai" else {}
        )
        assert {key: value for key, value in usage.items() if key.endswith("details")} == details
        options = {"include_usage": True, "continuous_usage_stats": True}
        *others, last = gateway.stream(PATH, {**body, "stream_options": options})
        assert last["usage"] == usage
        assert not any("prompt_tokens_details" in record["usage"] for record in others)


def test_a_stop_string_over_three_tokens_ends_text_ids_and_logprobs_together(gateway: Any) -> None:
    """ST-01 LP-04: tokens after the end of the stop string are dropped with their logprobs."""
    ids = [gateway.tokenizer.convert_tokens_to_ids(letter) for letter in "abcdef"]
    gateway.gives(ids, each=6)
    found = choice(gateway, {"stop": ["bcd", "zz"], "logprobs": 1, "return_token_ids": True, "max_tokens": 20})
    assert found["text"] == "a"
    assert found["token_ids"] == ids[:4]
    assert found["logprobs"]["tokens"] == list("abcd")


def test_a_stop_string_in_the_prompt_does_not_stop_the_reply(gateway: Any) -> None:
    """ST-02"""
    found = choice(gateway.says("D and END"), {"prompt": "say EN", "stop": "END", "echo": True})
    assert found["text"] == "say END and "


def test_an_ignored_end_token_is_hidden_text(gateway: Any) -> None:
    """ST-03: the engine continues up to max_tokens; the token is counted and not shown."""
    ids = [*gateway.ids("one"), gateway.tokenizer.eos_id, *gateway.ids(" two")]
    status, reply = gateway.gives(ids).post(PATH, {"prompt": "a", "ignore_eos": True, "max_tokens": len(ids)})
    assert gateway.submits[0].ignore_eos
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("one two", "length")
    assert reply["usage"]["completion_tokens"] == len(ids)


def test_an_abort_ends_with_the_text_so_far(gateway: Any) -> None:
    """ST-05: the text includes the part held back for a possible stop string."""
    found = choice(gateway.says("one tw", finish="abort"), {"stop": "two"})
    assert (found["text"], found["finish_reason"]) == ("one tw", "abort")


def test_the_stop_string_stays_if_asked_and_the_stop_tokens_text_too(gateway: Any) -> None:
    """C.5"""
    assert (
        choice(gateway.says("one stop two"), {"stop": "stop", "include_stop_str_in_output": True})["text"] == "one stop"
    )
    ids = gateway.ids("one")
    letter = gateway.tokenizer.convert_tokens_to_ids("z")
    gateway.gives([*ids, letter], "stop", reason=letter)
    assert choice(gateway, {"stop_token_ids": [letter]})["text"] == "one"
    assert choice(gateway, {"stop_token_ids": [letter], "include_stop_str_in_output": True})["text"] == "onez"


def test_special_tokens_are_shown_if_asked_but_not_the_one_that_ended(gateway: Any) -> None:
    gateway.says("a<|im_start|>b")
    assert choice(gateway, {})["text"] == "ab"
    assert choice(gateway, {"skip_special_tokens": False})["text"] == "a<|im_start|>b"


def test_tokens_can_be_named_by_id(gateway: Any) -> None:
    found = choice(gateway.gives([70, 71]), {"logprobs": 1, "return_tokens_as_token_ids": True})["logprobs"]
    assert found["tokens"] == ["token_id:70", "token_id:71"]
    assert [list(top) for top in found["top_logprobs"]] == [["token_id:70"], ["token_id:71"]]


def test_line_separators_are_escaped_in_streams(gateway: Any) -> None:
    """Clients that split lines on them must not lose a record."""
    text = "a\u0085b\u2028c\u2029d"
    lines = gateway.says(text).lines(PATH, {"prompt": "a"})
    assert not any(character in line for line in lines for character in "\u0085\u2028\u2029")
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text


def test_infinite_scores_become_numbers(gateway: Any) -> None:
    from engine.api.messages import Delta, Logprob

    score = Logprob(70, float("-inf"), 9, (71,), (float("-inf"),))
    gateway.router.reply = lambda submit: [Delta(submit.id, (70,), (score,), finish="length")]
    found = choice(gateway, {"logprobs": 1})["logprobs"]
    assert found["token_logprobs"] == [-9999.0] and set(found["top_logprobs"][0].values()) == {-9999.0}


def test_unknown_fields_are_ignored_and_nulls_are_defaults(gateway: Any) -> None:
    body = {"guided_json": None, "nothing": 5, "user": "x", "n": None, "seed": None, "stop": None, "logit_bias": None}
    assert choice(gateway.says("x"), {**body, "stream": None, "max_tokens": None})["text"] == "x"
    assert gateway.submits[0].max_tokens == 16


def test_a_reply_has_the_fields_of_the_api(gateway: Any) -> None:
    status, reply = gateway.says("x").post(PATH, {"prompt": "a", "model": "alias"}, **{"X-Request-Id": "mine"})
    assert set(reply) >= {"id", "object", "created", "model", "choices", "system_fingerprint", "usage"}
    assert (reply["id"], reply["object"], reply["model"]) == ("cmpl-mine", "text_completion", "qwen")
    assert set(reply["choices"][0]) >= {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_logprobs"}


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], {"a": 1}, 3, None, ["a", [1]]])
def test_a_prompt_that_is_none_is_refused(gateway: Any, prompt: Any) -> None:
    assert error(gateway, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[420], [-1], [[1], [2**40]]])
def test_ids_outside_the_vocabulary_are_refused(gateway: Any, prompt: list[Any]) -> None:
    """ER-22"""
    assert "out of vocabulary" in error(gateway, {"prompt": prompt})["message"]


@pytest.mark.parametrize(
    "tokens,start",
    [
        (257, "This model's maximum context length is 256 tokens. However, your prompt contains 257 input tokens"),
        (256, "The prompt's 256 tokens plus the number of requested output tokens (at least 1) is longer than"),
    ],
)
def test_a_prompt_that_fills_the_window_is_refused(gateway: Any, tokens: int, start: str) -> None:
    """ER-06 ER-07"""
    fault = error(gateway, {"prompt": [70] * tokens})
    assert (fault["type"], fault["param"]) == ("BadRequestError", "input_tokens")
    assert fault["message"].startswith(start)


def test_a_reply_longer_than_the_window_is_refused_and_one_longer_than_the_rest_is_cut(gateway: Any) -> None:
    """ER-09"""
    assert error(gateway, {"max_tokens": 257})["message"] == "max_tokens=257 cannot be greater than max_model_len=256."
    choice(gateway.says("x"), {"prompt": [70] * 200, "max_tokens": 256})
    assert gateway.submits[0].max_tokens == 56


def test_a_truncation_beyond_the_window_is_refused(gateway: Any) -> None:
    """ER-11"""
    assert error(gateway, {"truncate_prompt_tokens": 257})["param"] == "truncate_prompt_tokens"


RANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "n must be at least 1, got 0"),
    ({"n": 129, "temperature": 1}, "n", "n must be at most 128"),
    ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2"),
    ({"temperature": 2.1}, "temperature", "temperature must be in [0, 2], got 2.1"),
    ({"temperature": -0.1}, "temperature", "temperature must be in [0, 2], got -0.1"),
    ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0"),
    ({"top_p": 1.1}, "top_p", "top_p must be in (0, 1], got 1.1"),
    ({"top_k": -2}, "top_k", "top_k must be 0 (disable), or at least 1, got -2"),
    ({"min_p": 1.5}, "min_p", "min_p must be in [0, 1], got 1.5"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be in [-2, 2], got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty must be in [-2, 2], got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be greater than zero, got 0"),
    ({"stop": ["a", ""]}, "stop", "stop cannot contain an empty string."),
    ({"stop": ["a"] * 17}, "stop", "stop has 17 strings"),
    ({"stop_token_ids": [420]}, "stop_token_ids", "token_id(s) [420] in stop_token_ids contain out-of-vocab token ids"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "min_tokens must be less than or equal to max_tokens=4"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "Requested prompt logprobs of 21"),
    ({"logit_bias": {"420": 1}}, "logit_bias", "token_id(s) [420] in logit_bias contain out-of-vocab"),
    (
        {"logit_bias": {"a": 1}},
        "logit_bias",
        "logit_bias contains key(s) that cannot be converted to integer token IDs",
    ),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids is not None and empty!"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token_id(s) [-1] in allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words", "bad_words cannot contain an empty string."),
    ({"cache_salt": ""}, "cache_salt", "cache_salt must have 1 to 128 characters"),
    ({"cache_salt": "a/b"}, "cache_salt", "cache_salt must have 1 to 128 characters"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"structured_outputs": {}}, "structured_outputs", "You must use one kind"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "You can only use one kind"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format of type json_schema needs"),
]


@pytest.mark.parametrize("body,param,start", RANGES, ids=[f"{param}-{at}" for at, (_, param, _) in enumerate(RANGES)])
def test_each_range_has_its_error(gateway: Any, body: dict[str, Any], param: str, start: str) -> None:
    """ER-10: 400, the field in param, the message that clients know."""
    fault = error(gateway, body)
    assert (fault["type"], fault["param"]) == ("BadRequestError", param)
    assert fault["message"].startswith(start)


def test_numbers_beyond_64_bit_are_refused_by_kind(gateway: Any) -> None:
    """ER-20 ER-21"""
    assert "less_than_equal" in error(gateway, {"seed": 2**63})["message"]
    assert "greater_than_equal" in error(gateway, {"seed": -(2**63) - 1})["message"]
    assert error(gateway, {"priority": 2**64})["code"] == 400


@pytest.mark.parametrize("kind", ["regex", "grammar", "choice", "json"])
def test_invalid_grammars_are_refused_before_generation(gateway: Any, kind: str) -> None:
    """SO-02"""
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    wrong: dict[str, list[Any]] = {
        "regex": ["[.*", "", "a\0"],
        "grammar": ["start: missing", "?!"],
        "choice": [[]],
        "json": [{"type": "objekt"}, "no json", "[]", deep],
    }
    for value in wrong[kind]:
        assert error(gateway, {"structured_outputs": {kind: value}})["param"] == "structured_outputs"


KINDS: dict[str, Any] = {"json": {}, "regex": "a", "choice": ["a"], "grammar": 'start: "a"', "json_object": True}


@pytest.mark.parametrize(
    "path,prompt",
    [(PATH, {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_one_kind_of_structured_output_is_served_and_no_other_number(
    gateway: Any, path: str, prompt: dict[str, Any]
) -> None:
    """SO-07: none, two in one field, one in each field."""

    def refusal(**body: Any) -> str:
        status, reply = gateway.post(path, {**prompt, **body})
        assert (status, reply["error"]["param"]) == (400, "structured_outputs"), reply
        message: str = reply["error"]["message"]
        return message

    assert refusal(structured_outputs={}).startswith("You must use one kind")
    assert refusal(structured_outputs=dict.fromkeys(KINDS)).startswith("You must use one kind")
    for one, other in itertools.combinations(KINDS, 2):
        message = refusal(structured_outputs={one: KINDS[one], other: KINDS[other]})
        assert message.startswith("You can only use one kind") and one in message and other in message
    for one in KINDS:
        both = {"structured_outputs": {one: KINDS[one]}, "response_format": {"type": "json_object"}}
        assert refusal(**both).startswith("You can only use one kind")
    assert not gateway.submits
    gateway.says("a")
    for one in KINDS:
        assert gateway.post(path, {**prompt, "structured_outputs": {one: KINDS[one]}})[0] == 200
    assert all(submit.grammar is not None for submit in gateway.submits) and len(gateway.submits) == len(KINDS)


def test_languages_reach_the_engine(gateway: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for body in ({"structured_outputs": {"json": schema}}, {"response_format": form}):
        choice(gateway.says("x"), body)
        grammar = gateway.submits[-1].grammar
        assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    choice(gateway, {"structured_outputs": {"regex": "a+"}})
    assert (gateway.submits[-1].grammar.kind, gateway.submits[-1].grammar.text) == ("regex", "a+")


def test_resolved_sampling_reaches_the_engine(make_gateway: Callable[..., Any]) -> None:
    """The request wins over the server's defaults, those over the API's."""
    from appliance.config.gateway import SamplingDefaults

    gateway = make_gateway(sampling=SamplingDefaults(temperature=0.6, top_k=20), eos_token_ids=(2, 5))
    body = {"top_k": -1, "logit_bias": {"70": 500, "71": -1}, "bad_words": ["hello"], "cache_salt": "s", "priority": 3}
    choice(gateway.says("x"), body)
    submit = gateway.submits[0]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.6, 0, 1.0)
    assert submit.sampling.logit_bias == {70: 100.0, 71: -1.0}
    assert submit.sampling.bad_words == (tuple(gateway.ids("hello")), tuple(gateway.ids(" hello")))
    assert (submit.salt, submit.priority, submit.eos_token_ids) == ("s", 3, (2, 5))


@pytest.mark.parametrize("given,used", [(0, 0), (1e-6, 0), (0.001, 0.01), (0.5, 0.5)])
def test_tiny_temperatures_are_greedy_or_raised(gateway: Any, given: float, used: float) -> None:
    """SA-10"""
    choice(gateway.says("x"), {"temperature": given, "top_k": 5, "top_p": 0.5, "min_p": 0.1})
    sampling = gateway.submits[0].sampling
    assert sampling.temperature == used
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == ((0, 1.0, 0.0) if used == 0 else (5, 0.5, 0.1))


def test_the_salt_may_come_as_a_header(gateway: Any) -> None:
    """H #20: for gateways that cannot change bodies; the body wins."""
    gateway.says("x").post(PATH, {"prompt": "a"}, **{"X-Cache-Salt": "tenant", "X-Vllm-Priority": "7"})
    gateway.post(PATH, {"prompt": "a", "cache_salt": "own"}, **{"X-Cache-Salt": "tenant"})
    assert [(submit.salt, submit.priority) for submit in gateway.submits] == [("tenant", 7), ("own", 0)]


def test_the_servers_limit_cuts_every_reply(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(**{"limits.max_output_tokens": 5})
    choice(gateway.says("x"), {"max_tokens": 50, "min_tokens": 20})
    assert (gateway.submits[0].max_tokens, gateway.submits[0].sampling.min_tokens) == (5, 5)


def test_the_official_client_reads_replies_and_streams(gateway: Any) -> None:
    gateway.says("hello world")
    whole = gateway.openai(lambda client: client.completions.create(model="qwen", prompt="a", n=2, temperature=1))
    assert [each.text for each in whole.choices] == ["hello world"] * 2

    async def streamed(client: Any) -> str:
        parts = await client.completions.create(model="qwen", prompt="a", stream=True)
        return "".join([part.choices[0].text async for part in parts])

    assert gateway.openai(streamed) == "hello world"
