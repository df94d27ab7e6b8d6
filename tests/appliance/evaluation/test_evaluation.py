"""`slipway eval` against a server with scripted replies."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.main import main
from appliance.evaluation import client
from tests.appliance.evaluation.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_S", 0.001)
    with scripted_server() as server:
        yield server


def lines(file: Path, *values: Any) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def sums(file: Path, count: int = 10) -> Path:
    return lines(file, *({"question": f"{n} + 1?", "answer": f"Add.\n#### {n + 1}"} for n in range(count)))


def capitals(file: Path) -> Path:
    choices = ["Rome", "Paris", "Oslo"]
    rows = [("Italy?", 0, "south"), ("France?", "B", "west"), ("Norway?", "Oslo", "north"), ("The Seine?", 1, "west")]
    return lines(
        file, *({"question": one, "choices": choices, "answer": two, "subject": three} for one, two, three in rows)
    )


def evaluate(server: ScriptedServer, out: Path, *options: str, code: int = 0) -> dict[str, Any]:
    result, samples = out / "deep" / "result.json", out / "samples.jsonl"
    assert main(["eval", server.url, "--output", str(result), "--samples", str(samples), *options]) == code
    return json.loads(result.read_text())


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def adds(prompt: str) -> str:
    """Add, except that 3 + 1 is 5 and 7 + 1 has no answer."""
    number = int(prompt.split("\n")[-1].split()[0])
    return {3: "#### 5", 7: "I do not know."}.get(number, f"{number} and 1 make {number + 1}\n#### {number + 1}.00")


def test_gsm8k_counts_correct_and_unparsed_answers(server, tmp_path, capsys):
    server.reply = adds
    result = evaluate(server, tmp_path, "--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl')}", "-C", "3")
    task = result["tasks"]["sums"]
    assert (task["samples"], task["correct"], task["unparsed"], task["errors"]) == (10, 8, 1, 0)
    assert task["accuracy"] == 0.8 and task["interval"] == pytest.approx([0.4902, 0.9433], abs=5e-5)
    assert task["output_tokens"] == sum(len(adds(f"{n} + 1?").split()) for n in range(10))
    found = records(tmp_path)
    assert [each["number"] for each in found] == list(range(1, 11))
    assert [each["number"] for each in found if not each["correct"]] == [4, 8]
    assert (found[3]["answer"], found[3]["expected"], found[7]["answer"]) == ("5", ["4"], None)
    assert found[7]["reply"] == "I do not know." and found[0]["prompt"][-1]["content"].endswith("0 + 1?")
    assert result["endpoint"]["model"] == "scripted"
    assert all(body["temperature"] == 0 and body["max_tokens"] == 512 for body in server.sent())
    shown = capsys.readouterr().out
    assert "0.8000  95% interval 0.4902 to 0.9433" in shown


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_examples_come_first_and_are_not_measured(server, tmp_path, api):
    server.reply = lambda prompt: "#### 0"
    file = sums(tmp_path / "sums.jsonl", 5)
    evaluate(server, tmp_path, "--task", f"gsm8k:{file}", "--shots", "2", "--api", api, "-C", "1")
    assert [each["number"] for each in records(tmp_path)] == [3, 4, 5]
    (first, *_) = server.sent()
    if api == "chat":
        turns = first["messages"]
        assert [each["role"] for each in turns] == ["user", "assistant", "user", "assistant", "user"]
        assert turns[3]["content"] == "Add.\n#### 2" and turns[4]["content"].endswith("\n2 + 1?")
    else:
        assert first["prompt"].endswith("Question: 1 + 1?\nAnswer: Add.\n#### 2\n\nQuestion: 2 + 1?\nAnswer:")
        assert first["stop"] == ["\nQuestion:"]


def test_examples_of_another_file_leave_all_samples(server, tmp_path):
    examples = lines(tmp_path / "train.jsonl", *({"question": f"e{n}", "answer": "#### 1"} for n in range(3)))
    options = ("--shots", "2", "--shots-file", str(examples))
    evaluate(server, tmp_path, "--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl', 4)}", *options)
    assert len(records(tmp_path)) == 4
    assert all(body["messages"][2]["content"].endswith("e1") for body in server.sent())


def test_a_limit_draws_samples_with_the_seed_in_the_order_of_the_file(server, tmp_path):
    file = sums(tmp_path / "sums.jsonl", 50)

    def drawn(seed):
        evaluate(server, tmp_path, "--task", f"gsm8k:{file}", "--limit", "7", "--seed", seed)
        return [each["number"] for each in records(tmp_path)]

    first = drawn("1")
    assert len(first) == 7 and first == sorted(first) == drawn("1") != drawn("2")
    assert {body["seed"] for body in server.sent()} == {1, 2}


def test_multiple_choice_reads_letters_and_reports_categories(server, tmp_path, capsys):
    answers = {"Italy?": "A", "France?": "The answer is (B).", "Norway?": "I think A", "The Seine?": "hm"}
    server.reply = lambda prompt: next(answer for part, answer in answers.items() if part in prompt)
    task = evaluate(server, tmp_path, "--task", f"multiple_choice:{capitals(tmp_path / 'c.jsonl')}")["tasks"]["c"]
    assert (task["correct"], task["unparsed"]) == (2, 1)
    assert {name: (each["correct"], each["samples"]) for name, each in task["categories"].items()} == {
        **{"north": (0, 1), "south": (1, 1), "west": (1, 2)}
    }
    assert server.sent()[0]["messages"][0]["content"].endswith("\nA. Rome\nB. Paris\nC. Oslo")
    assert "west" in capsys.readouterr().out


def test_arc_and_mmlu_pro_lines_are_read(server, tmp_path):
    arc = {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
    pro = {"question": "q", "options": ["x", "y", "z"], "answer": "C", "category": "law"}
    server.reply = lambda prompt: "B"
    evaluate(server, tmp_path, "--task", f"multiple_choice:{lines(tmp_path / 'm.jsonl', arc, pro)}")
    assert [(each["expected"], each["correct"]) for each in records(tmp_path)] == [(["B"], True), (["C"], False)]


LETTER = {" A": -3.0, " B": -1.0, " C": -2.0}


@pytest.mark.parametrize("form", ["echo", "prompt_logprobs"])
def test_log_probabilities_of_letters_choose_the_likeliest(server, tmp_path, form):
    server.forms = (form,)
    server.logprob = lambda before, token: LETTER[token] if before.endswith("Answer:") else -50.0
    file = capitals(tmp_path / "c.jsonl")
    result = evaluate(server, tmp_path, "--task", f"multiple_choice_logprobs:{file}")
    assert [each["answer"] for each in records(tmp_path)] == ["B"] * 4
    assert records(tmp_path)[0]["logprobs"] == [-3.0, -1.0, -2.0]
    assert result["tasks"]["c"]["correct"] == 2


def test_log_probabilities_of_continuations_are_divided_by_their_bytes(server, tmp_path):
    file = lines(tmp_path / "c.jsonl", {"question": "q", "choices": ["a", "bb cc dd"], "answer": 1})
    server.logprob = lambda before, token: -1.0
    evaluate(server, tmp_path, "--task", f"continuation_logprobs:{file}")
    (found,) = records(tmp_path)
    assert found["logprobs"] == [-1.0, -3.0] and found["answer"] == "B", "-3/9 is more than -1/2"
    assert all("A." not in body["prompt"] for body in server.sent())


def test_a_server_without_log_probabilities_is_refused_before_the_samples(server, tmp_path, capsys):
    server.forms = ()
    file = capitals(tmp_path / "c.jsonl")
    assert main(["eval", server.url, "--task", f"multiple_choice_logprobs:{file}"]) == 2
    said = capsys.readouterr().err
    assert "use the kind multiple_choice instead" in said and "echo: HTTP 400" in said and len(server.bodies) == 2


def test_exact_match_accepts_any_answer_an_extraction_and_a_regex(server, tmp_path):
    server.reply = lambda prompt: {"q1": " The RHINE.", "q2": "It is Bonn", "q3": "on 2024-01-02"}[prompt.split()[-1]]
    rows = [{"question": "q1", "answer": ["x", "the rhine"]}, {"prompt": "q2", "answer": "bonn"}]
    file = lines(tmp_path / "m.jsonl", *rows, {"question": "q3", "regex": r"\d{4}-\d\d-\d\d"})
    evaluate(server, tmp_path, "--task", f"exact_match:{file}")
    assert [each["correct"] for each in records(tmp_path)] == [True, False, True]
    task = evaluate(server, tmp_path, "--task", f"exact_match:{file}", "--extract", r"is (\w+)")["tasks"]["m"]
    assert [each["correct"] for each in records(tmp_path)] == [False, True, False] and task["unparsed"] == 2


def test_perplexity_of_a_text_follows_from_its_tokens(server, tmp_path):
    server.logprob = lambda before, token: -0.5 if "\u00e4" in token else -1.5
    file = lines(tmp_path / "t.jsonl", {"text": "one tw\u00e4 three"}, {"text": "four five"}, {"text": "six"})
    task = evaluate(server, tmp_path, "--task", f"perplexity:{file}", "--maximum", "3.3")["tasks"]["t"]
    assert task["scored_tokens"] == 3 and task["perplexity"] == pytest.approx(math.exp(3.5 / 3), rel=1e-5)
    size = sum(map(len, ("one tw\u00e4 three".encode(), b"four five", b"six")))
    assert task["bits_per_byte"] == pytest.approx(3.5 / math.log(2) / size, abs=1e-6) and task["passed"]
    failed = evaluate(server, tmp_path, "--task", f"perplexity:{file}", "--maximum", "3.1", code=1)
    assert failed["tasks"]["t"]["passed"] is False


def test_thresholds_decide_the_exit_code(server, tmp_path, capsys):
    server.reply = adds
    task = ("--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl')}")
    assert evaluate(server, tmp_path, *task, "--minimum", "0.8")["tasks"]["sums"]["passed"]
    assert not evaluate(server, tmp_path, *task, "--minimum", "0.81", code=1)["tasks"]["sums"]["passed"]
    assert "FAILED" in capsys.readouterr().out


def test_a_busy_server_is_tried_again_and_a_failed_request_is_an_error(server, tmp_path):
    server.reply, server.failing = adds, 3
    task = ("--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl')}", "-C", "1")
    assert evaluate(server, tmp_path, *task)["tasks"]["sums"]["errors"] == 0
    assert len(server.bodies) == 13
    server.failing, server.status = 1, 400
    found = evaluate(server, tmp_path, *task, code=1)["tasks"]["sums"]
    assert (found["errors"], found["correct"], found["accuracy"]) == (1, 7, pytest.approx(7 / 9, abs=1e-6))
    assert next(iter(found["error_messages"])).startswith("HTTP 400") and len(found["scores"]) == 9


def test_a_comparison_pairs_samples_and_fails_if_significantly_worse(server, tmp_path, capsys):
    task = ("--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl', 20)}")
    server.reply = lambda prompt: f"#### {int(prompt.split(chr(10))[-1].split()[0]) + 1}"
    (tmp_path / "good").mkdir()
    evaluate(server, tmp_path / "good", *task)
    good = str(tmp_path / "good" / "deep" / "result.json")
    server.reply = lambda prompt: "#### 1" if int(prompt.split("\n")[-1].split()[0]) < 6 else "#### -1"
    result = evaluate(server, tmp_path, *task, "--compare", good, code=1)
    found = result["comparison"]["tasks"]["sums"]
    assert (found["samples"], found["lost"], found["gained"], found["verdict"]) == (20, 19, 0, "worse")
    assert found["p_value"] == pytest.approx(2 / 2**19) and (found["before"], found["after"]) == (1.0, 0.05)
    assert "19 samples worse, 0 better" in capsys.readouterr().out
    again = evaluate(server, tmp_path, *task, "--compare", good, "--significance", "1e-6")
    assert again["comparison"]["tasks"]["sums"]["verdict"] == "no significant difference"
    bad = str(tmp_path / "deep" / "result.json")
    server.reply = lambda prompt: f"#### {int(prompt.split(chr(10))[-1].split()[0]) + 1}"
    assert evaluate(server, tmp_path / "good", *task, "--compare", bad)["comparison"]["tasks"]["sums"]["gained"] == 19


def test_a_comparison_without_common_samples_keeps_the_measurement(server, tmp_path, capsys):
    first = evaluate(server, tmp_path, "--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl', 3)}")
    other = tmp_path / "other.json"
    first["tasks"]["sums"]["scores"] = {"0": 1}
    other.write_text(json.dumps(first))
    result = evaluate(server, tmp_path, "--task", f"gsm8k:{tmp_path / 'sums.jsonl'}", "--compare", str(other), code=2)
    assert result["tasks"]["sums"]["samples"] == 3
    assert "has no sample of the task sums" in capsys.readouterr().err


def test_key_and_extra_fields_are_sent_and_the_key_is_not_written(server, tmp_path, monkeypatch):
    monkeypatch.setenv("EVAL_KEY", "k-1")
    options = ("--api-key-env", "EVAL_KEY", "--body", '{"temperature": 0.5, "top_k": 3}')
    evaluate(server, tmp_path, "--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl')}", *options)
    assert {key for _, _, key in server.bodies} == {"Bearer k-1"}
    assert all((body["temperature"], body["top_k"]) == (0.5, 3) for body in server.sent())
    assert "k-1" not in (tmp_path / "deep" / "result.json").read_text() + (tmp_path / "samples.jsonl").read_text()


MANIFEST = """
apiVersion: slipway/v2
model: {source: {path: /nowhere}}
evaluation:
  adds: {file: sums.jsonl, kind: gsm8k, minimum: 0.9}
  capitals: {file: c.jsonl, kind: multiple_choice, limit: 2}
