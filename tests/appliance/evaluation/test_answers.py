"""Answers in replies, and the statistics of `slipway eval`, compared with brute force."""

import itertools
import math
import random
import re
from decimal import Decimal

import pytest

from appliance.evaluation.answers import chosen_letter, extracted, final_number, normalized
from appliance.evaluation.client import Token, last_tokens
from appliance.evaluation.samples import windows
from appliance.evaluation.statistics import mcnemar, perplexity, perplexity_interval, wilson
from appliance.evaluation.summary import compare


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50 in total of 3 days", "1234.50"),
        ("#### 7\nQuestion: 9 apples", "7"),
        ("#### 5\nwrong, #### 6", "6"),
        (r"so \boxed{42} of 50", "42"),
        ("#### nothing, but 12", "12"),
        ("The answer is 18.", "18"),
        ("It is -3", "-3"),
        ("It is \u22123.5%", "-3.5"),
        ("a range of 10-12", "12"),
        ("10 - 12 = -2", "-2"),
        ("costs -$5", "-5"),
        ("1,2 and 3", "3"),
        ("0.5 or .25", "0.25"),
        ("H2O and x4", None),
        ("1234567", "1234567"),
        ("", None),
        ("none", None),
    ],
)
def test_the_final_number_of_a_reply(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B.", "B"),
        ("(C) Paris", "C"),
        ("**D**", "D"),
        ("B. Paris, because A is wrong", "B"),
        ("A capital city is B", "B"),
        ("A is right", "A"),
        ("A or B", None),
        ("A capital city", None),
        ("A capital city. The answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("The correct choice is **D**.", "D"),
        ("The answer is A. No, the answer is B.", "B"),
        (r"$\boxed{C}$", "C"),
        (r"\boxed{\text{D}}", "D"),
        ("Paris, so it must be C", "C"),
        ("Either A or B", None),
        ("E", None),
        ("Because", None),
        ("b", None),
        ("", None),
    ],
)
def test_the_letter_of_a_reply(text, letter):
    assert chosen_letter(text, 4) == letter


def test_letters_after_the_number_of_choices_are_no_answers():
    assert chosen_letter("E", 5) == "E" and chosen_letter("C", 2) is None


def test_texts_are_compared_without_case_space_and_final_period():
    assert normalized("  The  Rhine.\n") == normalized("the rhine") != normalized("a rhine")
    assert normalized("ﬁve") == "five"


@pytest.mark.parametrize(
    ("pattern", "found"), [(r"is (\w+)", "two"), (r"\d+", "22"), (r"x|(y)", None), (r"(nope)|is (one)", "one")]
)
def test_the_last_match_or_its_group_is_extracted(pattern, found):
    assert extracted("it is one 11, it is two 22", re.compile(pattern)) == found


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_wilson_limits_are_where_the_normal_test_rejects(count):
    """Bisection of the definition: the limits p satisfy |k/n − p| = z·√(p(1−p)/n)."""
    z = 1.959963984540054

    def inside(p, share):
        return abs(share - p) <= z * math.sqrt(p * (1 - p) / count)

    for successes in range(count + 1):
        share = successes / count
        for limit, end in zip(wilson(successes, count), (0.0, 1.0), strict=True):
            near, far = share, end
            for _ in range(60):
                middle = (near + far) / 2
                near, far = (middle, far) if inside(middle, share) else (near, middle)
            assert limit == pytest.approx(near, abs=1e-9)
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_of_8_of_10_is_the_published_interval():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)


@pytest.mark.parametrize("total", range(9))
def test_mcnemar_is_the_share_of_coin_sequences_at_least_as_extreme(total):
    for lost in range(total + 1):
        extreme = max(lost, total - lost)
        sums = [sum(each) for each in itertools.product((0, 1), repeat=total)]
        share = sum(max(each, total - each) >= extreme for each in sums) / len(sums)
        assert mcnemar(lost, total - lost) == pytest.approx(share)


def test_mcnemar_of_many_samples_does_not_overflow():
    assert mcnemar(700, 700) == 1.0 and 0 < mcnemar(600, 800) < 1e-6
    assert mcnemar(0, 1200) < 1e-300


def test_perplexity_weighs_texts_by_their_tokens_and_its_interval_contains_it():
    parts = [(-2.0, 1), (-3.0, 4), (0.0, 0)]
    assert perplexity(parts) == pytest.approx(math.exp(1.0))
    assert math.isnan(perplexity([])) and all(map(math.isnan, perplexity_interval(parts[:1], 0)))
    generator = random.Random(1)
    many = [(-20 * generator.uniform(1, 2), 20) for _ in range(40)]
    low, high = perplexity_interval(many, 0)
    assert low < perplexity(many) < high
    # the normal approximation of the mean of logarithms
    logs = [-value / 20 for value, _ in many]
    mean = sum(logs) / 40
    error = math.sqrt(sum((each - mean) ** 2 for each in logs) / 39 / 40)
    assert (math.log(low), math.log(high)) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=error / 2)
    assert perplexity_interval(many, 0) == (low, high) != perplexity_interval(many, 1)


@pytest.mark.parametrize(
    "text", ["", "one", "  one two\nthree  ", "a " * 50, "x" * 30 + " y", "ends \n\n\n", "a\n" + " " * 40 + "b"]
)
@pytest.mark.parametrize("characters", [1, 7, 10])
def test_windows_join_to_the_text_and_divide_it_at_white_space(text, characters):
    found = windows(text, characters)
    assert "".join(found) == (text if text.strip() else "")
    for window in found:
        assert len(window) <= characters or len(window.split()) == 1


@pytest.mark.parametrize(
    ("text", "last"), [(" B", [" B"]), ("B", [" B"]), (": B", [":", " B"]), ("Answer: B", ["The Answer", ":", " B"])]
)
def test_the_last_tokens_contain_the_text(text, last):
    tokens = [Token(each, -1.0) for each in ("Who?", "The Answer", ":", " B")]
    assert [token.text for token in last_tokens(tokens, text)] == last


def test_a_comparison_counts_lost_and_gained_samples_of_both_results():
    scores = {"a": 1, "b": 0, "c": 0, "d": 1, "new": 1}
    before = {"a": 0, "b": 1, "c": 1, "d": 1, "old": 1}
    tasks = [{"t": {"kind": "gsm8k", "scores": each}} for each in (scores, before)]
    (found,) = compare(tasks[0], {"tasks": tasks[1]}, 0.05).values()
    assert (found["samples"], found["lost"], found["gained"], found["p_value"]) == (4, 2, 1, 1.0)
    assert (found["before"], found["after"]) == (0.75, 0.5)
