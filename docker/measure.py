"""Compare decoding with compiled kernels and with torch on the same machine: `measure.py MODEL --least RATIO`.

Runs in the image (`docker/test_image.sh`). One thread and eight sequences each; the best of three rounds counts,
because other processes can only slow a round down. Fails if the compiled kernels do not reach RATIO times the speed
of torch.
"""

import argparse
import time

from engine import LLM, Params
from kernels.cpu import library

PROMPT, SEQUENCES, TOKENS, ROUNDS = "What is 17 + 25?", 8, 96, 3


def tokens_per_second(model: str, **overrides: object) -> float:
    with LLM(model, threads=1, **overrides) as llm:
        params = Params(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        llm.generate([PROMPT] * SEQUENCES, Params(max_tokens=8, temperature=0.0, ignore_eos=True))
        best = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            made = llm.generate([PROMPT] * SEQUENCES, params)
            best = max(best, sum(len(one.ids) for one in made) / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure decoding with compiled kernels beside torch.")
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--least", type=float, default=1.0, help="least speed of compiled kernels, torch's is 1")
    options = parser.parse_args()
    best = library.best()
    if best == "torch":
        raise SystemExit("measure: no compiled kernels are installed")
    torch = tokens_per_second(options.model, kernels="torch")
    found = {
        best: tokens_per_second(options.model, kernels=best),
        f"{best} int8": tokens_per_second(options.model, kernels=best, weights="int8"),
    }
    for name, rate in {"torch": torch, **found}.items():
        print(f"measure: {name:<12} {rate:8.0f} tokens/s  {rate / torch:5.2f} times torch")
    if found[best] < options.least * torch:
        raise SystemExit(f"measure: {best} is {found[best] / torch:.2f} times torch, must be {options.least:g} or more")


if __name__ == "__main__":
    main()