"""


def test_the_tasks_of_a_manifest_have_paths_and_thresholds_of_its_own(server, tmp_path, monkeypatch):
    server.reply = adds
    (tmp_path / "m.yaml").write_text(MANIFEST)
    sums(tmp_path / "sums.jsonl"), capitals(tmp_path / "c.jsonl")
    monkeypatch.chdir("/")
    out, command = tmp_path / "r.json", ["eval", str(tmp_path / "m.yaml"), "--url", server.url]
    assert main([*command, "--task", "adds", "--output", str(out)]) == 1
    (task,) = json.loads(out.read_text())["tasks"].values()
    assert (task["minimum"], task["passed"], task["accuracy"]) == (0.9, False, 0.8)
    assert main([*command, "--task", "adds", "--minimum", "0.7"]) == 0
    server.reply = lambda prompt: "A" if "A. Rome" in prompt else adds(prompt)
    assert main([*command, "--minimum", "0", "--output", str(out)]) == 0
    assert {name: each["samples"] for name, each in json.loads(out.read_text())["tasks"].items()} == {
        **{"adds": 10, "capitals": 2}
    }


def test_a_manifest_whose_service_does_not_run_is_a_clear_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "m.yaml").write_text(MANIFEST)
    assert main(["eval", str(tmp_path / "m.yaml")]) == 2
    said = capsys.readouterr().err
    assert "start it with `slipway serve" in said and "--url" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("{file: f, kind: gsm9k}", "evaluation.a.kind"),
        ("{file: f, kind: gsm8k, minimum: 1.5}", "evaluation.a.minimum"),
        ("{file: f, kind: gsm8k, minimal: 1}", "minimum"),
        ("{file: f, kind: gsm8k, maximum: 3}", "use `minimum`"),
        ("{file: f, kind: perplexity, minimum: 0.5}", "use `maximum`"),
        ("{file: f, kind: gsm8k, shots_file: g}", "set `shots`"),
        ("{kind: gsm8k}", "evaluation.a.file"),
    ],
)
def test_wrong_tasks_of_a_manifest_are_refused_with_their_place(tmp_path, capsys, task, words):
    (tmp_path / "m.yaml").write_text(MANIFEST.split("evaluation")[0] + f"evaluation:\n  a: {task}\n")
    assert main(["eval", str(tmp_path / "m.yaml")]) == 2
    said = capsys.readouterr().err
    assert words in said and "m.yaml:" in said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("", "no task: use --task KIND:FILE"),
        ("--task gsm8k", "--task gsm8k: use KIND:FILE"),
        ("--task gsm9k:FILE", "--task gsm9k:"),
        ("--task gsm8k:FILE --task gsm8k:FILE", "a second task with the name"),
        ("--task gsm8k:FILE --minimum 2", "minimum: "),
        ("--task gsm8k:FILE --maximum 2", "use `minimum`"),
        ("--task gsm8k:FILE --extract x", "only exact_match has it"),
        ("--task exact_match:FILE --extract (", "extract: "),
        ("--task gsm8k:FILE --limit 0", "limit: "),
        ("--task gsm8k:FILE --shots 99", "shots: 99 needs more"),
        ("--task gsm8k:FILE --shots 2", "no samples to measure after the examples"),
        ("--task gsm8k:/nowhere.jsonl", "/nowhere.jsonl: No such file"),
        ("--task gsm8k:FILE -C 0", "--concurrency 0"),
        ("--task gsm8k:FILE --seed -1", "--seed: use 0 or more"),
        ("--task gsm8k:FILE --body [1]", "--body: use a JSON object"),
        ("--task gsm8k:FILE --significance 1", "--significance 1.0"),
        ("--task gsm8k:FILE --compare /nowhere.json", "--compare /nowhere.json: No such file"),
    ],
)
def test_wrong_options_are_one_line_errors(server, tmp_path, wrong, words, capsys):
    file = sums(tmp_path / "sums.jsonl", 2)
    assert main(["eval", server.url, *shlex.split(wrong.replace("FILE", str(file)))]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not server.bodies


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("gsm8k", "{", "Expecting"),
        ("gsm8k", "[]", "one JSON object"),
        ("gsm8k", '{"question": "q"}', "the key 'answer' is missing"),
        ("gsm8k", '{"question": "q", "answer": "4"}', "end it with ####"),
        ("gsm8k", '{"question": 3, "answer": "#### 4"}', "question: use a text"),
        ("multiple_choice", '{"question": "q", "answer": 0}', "choices: use a list"),
        ("multiple_choice", '{"question": "q", "choices": ["x", "y"], "answer": 2}', "answer: 2 is neither"),
        ("multiple_choice", '{"question": "q", "choices": ["x", "y"], "answer": true}', "answer: True"),
        ("multiple_choice", '{"question": "q", "choices": ["x", 3], "answer": 0}', "choices: use texts"),
        ("exact_match", '{"question": "q", "answer": []}', "answer: use a text"),
        ("exact_match", '{"question": "q", "answer": "x", "regex": "x"}', "either `answer` or `regex`"),
        ("exact_match", '{"question": "q", "regex": "("}', "regex: "),
        ("perplexity", '{"question": "q"}', "the key 'text' is missing"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place(server, tmp_path, kind, line, words, capsys):
    (tmp_path / "f.jsonl").write_text("\n" + line + "\n")
    assert main(["eval", server.url, "--task", f"{kind}:{tmp_path / 'f.jsonl'}"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'f.jsonl'}:2: " in said and words in said and said.count("\n") == 1


def test_a_missing_server_is_a_one_line_error(tmp_path, capsys):
    assert main(["eval", "http://127.0.0.1:9", "--task", f"gsm8k:{sums(tmp_path / 'sums.jsonl')}"]) == 2
    assert capsys.readouterr().err.startswith("slipway eval: http://127.0.0.1:9: ConnectError")
