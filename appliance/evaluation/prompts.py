"""Prompts of samples: messages of a chat, or a text to complete, each after the solved examples."""

from appliance.config.sections.evaluation import EvaluationTask
from appliance.evaluation.answers import LETTERS
from appliance.evaluation.samples import Sample

Message = dict[str, str]
_INSTRUCTIONS = {
    "gsm8k": "Solve the problem step by step. Write the final number in the last line, after ####.",
    "multiple_choice": "Answer the question with the letter of the correct choice alone.",
}
STOPS = {"gsm8k": ["\nQuestion:"], "multiple_choice": ["\n"], "exact_match": ["\nQuestion:"]}
"""Texts at which a completion ends: a base model would continue with the next question."""


def question(task: EvaluationTask, sample: Sample) -> str:
    """Return the question, with lettered choices if the kind shows them."""
    if task.kind in ("multiple_choice", "multiple_choice_logprobs"):
        choices = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, sample.choices, strict=False))
        return "\n".join([sample.question, *choices])
    return sample.question


def solution(task: EvaluationTask, sample: Sample) -> str:
    """Return the solution of an example, as the model should write it."""
    return sample.choices[LETTERS.index(sample.solution)] if task.kind == "continuation_logprobs" else sample.solution


def messages(task: EvaluationTask, examples: tuple[Sample, ...], sample: Sample) -> list[Message]:
    """Return the conversation: each example as a question of the user and a reply, then the question."""
    instruction, turns = _INSTRUCTIONS.get(task.kind), list[Message]()
    for example in examples:
        turns.append(_user(instruction, question(task, example)))
        turns.append({"role": "assistant", "content": solution(task, example)})
    return [*turns, _user(instruction, question(task, sample))]


def _user(instruction: str | None, text: str) -> Message:
    return {"role": "user", "content": f"{instruction}\n\n{text}" if instruction else text}


def text_prompt(task: EvaluationTask, examples: tuple[Sample, ...], sample: Sample) -> str:
    """Return the text to complete. It ends without a space, so that the tokens of the answer begin with one."""
    shown = [f"Question: {question(task, each)}\nAnswer: {solution(task, each)}" for each in examples]
    return "\n\n".join([*shown, f"Question: {question(task, sample)}\nAnswer:"])


def continuations(task: EvaluationTask, sample: Sample) -> list[str]:
    """Return the texts whose log probabilities are compared, one for each choice."""
    if task.kind == "continuation_logprobs":
        return [f" {choice}" for choice in sample.choices]
    return [f" {letter}" for letter in LETTERS[: len(sample.choices)]]
