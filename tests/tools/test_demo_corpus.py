"""The demo model's corpus: seeded, its test problems never trained, its template rendered as by transformers."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tools.demo.arithmetic import answer, columns, lines
from tools.demo.calls import scene
from tools.demo.keys import manifest_keys
from tools.demo.packing import LONG_ROW, SHORT_ROW, Feed, encode, encode_group
from tools.demo.sample import is_held_out
from tools.demo.template import render
from tools.demo_corpus import SKILLS, held_out_samples, training_samples

FOLDER = Path(__file__).resolve().parents[2] / "manifests" / "demo"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_corpus_is_the_same_for_the_same_seed_and_another_for_another():
    first, again, other = (list(islice(training_samples(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("skill", SKILLS)
def test_no_held_out_problem_is_trained(skill):
    tests = {sample.problem for sample in held_out_samples(skill, 60)}
    trained = {sample.problem for sample in islice(training_samples(3), 3000)}
    assert not tests & trained


def test_the_question_of_the_quick_start_is_held_out_in_both_orders():
    assert is_held_out("17+25")
    text = "".join(question + said for question, said in lines(random.Random(5), 20_000))
    asked = re.compile(r"\b(17 \+ 25|25 \+ 17)\b")
    assert not asked.search(text)
    for sample in islice(training_samples(4), 3000):
        assert not asked.search(f"{sample.messages}{sample.reply}")


@pytest.mark.parametrize(
    ("a", "b", "sign", "value"),
    [(17, 25, "+", 42), (999, 999, "+", 1998), (100, 7, "-", 93), (7, 300, "-", -293), (0, 0, "-", 0)],
)
def test_sums_are_right(a, b, sign, value):
    assert answer(a, b, sign).endswith(f"{a} {sign} {b} = {value}")


def test_columns_borrow_and_carry():
    assert columns(52, 17, "-") == "52 - 17: 12 - 7 = 5, 5 - 1 - 1 = 3."
    assert columns(749, 647, "+") == "749 + 647: 9 + 7 = 16, 4 + 4 + 1 = 9, 7 + 6 = 13."


def test_every_manifest_key_is_asked_about():
    paths = {key.path for key in manifest_keys()}
    assert {"model", "model.source.path", "endpoints.port"} <= paths
    rng = random.Random(5)
    trained, tested = ({SKILLS["keys"](rng, held_out).problem.split()[1] for _ in range(3000)} for held_out in (0, 1))
    assert trained == paths and len(tested) > 0.9 * len(paths)


def test_a_described_object_and_a_call_are_valid_json():
    for sample in held_out_samples("json", 200):
        assert isinstance(json.loads(sample.reply), dict)
    for sample in held_out_samples("call", 200):
        called = json.loads(sample.reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        assert set(called["arguments"]) <= set(schemas[called["name"]]["properties"])
        assert len(schemas) == len(sample.tools), "two offered tools have one name"


@pytest.mark.parametrize("thinking", [False, True])
def test_prompts_are_those_that_transformers_renders(tokenizer, thinking):
    samples = [sample for skill in SKILLS for sample in held_out_samples(skill, 3)]
    for sample in [*samples, *islice(training_samples(11), 60)]:
        expected = tokenizer.apply_chat_template(
            list(sample.messages),
            tools=list(sample.tools) or None,
            add_generation_prompt=True,
            enable_thinking=thinking,
            tokenize=False,
        )
        assert render(sample.messages, sample.tools, thinking=thinking) == expected


def test_thinking_is_off_unless_asked_for(tokenizer):
    turn = [{"role": "user", "content": "Hi"}]
    default = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert default == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    thinking = tokenizer.apply_chat_template(turn, add_generation_prompt=True, enable_thinking=True, tokenize=False)
    assert thinking == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_calls_and_results_have_the_layout_of_hermes(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    as_text = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for one in (call, as_text):
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [one]},
            {"role": "tool", "content": "2"},
        ]
        text = tokenizer.apply_chat_template(turns, tools=[tool], add_generation_prompt=True, tokenize=False)
        assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
        assert (
            '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
        )
        assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in (
        "",
        " ",
        "17 + 25",
        "  two  spaces\n\n",
        "naïve Ünïcode 漢字 🙂 \x00\x7f",
        "<think>x</think> <tool_call>",
        "\r\n\ttab",
    ):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("x1234567890") == ["x", *"1234567890"]


def test_samples_that_share_tools_share_the_system_turn(tokenizer):
    rng = random.Random(2)
    group = next(s for s in (scene(rng, held_out_samples("talk", 1)[0]) for _ in range(50)) if len(s) > 1)
    shared, *rests = encode_group(tokenizer.backend_tokenizer, group)
    for sample, rest in zip(group, rests, strict=True):
        assert shared.ids + rest.ids == encode(tokenizer.backend_tokenizer, sample).ids
        assert rest.start == len(shared.ids)


def test_packed_rows_hold_no_more_than_their_length(tokenizer):
    feed = Feed(tokenizer.backend_tokenizer, 5)
    for rows, longest in ((feed.short_rows(4), SHORT_ROW), (feed.long_rows(2), LONG_ROW)):
        for row in rows:
            assert 0 < len(row.ids) <= longest
            assert len(row.ids) == len(row.targets) == len(row.positions) == len(row.sample) == len(row.parent)


def test_batches_stay_full_over_a_long_run(tokenizer):
    feed = Feed(tokenizer.backend_tokenizer, 6)
    for _ in range(12):  # a group too long for any row must not come back for ever and crowd out the others
        rows = feed.short_rows(8) + feed.short_rows(8)
        assert sum(len(row.ids) for row in rows) > 0.6 * 16 * SHORT_ROW
        assert sum(token >= 0 for row in rows for token in row.targets) > 100
