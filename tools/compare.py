"""Compare the engine with Hugging Face Transformers on one checkpoint: greedy, float32, logprob by logprob.

    python tools/compare.py CHECKPOINT [--prompts FILE] [--tokens N] [--tolerance X] [--reference CHECKPOINT]

Prints the first position with different tokens and the largest logprob difference of each prompt. Exit code 0: equal;
1: different; 2: invalid checkpoint or prompt. `--reference` gives transformers another directory, to measure the effect
of a conversion or an edit of the weights.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.api.errors import EngineError, RequestError
from engine.llm import LLM, Generation, Params

LENGTHS = (1, 7, 16, 33)  # of the prompts made up where no file gives any
TOLERANCE = 1e-3  # float32 on both sides differs in the order of sums only; a wrong kernel is off by far more


@dataclass(frozen=True)
class Difference:
    """First difference of a prompt. Later tokens cannot be compared.

    position: index in prompt and reply, None if all are equal. ours, theirs: (token, logprob) at this position.
    """

    position: int | None
    largest: float
    ours: tuple[int, float] | None = None
    theirs: tuple[int, float] | None = None


def read_prompts(path: Path, llm: LLM) -> list[list[int]]:
    """One prompt a line: text, or token ids for a checkpoint without a tokenizer."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if llm.tokenizer is not None:
        return [llm.tokenizer.encode(line) for line in lines]
    try:
        return [[int(word) for word in line.split()] for line in lines]
    except ValueError as error:
        raise RequestError(f"{path}: without a tokenizer, each line must contain token ids: {error}") from error


def made_up_prompts(vocab: int, longest: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(min(length, longest))] for length in LENGTHS]


class Reference:
    """Run transformers. The model is reloaded for each prompt if its rope keeps state between calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model = self._load()
        self._keeps_state = "dynamic" in str(self._model.config.to_dict().get("rope_parameters"))

    def _load(self) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self._path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
        return model

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: int) -> torch.Tensor:
        """[len(prompt) - 1 + tokens, vocab]: the distribution of each token but the first."""
        ids = torch.tensor([prompt])
        if self._keeps_state:
            self._model = self._load()
        before = self._model(ids).logits[0, :-1]
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat([before, torch.cat(made.logits)]).float().log_softmax(-1)


def difference(made: Generation, expected: torch.Tensor, tolerance: float) -> Difference:
    assert made.prompt_logprobs is not None, "asked for"
    largest = 0.0
    prompt = [found for found in made.prompt_logprobs if found is not None]
    for index, found in enumerate([*prompt, *made.logprobs]):
        row = expected[index]
        delta = abs(found.logprob - row[found.token].item())
        largest = max(largest, delta)
        best = int(row.argmax())
        other = index >= len(prompt) and best != found.token
        if other or not delta <= tolerance:  # also where it is NaN
            theirs = best if other else found.token
            return Difference(index + 1, largest, (found.token, found.logprob), (theirs, row[theirs].item()))
    return Difference(None, largest)


def compare(
    llm: LLM, reference: Reference, prompts: list[list[int]], tokens: int, tolerance: float
) -> list[Difference]:
    params = Params(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    replies = llm.generate(prompts, params)
    return [difference(made, reference.logprobs(made.prompt_ids, tokens), tolerance) for made in replies]


def report(number: int, prompt: list[int], found: Difference) -> str:
    line = f"prompt {number} ({len(prompt)} tokens): max |Δlogprob| {found.largest:.2e}"
    if found.position is None or found.ours is None or found.theirs is None:
        return f"{line}, no difference"
    where = "reply" if found.position >= len(prompt) else "prompt"
    (ours, our_logprob), (theirs, their_logprob) = found.ours, found.theirs
    return (
        f"{line}, first difference at position {found.position} ({where}): "
        f"engine {ours} ({our_logprob:.5f}), transformers {theirs} ({their_logprob:.5f})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, help="file with a prompt per line (default: random token ids)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each reply (default %(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="allowed difference of a logprob (default %(default)s)"
    )
    parser.add_argument("--reference", type=Path, help="checkpoint for transformers (default: CHECKPOINT)")
    arguments = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    try:
        with LLM(arguments.checkpoint, device="cpu", dtype="float32") as llm:
            longest = llm.config.model.max_context - arguments.tokens
            given = read_prompts(arguments.prompts, llm) if arguments.prompts else None
            prompts = given or made_up_prompts(llm.vocab, longest)
            reference = Reference(arguments.reference or arguments.checkpoint)
            found = compare(llm, reference, prompts, arguments.tokens, arguments.tolerance)
    except (EngineError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        print(report(number, prompt, one))
    different = sum(one.position is not None for one in found)
    print(f"{different} of {len(found)} prompts differ" if different else f"all {len(found)} prompts agree")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
