"""Samples of a task, read from local files.

| kind | a line |
|---|---|
| gsm8k | `question`, `answer`, which ends with `#### N` |
| multiple_choice, …_logprobs | `question`, `choices` (or `options`), `answer`; optionally `subject` or `category` |
| exact_match | `question` (or `prompt`), and `answer` (a text or a list of texts) or `regex` |
| perplexity | `text`; other files than .jsonl are plain text, divided into windows |
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.config.sections.evaluation import EvaluationTask, Kind
from appliance.evaluation.answers import LETTERS, final_number

_WINDOW_CHARACTERS = 4000  # about 1,000 tokens of English


class SampleError(Exception):
    """Raised for a file that has no usable samples. The message names file and line."""


@dataclass(frozen=True)
class Sample:
    """One question with its solution."""

    number: int
    """Number of the line, or of the window, from 1."""
    question: str
    solution: str = ""
    """Complete solution, as an example before other questions shows it."""
    answers: tuple[str, ...] = ()
    """Correct answers: a number, a letter, or accepted texts."""
    choices: tuple[str, ...] = ()
    category: str = ""
    regex: str = ""
    """Pattern that a correct reply contains, instead of `answers`."""

    @property
    def id(self) -> str:
        """Digest of question and solution. Results of two runs are paired by it."""
        values = (self.question, self.solution, self.answers, self.choices, self.regex)
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Samples:
    examples: tuple[Sample, ...]
    """Solved examples before each question."""
    measured: tuple[Sample, ...]


def read_samples(task: EvaluationTask, limit: int | None, seed: int) -> Samples:
    """Return the solved examples and the samples to measure, in the order of the file. A smaller number of samples is
    drawn with the seed. Raises SampleError."""
    every = _read(Path(task.file), task.kind)
    if task.shots_file is not None:
        examples = _read(Path(task.shots_file), task.kind)[: task.shots]
    else:
        examples, every = every[: task.shots], every[task.shots :]
    if len(examples) < task.shots:
        raise SampleError(f"{task.shots_file or task.file}: {len(examples)} samples; shots: {task.shots} needs more")
    if not every:
        raise SampleError(f"{task.file}: no samples to measure" + (" after the examples" if task.shots else ""))
    if limit is not None and limit < len(every):
        places = sorted(random.Random(f"{seed}:samples").sample(range(len(every)), limit))
        every = [every[place] for place in places]
    return Samples(tuple(examples), tuple(every))


def _read(file: Path, kind: Kind) -> list[Sample]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SampleError(f"{file}: {error.strerror if isinstance(error, OSError) else error}") from error
    if kind == "perplexity" and file.suffix != ".jsonl":
        return [Sample(number, window) for number, window in enumerate(windows(text), 1)]
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("use one JSON object per line")
                found.append(_READERS[kind](number, value))
            except (ValueError, KeyError) as error:
                missing = f"the key {error} is missing" if isinstance(error, KeyError) else error
                raise SampleError(f"{file}:{number}: {missing}") from error
    return found


def windows(text: str, characters: int = _WINDOW_CHARACTERS) -> list[str]:
    """Divide a text at white space into windows of at most this many characters; a longer word is one window. Their
    concatenation is the text, except windows of white space alone."""
    found, start = list[str](), 0
    for word in re.finditer(r"\s*\S+\s*", text):
        if word.end() - start > characters and word.start() > start:
            found.append(text[start : word.start()])
            start = word.start()
    found.append(text[start:])
    return [window for window in found if window.strip()]


def _text(value: dict[str, Any], *names: str) -> str:
    """Return the first of these keys that the line has. Raises KeyError and ValueError."""
    name = next((each for each in names if each in value), names[0])
    if not isinstance(value[name], str) or not value[name]:
        raise ValueError(f"{name}: use a text")
    return str(value[name])


def _gsm8k(number: int, value: dict[str, Any]) -> Sample:
    solution = _text(value, "answer")
    marked = solution.rpartition("####")[2]
    if "####" not in solution or (found := final_number(marked)) is None:
        raise ValueError("answer: end it with #### and the number")
    return Sample(number, _text(value, "question"), solution, (str(found),), category=_category(value))


def _multiple_choice(number: int, value: dict[str, Any]) -> Sample:
    choices: Any = value["choices"] if "choices" in value else value.get("options")
    labels: Any = None
    if isinstance(choices, dict):  # ARC
        choices, labels = choices.get("text"), choices.get("label")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"choices: use a list of 2 to {len(LETTERS)} texts")
    if not all(isinstance(each, str) and each for each in choices):
        raise ValueError("choices: use texts")
    name = next((each for each in ("answer", "answerKey") if each in value), "answer")
    letter = LETTERS[_place(name, value[name], choices, labels)]
    return Sample(number, _text(value, "question"), letter, (letter,), tuple(choices), _category(value))


def _place(name: str, answer: Any, choices: Sequence[str], labels: Any) -> int:
    """Return the place of the answer: an index from 0, a label, a letter or the text of a choice. Raises ValueError."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    for names in (labels, LETTERS[: len(choices)], choices):
        if isinstance(names, list | str | tuple) and isinstance(answer, str) and list(names).count(answer) == 1:
            return list(names).index(answer)
    raise ValueError(f"{name}: {answer!r} is neither an index from 0, nor a letter, nor one of the choices")


def _exact_match(number: int, value: dict[str, Any]) -> Sample:
    question = _text(value, "question", "prompt")
    if ("answer" in value) == ("regex" in value):
        raise ValueError("use either `answer` or `regex`")
    if "regex" in value:
        pattern = _text(value, "regex")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"regex: {error}") from error
        return Sample(number, question, category=_category(value), regex=pattern)
    answers = value["answer"] if isinstance(value["answer"], list) else [value["answer"]]
    if not answers or not all(isinstance(each, str) and each.strip() for each in answers):
        raise ValueError("answer: use a text or a list of texts")
    return Sample(number, question, answers[0], tuple(answers), category=_category(value))


def _category(value: dict[str, Any]) -> str:
    found = value.get("subject") or value.get("category") or ""
    return found if isinstance(found, str) else str(found)


def _perplexity(number: int, value: dict[str, Any]) -> Sample:
    return Sample(number, _text(value, "text"), category=_category(value))


_READERS: dict[Kind, Callable[[int, dict[str, Any]], Sample]] = {
    "gsm8k": _gsm8k,
    "multiple_choice": _multiple_choice,
    "multiple_choice_logprobs": _multiple_choice,
    "continuation_logprobs": _multiple_choice,
    "exact_match": _exact_match,
    "perplexity": _perplexity,
}
