"""Workloads and arrivals of `slipway bench`."""

import json
import math
import random
import statistics

import pytest

from appliance.bench.arrivals import Arrivals, start_times
from appliance.bench.client import Outcome
from appliance.bench.plots import cumulative, plot
from appliance.bench.run import Measured
from appliance.bench.summary import compare, summarize, summarize_times
from appliance.bench.workload import Lengths, WorkloadError, WorkloadOptions, digest, make_workload, words


def made(dataset="random", sessions=300, **options):
    return make_workload(dataset, WorkloadOptions(sessions=sessions, **options))


def turns(sessions):
    return [turn for session in sessions for turn in session.turns]


def test_lengths_have_the_given_median_and_a_long_tail():
    lengths = sorted(turn.max_tokens for turn in turns(made(seed=1)))
    assert 130 < statistics.median(lengths) < 240
    assert lengths[0] >= 1 and lengths[-1] <= 1024
    assert statistics.fmean(lengths) > statistics.median(lengths)


def test_no_spread_makes_equal_lengths_within_the_limit():
    lengths = Lengths(50.0, 0.0, 40)
    assert {turn.max_tokens for turn in turns(made(output=lengths))} == {40}


def test_prompts_share_no_long_prefix():
    texts = [turn.messages[0]["content"] for turn in turns(made(seed=5))]
    long = [text[:24] for text in texts if len(text) >= 24]
    assert len(set(long)) == len(long) > 100


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (2, 1), (7, 4), (100, 50)])
def test_a_prompt_has_enough_words_for_its_tokens(tokens, count):
    assert len(words(random.Random(0), tokens).split()) == count


def share_gpt(*texts):
    return {"conversations": [{"from": "human" if i % 2 == 0 else "gpt", "value": t} for i, t in enumerate(texts)]}


def test_a_sharegpt_file_gives_first_exchanges_in_a_seeded_order(tmp_path):
    file = tmp_path / "chats.json"
    entries = [share_gpt(f"question {n}", "x" * 4 * (n + 1), "more", "more") for n in range(20)]
    file.write_text(json.dumps([*entries, share_gpt("without a reply"), share_gpt("", "empty"), share_gpt("cut", "")]))
    read = made(f"sharegpt:{file}", sessions=100)
    assert {turn.messages[0]["content"] for turn in turns(read)} == {f"question {n}" for n in range(20)}
    for turn in turns(read):
        assert turn.max_tokens == int(turn.messages[0]["content"].split()[1]) + 1
    few = [turn.messages for turn in turns(made(f"sharegpt:{file}", sessions=5))]
    assert len(few) == 5 and few == [turn.messages for turn in turns(made(f"sharegpt:{file}", sessions=5))]
    assert few != [turn.messages for turn in turns(made(f"sharegpt:{file}", sessions=5, seed=1))]


def test_json_lines_give_prompts_messages_and_lengths(tmp_path):
    file = tmp_path / "requests.jsonl"
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    lines = [{"prompt": "p", "max_tokens": 3}, {"messages": [{"role": "user", "content": picture}]}]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    read = {turn.messages[0]["content"] == "p": turn for turn in turns(made(f"jsonl:{file}"))}
    assert read[True].max_tokens == 3 and read[False].messages == ({"role": "user", "content": picture},)


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", '{"prompt": "p", "messages": []}', '{"messages": []}', '{"messages": [{"content": "x"}]}', "{"]
    + ['{"prompt": "p", "max_tokens": 0}', '{"prompt": "p", "max_tokens": true}', '{"messages": 3}'],
)
def test_a_wrong_line_is_refused_with_its_place(tmp_path, line):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(WorkloadError, match=f"{file}:2: "):
        made(f"jsonl:{file}")


@pytest.mark.parametrize("content", ["{", "[1]", '[{"other": []}]', "[]", '[{"conversations": []}]'])
def test_a_file_without_conversations_is_refused(tmp_path, content):
    file = tmp_path / "chats.json"
    file.write_text(content)
    with pytest.raises(WorkloadError, match=str(file)):
        made(f"sharegpt:{file}")


def test_equal_workloads_have_equal_digests():
    assert digest(made(seed=3)) == digest(made(seed=3))
    assert len({digest(made(seed=3)), digest(made(seed=4)), digest(made(seed=3)[:-1])}) == 3


