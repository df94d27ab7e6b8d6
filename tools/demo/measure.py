"""Greedy answers of a written model to held-out prompts, by transformers, and the share that is right."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tools.demo.sample import Sample
from tools.demo_corpus import SKILLS, held_out_samples

BATCH = 25
NUMBER, CALL = re.compile(r"-?\d+"), re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


def is_right(sample: Sample, text: str) -> bool:
    """Return true if a reply is right: sums by their last number, JSON and calls by value, others word for word."""
    if sample.thinking:
        text = text.partition("</think>\n\n")[2]
    if sample.skill == "arithmetic":
        numbers = NUMBER.findall(text)
        return bool(numbers) and numbers[-1] == NUMBER.findall(sample.reply)[-1]
    try:
        if sample.skill == "json":
            return list(json.loads(text).items()) == list(json.loads(sample.reply).items())
        if sample.skill == "call":
            return bool(_called(text) == _called(sample.reply))
    except (ValueError, AttributeError):
        return False
    return text == sample.reply


def _called(text: str) -> Any:
    match = CALL.fullmatch(text)
    return json.loads(match[1]) if match else None


def answers(folder: Path, samples: list[Sample], limit: int = 160) -> list[str]:
    """Greedy replies, without the end token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=limit, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    texts = []
    for begin in range(0, len(samples), BATCH):
        prompts = [
            tokenizer.apply_chat_template(
                list(sample.messages),
                tools=list(sample.tools) or None,
                add_generation_prompt=True,
                enable_thinking=sample.thinking,
                tokenize=False,
            )
            for sample in samples[begin : begin + BATCH]
        ]
        inputs = tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
        )
        with torch.inference_mode():
            outputs = model.generate(**inputs, generation_config=settings)
        for output in outputs[:, inputs["input_ids"].shape[1] :]:
            texts.append(tokenizer.decode(output, skip_special_tokens=True))
    return texts


def print_table(folder: Path, count: int) -> None:
    """One line a skill: right answers to held-out prompts, with thinking off and on, and the first wrong ones."""
    print("| skill | held-out prompts | right, thinking off | right, thinking on |\n|---|---|---|---|", flush=True)
    wrong = []
    for skill in SKILLS:
        shares = []
        for thinking in (False, True):
            samples = held_out_samples(skill, count, thinking=thinking)
            verdicts = [
                (sample, text, is_right(sample, text))
                for sample, text in zip(samples, answers(folder, samples), strict=True)
            ]
            shares.append(sum(right for _, _, right in verdicts) / count)
            wrong += [(sample, text) for sample, text, right in verdicts if not right][:3]
        print(f"| {skill} | {count} | {shares[0]:.1%} | {shares[1]:.1%} |", flush=True)
    for sample, text in wrong:
        print(f"\n{sample.skill}: {sample.messages[-1]['content']!r}\n  wanted {sample.target!r}\n  got    {text!r}")
