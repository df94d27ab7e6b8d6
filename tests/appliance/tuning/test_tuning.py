"""The search of `slipway tune`, without a service: order, simulation, choice and overlay."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from appliance.bench.arrivals import Arrivals, start_times
from appliance.bench.run import Loop
from appliance.bench.workload import Lengths, WorkloadOptions, make_workload
from appliance.cli.main import main
from appliance.config.settings import Given
from appliance.hardware.described import hardware
from appliance.planning.validate import validate
from appliance.tuning.objective import Objective
from appliance.tuning.results import ResultsError, open_results
from appliance.tuning.service import ServiceError
from appliance.tuning.sessions import SessionRequests
from appliance.tuning.space import SIMULATED, Axis, Search, default_axes, settings
from appliance.tuning.tune import Candidate, Tuner
from engine.core.config import SchedulerConfig
from engine.core.whatif.simulate import simulate_requests
from engine.kv.layout import Group, Layout

ROOT = Path(__file__).resolve().parents[3]
DEMO = str(ROOT / "manifests" / "demo.yaml")
LAYOUT = Layout((Group("full.0", (0,), None, None, None),), 16, 1, 1, 1, 4)
CONFIG = SchedulerConfig(layout=LAYOUT, blocks=1000, max_context=500, vocab_size=50, max_running=8, max_step_tokens=64)
STEP_S = 0.01


def encode(text):
    return [len(word) for word in text.split()]


def simulated(loop, config=CONFIG, *, dataset="random", sessions=9, turns=3, pause=0.0):
    """Outcomes of a device whose every step takes STEP_S."""
    lengths = Lengths(6, 0.5, 20)
    options = WorkloadOptions(sessions, 3, lengths, lengths, prefix_tokens=4, turns=turns, pause_s=pause)
    requests = SessionRequests(make_workload(dataset, options), loop, encode, vocab=50, seed=3)
    return requests.outcomes(simulate_requests(requests, config, lambda size, at: STEP_S).replies)


def most_at_once(outcomes):
    return max(sum(one.sent_s <= at.sent_s < one.sent_s + one.last_s - 1e-9 for one in outcomes) for at in outcomes)


@pytest.mark.parametrize("clients", (1, 3, 9))
def test_a_closed_loop_has_its_number_of_clients(clients):
    outcomes = simulated(Loop(clients))
    assert len(outcomes) == 9 and not any(one.error for one in outcomes)
    assert most_at_once(outcomes) == clients


def test_a_lone_client_waits_for_one_step_per_token():
    for one in simulated(Loop(1)):
        assert one.last_s == pytest.approx(STEP_S * one.output_tokens), "the prompt fits into the first step"


def test_max_running_lets_requests_wait():
    alone = simulated(Loop(4), replace(CONFIG, max_running=1))
    together = simulated(Loop(4))
    assert max(one.first_s for one in alone) > 3 * max(one.first_s for one in together)


def test_an_open_loop_begins_at_the_arrival_times_and_keeps_its_limit():
    arrivals = Arrivals(40.0, 40.0)
    outcomes = simulated(Loop(0, arrivals))
    assert [one.sent_s for one in outcomes] == pytest.approx(start_times(9, arrivals, 3))
    assert most_at_once(outcomes) > 2
    limited = simulated(Loop(2, arrivals))
    assert most_at_once(limited) == 2
    starts = dict(enumerate(start_times(9, arrivals, 3)))
    assert all(one.sent_s >= starts[one.session] - 1e-9 for one in limited), "no session starts before its arrival"


def test_turns_of_a_conversation_follow_the_reply_and_the_pause_and_grow():
    outcomes = simulated(Loop(2), dataset="conversations", sessions=2, pause=0.5)
    assert len(outcomes) == 6
    for session in (0, 1):
        turns = sorted((one for one in outcomes if one.session == session), key=lambda one: one.turn)
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.sent_s == pytest.approx(before.sent_s + before.last_s + 0.5)
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens


def test_requests_beyond_the_context_fail_and_their_client_goes_on():
    outcomes = simulated(Loop(1), replace(CONFIG, max_context=4))
    assert len(outcomes) == 9 and {bool(one.error) for one in outcomes} == {True, False}


AXES = (Axis("a", ("1", "2", "3", "4"), "2"), Axis("b", ("x", "y", "z"), "x"))


def tried(limit, seed=0, axes=AXES):
    order = []

    def evaluate(point):
        order.append(point)
        return None if point == (3, 2) else (float(point[0] - point[1]),)

    return order, Search(axes, limit, seed).run(evaluate)


def test_a_small_space_is_tried_completely_and_the_manifest_first():
    order, scores = tried(12)
    assert order[0] == (1, 0) and len(order) == len(set(order)) == 12 and len(scores) == 11


def test_a_large_space_is_sampled_with_the_seed_and_climbed():
    order, scores = tried(8)
    assert len(order) == len(set(order)) == 8
    assert tried(8)[0] == order != tried(8, seed=1)[0]
    assert max(scores, key=scores.get) == (3, 0), "the neighbours of the best lead to the best of all"


def test_settings_are_those_that_differ_from_the_manifest():
    assert settings(AXES, (1, 0)) == () and settings(AXES, (1, 2)) == (("b", "z"),)


def figures(throughput, attainment=1.0, failures=0, memory=1):
    return {
        "output_tokens_per_second": throughput,
        "attainment": attainment,
        "failures": failures,
        "requests": 10,
        "memory": memory,
        "request_ms": {"mean": 1000 / throughput},
    }


def test_a_candidate_that_misses_the_limits_is_worse_than_one_that_keeps_them():
    objective = Objective("throughput", {"ttft": 0.5}, 0.95)
    good, fast, failed = figures(10), figures(99, attainment=0.9), figures(99, failures=1)
    assert objective.score(good) > objective.score(fast) > objective.score(failed)
    assert objective.score(figures(11)) > objective.score(good)
    small = Objective("memory", {"ttft": 0.5}, 0.95)
    assert small.score(figures(1, memory=1)) > small.score(figures(99, memory=2))
    assert Objective("latency", {}, 0.0).score(figures(11)) > Objective("latency", {}, 0.0).score(good)


def test_results_of_an_interrupted_run_are_read_again(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    results = open_results(path, {"manifest": "a"})
    results.put("predicted", (("key", "1"),), {"x": 1})
    with path.open("a") as file:
        file.write('{"kind": "meas')  # killed while writing
    again = open_results(path, {"manifest": "a"})
    assert again.get("predicted", (("key", "1"),)) == {"x": 1} and again.reused == 1
    again.put("measured", (), 2, 1)
    assert open_results(path, {"manifest": "a"}).get("measured", (), 1) == 2
    with pytest.raises(ResultsError, match="another manifest"):
        open_results(path, {"manifest": "b"})
    path.write_text("a: b\n")
    with pytest.raises(ResultsError, match="not a file"):
        open_results(path, {"manifest": "a"})


def keys_of(path):
    overlay = yaml.safe_load(path.read_text())
    assert overlay.pop("apiVersion") == "slipway/v2"
    return overlay


def tune(tmp_path, *options, code=0):
    out = tmp_path / "tuned.yaml"
    assert main(["tune", DEMO, "--runs", "0", "-n", "8", "--output", str(out), *options]) == code
    return out


def test_without_runs_the_result_is_predicted_and_the_same_each_time(tmp_path, capsys):
    keys = ("--key", "engine.scheduling.max_running=2,4", "--set", "engine.scheduling.max_running=1", "--only-keys")
    out = tune(tmp_path, *keys, "--json")
    first = json.loads(capsys.readouterr().out)
    assert keys_of(out) == {"engine": {"scheduling": {"max_running": 4}}}
    evidence = out.read_text()
    assert "predicted" in evidence and "measured" not in evidence and "manifest: 1" in evidence
    assert max(map(len, evidence.splitlines())) <= 120
    assert first["best"] == {"engine.scheduling.max_running": "4"} and len(first["candidates"]) == 3
    tune(tmp_path, *keys, "--json")
    assert json.loads(capsys.readouterr().out) == first and out.read_text() == evidence
    # The overlay is one of the manifest.
    assert main(["plan", DEMO, "--overlay", str(out), "--why", "engine.scheduling.max_running"]) == 0
    assert "4" in capsys.readouterr().out


def test_refused_combinations_are_counted_with_their_reason(tmp_path, capsys):
    tune(tmp_path, "--only-keys", "--key", "engine.scheduling.max_running=8", "--key", "parallelism.tensor=3")
    shown = capsys.readouterr().out
    assert "2 combinations refused" in shown and "parallelism.tensor" in shown.split("refused")[1]


def test_a_key_that_changes_replies_is_marked(tmp_path, capsys):
    tune(tmp_path, "--only-keys", "--key", "quantization.kv_cache=float32,bfloat16")
    assert "changes replies" in capsys.readouterr().out


def test_an_unreachable_limit_is_reported_and_nothing_is_written(tmp_path, capsys):
    keys = ("--only-keys", "--key", "engine.scheduling.max_running=8")
    out = tune(tmp_path, *keys, "--slo", "request=1ms", code=1)
    assert not out.exists() and "No candidate meets the limits (request 1 ms)" in capsys.readouterr().out


def test_less_memory_is_found_under_a_limit(tmp_path, capsys):
    out = tune(tmp_path, "--objective", "memory", "--slo", "request=20s", "--candidates", "12", "--json")
    found = json.loads(capsys.readouterr().out)
    best, base = found["candidates"][0], next(one for one in found["candidates"] if not one["settings"])
    assert best["settings"] == found["best"] and best["memory"] < base["memory"] / 2
    assert keys_of(out)


def test_equal_predictions_are_run_once_unless_a_key_is_not_simulated():
    plan, figures = SimpleNamespace(), {"output_tokens_per_second": 1.0, "memory": 5}
    chosen = [(), (("speculation.method", "ngram"),), (("speculation.method", "suffix"),)]
    chosen += [(("engine.scheduling.max_running", value),) for value in ("8", "16")]
    ranked = [Candidate(one, plan, 0, {**figures, "memory": at}) for at, one in enumerate(chosen)]
    tuner = SimpleNamespace(options=SimpleNamespace(finalists=9))
    assert [one.settings for one in Tuner._finalists(tuner, ranked)] == chosen[1:4]
    tuner.options.finalists = 1
    assert [one.settings for one in Tuner._finalists(tuner, ranked)] == chosen[1:2]


def test_the_best_candidate_is_run_with_drafts(tmp_path, monkeypatch, capsys):
    """A service is played: drafts by lookup of 8 tokens are the fastest."""

    def bench(self, candidate, number, record):
        given = dict(candidate.settings)
        draft = {"ngram": 3.0, "auto": 2.0}.get(given.get("speculation.method", "off"), 1.0)
        running = float(given.get("engine.scheduling.max_running", "1"))
        throughput = running * draft * (float(given.get("speculation.tokens", "4")) if draft > 1 else 1)
        return {**figures(throughput), **dict.fromkeys(("time_to_first_token_ms", "time_per_output_token_ms"), {})}

    monkeypatch.setattr(Tuner, "_bench", bench)
    options = ["--key", "engine.scheduling.max_running=4", "--set", "engine.scheduling.max_running=1", "--json"]
    out = tmp_path / "tuned.yaml"
    command = ["tune", DEMO, "--runs", "1", "-n", "8", "--output", str(out), "--candidates", "2", *options]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["speculation.method"] == "ngram" and found["best"]["speculation.tokens"] == "8"
    tried = [one["settings"] for one in found["candidates"] if one["measured"]]
    assert len(tried) == 6 and found["not_tried"] >= 0
    assert keys_of(out)["speculation"] == {"method": "ngram", "tokens": 8}


def test_a_service_that_does_not_start_with_drafts_is_started_once(tmp_path, monkeypatch, capsys):
    tried = []

    def bench(self, candidate, number, record):
        tried.append(method := dict(candidate.settings).get("speculation.method"))
        if method == "ngram":
            raise ServiceError("the service was not ready within 600 s")
        return {**figures(1.0), **dict.fromkeys(("time_to_first_token_ms", "time_per_output_token_ms"), {})}

    monkeypatch.setattr(Tuner, "_bench", bench)
    options = ["--key", "engine.scheduling.max_running=4", "--candidates", "1", "--rounds", "2", "--json"]
    assert main(["tune", DEMO, "--runs", "1", "-n", "2", "--output", str(tmp_path / "tuned.yaml"), *options]) == 0
    assert tried.count("ngram") == 1 and json.loads(capsys.readouterr().out)["best"] == {}


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_keys_that_are_searched_are_simulated(objective):
    plan = validate(Given(Path(DEMO)), hardware("h100x4"))
    keys = {axis.key for axis in default_axes(plan, objective, Loop(8))}
    assert keys <= SIMULATED and (objective == "memory") == ("hardware.kv_cache_memory" in keys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--objective", "memory"), "--slo"),
        (("--key", "engine.nothing=1"), "not a key"),
        (("--key", "engine.scheduling.max_running"), "KEY=VALUE"),
        (("--candidates", "0"), "--candidates 0"),
        (("--runs", "-1"), "--runs -1"),
        (("--only-keys",), "nothing to search"),
        (("--slo", "tpot=fast"), "--slo"),
        (("--min-attainment", "95"), "--min-attainment 95"),
    ],
)
def test_a_wrong_option_is_one_message(options, said, tmp_path, capsys):
    tune(tmp_path, *options, code=2)
    assert said in capsys.readouterr().err


def test_a_model_that_pools_is_refused(tmp_path, capsys):
    out = str(tmp_path / "x.yaml")
    assert main(["tune", DEMO, "--set", "model.task=embed", "--runs", "0", "-o", out]) == 2
    assert "generate text" in capsys.readouterr().err


def test_the_overlay_of_the_manifest_itself_has_no_keys(tmp_path, capsys):
    keys = ("--only-keys", "--key", "engine.scheduling.max_running=1")
    out = tune(tmp_path, *keys, "-C", "4")
    assert keys_of(out) == {} and "The manifest is the best candidate" in capsys.readouterr().out
    assert main(["check", DEMO, "--overlay", str(out)]) == 0