def gaps(times):
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    """The standard deviation of a gamma distribution with mean m and shape k is m/√k."""
    times = start_times(4000, Arrivals(20.0, 20.0, burstiness), seed=2)
    assert times[0] == 0.0 and times == sorted(times)
    assert statistics.fmean(gaps(times)) == pytest.approx(0.05, rel=0.1)
    assert statistics.stdev(gaps(times)) == pytest.approx(0.05 / math.sqrt(burstiness), rel=0.15)


def test_regular_arrivals_have_equal_gaps():
    times = start_times(9, Arrivals(4.0, 4.0, math.inf), seed=0)
    assert gaps(times) == pytest.approx([0.25] * 8)


@pytest.mark.parametrize(("first", "last"), [(1.0, 20.0), (20.0, 1.0), (5.0, 5.000001)])
def test_a_ramp_reaches_each_arrival_when_the_rate_has_added_up_to_it(first, last):
    """Numerical integration of the rate, in steps of a millisecond."""
    count = 50
    times = start_times(count, Arrivals(first, last, math.inf), seed=0)
    duration, time_s, added = 2 * count / (first + last), 0.0, 0.0
    for index, expected in enumerate(times):
        while added < index:
            added += 0.001 * (first + (last - first) * time_s / duration)
            time_s += 0.001
        assert expected == pytest.approx(time_s, abs=0.02)


def test_arrivals_after_the_ramp_have_its_last_rate():
    """Bursts can use up the ramp early: the sums of gaps pass the number of sessions."""
    times = start_times(400, Arrivals(1.0, 10.0, 0.05), seed=4)
    assert times == sorted(times) and all(map(math.isfinite, times))


def outcome(first_s=0.1, last_s=0.5, tokens=5, error="", gaps_s=(0.1, 0.1, 0.1, 0.1)):
    return Outcome(
        0, 0, 0, 0.0, first_s, last_s, list(gaps_s), prompt_tokens=7, output_tokens=tokens, finish="stop", error=error
    )


def test_a_summary_has_the_numbers_of_complete_replies_only():
    numbers = summarize(Measured([outcome(), outcome(0.3, 0.9, 4), outcome(error="x")], 2.0), {})
    assert (numbers["requests"], numbers["failures"], numbers["output_tokens"]) == (3, 1, 9)
    assert numbers["output_tokens_per_second"] == 4.5
    assert numbers["time_to_first_token_ms"]["mean"] == 200.0
    assert numbers["time_per_output_token_ms"]["mean"] == 150.0
    assert numbers["errors"] == {"x": 1} and "attainment" not in numbers


def test_goodput_counts_requests_that_meet_every_objective():
    every = [outcome(0.1, 0.5), outcome(0.1, 2.1), outcome(0.4, 0.8), outcome(error="x"), outcome(tokens=1, last_s=0.1)]
    numbers = summarize(Measured(every, 2.0), {"ttft": 0.2, "tpot": 0.2})
    assert numbers["attainment"] == 0.4 and numbers["goodput_requests_per_second"] == 1.0


def test_percentiles_are_nearest_ranks():
    assert summarize_times([]) == {}
    assert summarize_times([0.007]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0}
    hundred = summarize_times([number / 1000 for number in range(1, 101)])
    assert hundred == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


def test_a_run_without_success_has_a_summary_and_no_ratio():
    empty = summarize(Measured([outcome(error="x")], 1.0), {"ttft": 1.0})
    assert empty["requests_per_second"] == 0.0 and empty["attainment"] == 0.0
    full = summarize(Measured([outcome()], 1.0), {})
    assert compare([empty], [full]) == {}
    ratios = compare([full, full], [full, summarize(Measured([outcome(0.2)], 1.0), {})])
    assert ratios["time_to_first_token_ms p50"] == {"median": 1.5, "min": 1.0, "max": 2.0}


def test_a_plot_has_ticks_at_round_numbers_and_every_point_inside():
    text = plot("T<", "x", "y", [cumulative("line", [3.0, 1.0, 2.0, 17.0])])
    ticks = [word.split("<")[0] for word in text.split(">") if word.split("<")[0].isdigit()]
    assert ticks[:5] == ["0", "5", "10", "15", "20"] and "T&lt;" in text
    points = text.split('points="')[1].split('"')[0].split()
    assert len(points) == 4
    assert all(0 <= float(x) <= 560 and 0 <= float(y) <= 250 for x, y in (point.split(",") for point in points))
    assert "No data" in plot("T", "x", "y", [])


def test_a_long_line_keeps_its_ends():
    line = cumulative("line", list(map(float, range(5000))))
    assert len(line.points) == 400 and line.points[0] == (0.0, 0.02) and line.points[-1] == (4999.0, 100.0)
