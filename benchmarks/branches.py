"""Count the steps in which a second branch of a lookup draft is right, and the first one is wrong.

    python -m benchmarks.branches [--texts 12] [--tokens 256]

benchmarks/speculation.py supplies the texts. No model runs, because the replies are known. A draft consists of the
tokens that followed the last two tokens most often, and longer matches count more. A tree of drafts gains over a chain
at most in those steps in which the first wrong token of the draft has a runner-up that is right.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speculation import Text, code_edit, quotes, train_tokenizer

MATCH = 2  # last tokens that must occur earlier
LONGEST = 16  # tokens of a match that are compared
OCCURRENCES = 8  # latest ones that are counted
TOKENS = 4  # of a draft


@dataclass(frozen=True)
class Count:
    scenario: str
    tokens: int
    steps: int
    rejected: int  # steps with a wrong draft token
    second: int  # of these, steps in which the runner-up is right

    @property
    def share(self) -> float:
        return self.second / self.steps


def continuations(known: Sequence[int]) -> list[int]:
    """Return the tokens that followed the last ones, best first."""
    end, found = len(known), Counter[int]()
    matches = []
    for at in range(end - MATCH - 1, -1, -1):
        if known[at : at + MATCH] == known[end - MATCH :]:
            length = MATCH
            while length < min(LONGEST, at + MATCH) and known[at + MATCH - 1 - length] == known[end - 1 - length]:
                length += 1
            matches.append((length, known[at + MATCH]))
    longest = max((length for length, _ in matches), default=0)
    for length, token in matches[:OCCURRENCES]:
        found[token] += 1 + LONGEST * (length == longest)
    return [token for token, _ in found.most_common(2)]


def count(scenario: str, texts: Sequence[Text]) -> Count:
    tokens = steps = rejected = second = 0
    for text in texts:
        known, reply, at = list(text.prompt), text.reply, 0
        while at < len(reply):
            draft, ahead, accepted = list[list[int]](), list(known), 0
            while len(draft) < TOKENS and (found := continuations(ahead)):
                draft.append(found)
                ahead.append(found[0])
            while accepted < min(len(draft), len(reply) - at) and draft[accepted][0] == reply[at + accepted]:
                accepted += 1
            steps += 1
            if accepted < min(len(draft), len(reply) - at):
                rejected += 1
                second += reply[at + accepted] in draft[accepted][1:]
            known += reply[at : at + accepted + 1]
            at += accepted + 1
        tokens += len(reply)
    return Count(scenario, tokens, steps, rejected, second)


def main(arguments: Sequence[str] | None = None) -> list[Count]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="length of the replies")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(Path(folder))
    found = []
    for name, make in (("code", code_edit), ("rag", quotes)):
        one = count(name, [make(tokenizer, 7 * seed + 3, options.tokens) for seed in range(options.texts)])
        found.append(one)
        print(
            f"{name}: {one.tokens} tokens in {one.steps} steps, {one.rejected} with a wrong draft token, of which the "
            f"runner-up is right in {one.second} ({100 * one.share:.1f} % of the steps)"
        )
    return found


if __name__ == "__main__":
    main()
