"""lm-eval: likelihoods through completions, texts through chat, over a task that is made here; the command of
docs/eval.md."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.documented import ROOT, at, command_with

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo"
QUESTIONS = [(7, 8), (17, 25), (40, 2), (12, 13)]

CHOICE = """\
task: sums_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT = """\
task: sums_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 100, temperature: 0}}
filter_list: [{{name: last, filter: [{{function: regex, regex_pattern: "= (\\\\d+)$"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with two tasks, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    chat = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        {
            "question": chat.format(a, b),
            "choices": [f"{a} + {b}: ", "No reply of mine begins so: "],
            "answer": str(a + b),
        }
        for a, b in QUESTIONS
    ]
    (folder / "likely.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in QUESTIONS]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "choice.yaml").write_text(CHOICE.format(data=folder / "likely.jsonl"))
    (folder / "text.yaml").write_text(TEXT.format(data=folder / "asked.jsonl"))
    return folder


@pytest.fixture(scope="module")
def tasks(folder):
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.shows("lm-eval", "completions")
def test_likelihoods(url, tasks):
    settings = {
        "model": "demo",
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(DEMO),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
    }
    found = lm_eval.simple_evaluate(
        "local-completions", model_args=settings, tasks=["sums_choice"], task_manager=tasks, bootstrap_iters=0
    )
    assert found["results"]["sums_choice"]["acc,none"] == 1.0


@pytest.mark.shows("lm-eval", "chat")
def test_texts(url, tasks):
    settings = {
        "model": "demo",
        "base_url": f"{url}/v1/chat/completions",
        "num_concurrent": 1,
        "eos_string": "<|im_end|>",
    }
    found = lm_eval.simple_evaluate(
        "local-chat-completions",
        model_args=settings,
        tasks=["sums_text"],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert found["results"]["sums_text"]["exact_match,last"] == 1.0


@pytest.mark.shows("lm-eval", "completions")
def test_the_documented_command(url, folder):
    """With a task that is on this machine."""
    command = at(command_with("docs/eval.md", "lm_eval"), url)
    program, *words = shlex.split(command.replace("mmlu --num_fewshot 5", "sums_choice"))
    path = Path(sys.executable).with_name(program)
    more = ["--include_path", str(folder), "--output_path", str(folder / "found")]
    done = subprocess.run([path, *words, *more], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = (folder / "found").rglob("*.json")
    assert json.loads(result.read_text())["results"]["sums_choice"]["acc,none"] == 1.0
