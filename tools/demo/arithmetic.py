"""Adding and subtracting integers of up to three digits; with thinking on, column by column."""

import random
from collections.abc import Callable

from tools.demo.sample import THINKING_SHARE, Sample, ask, is_held_out, listed

ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a} + {b} =",
    "Compute {a} + {b}.", "Calculate {a} + {b}", "Add {a} and {b}.", "How much is {a} + {b}?",
    "How much is {a} plus {b}?", "What's {a} + {b}?", "Please add {a} and {b}.", "What is the sum of {a} and {b}?",
    "Can you add {a} and {b}?", "Solve {a} + {b}.", "Tell me what {a} plus {b} is.", "what is {a}+{b}",
    "what is {a} + {b}?", "{a} plus {b}", "Work out {a} + {b}.", "Add {b} to {a}.", "Sum {a} and {b}",
    "What do you get when you add {a} and {b}?", "What does {a} + {b} equal?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a} - {b} =",
    "Compute {a} - {b}.", "Calculate {a} - {b}", "Subtract {b} from {a}.", "How much is {a} - {b}?",
    "How much is {a} minus {b}?", "What's {a} - {b}?", "Please subtract {b} from {a}.", "Take {b} away from {a}.",
    "Can you subtract {b} from {a}?", "Solve {a} - {b}.", "Tell me what {a} minus {b} is.", "what is {a}-{b}",
    "what is {a} - {b}?", "{a} minus {b}", "Work out {a} - {b}.", "What do you get when you take {b} from {a}?",
    "What does {a} - {b} equal?", "What is left of {a} without {b}?",
)  # fmt: skip
MANY = ("Solve these: {list}", "Compute {list}.", "What is {list}?", "Please calculate {list}.", "Calculate:\n{lines}",
        "Solve:\n{lines}", "{lines}")  # fmt: skip


def number(rng: random.Random) -> int:
    """Up to three digits, more often long than short."""
    digits = rng.choices((1, 2, 3), (1, 3, 4))[0]
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def key(a: int, b: int, sign: str) -> str:
    """The problem's identity; a sum and its mirror image are one problem."""
    return f"{min(a, b)}+{max(a, b)}" if sign == "+" else f"{a}-{b}"


def held_out_pair(a: int, b: int, sign: str) -> bool:
    """One-digit problems are always trained: there are only 200, and the columns of all others are made of them."""
    return max(a, b) > 9 and is_held_out(key(a, b, sign))


def short(rng: random.Random) -> int:
    """Up to two digits."""
    return rng.randrange(100) if rng.random() < 0.8 else rng.randrange(10)


def problem(
    rng: random.Random, held_out: bool, operand: Callable[[random.Random], int] = number
) -> tuple[int, int, str]:
    """Two operands and a sign on the wanted side of the split."""
    while True:
        a, b, sign = operand(rng), operand(rng), rng.choice("+-")
        if held_out_pair(a, b, sign) == held_out:
            return a, b, sign


def result(a: int, b: int, sign: str) -> int:
    return a + b if sign == "+" else a - b


def equation(a: int, b: int, sign: str) -> str:
    return f"{a} {sign} {b} = {result(a, b, sign)}"


def columns(a: int, b: int, sign: str) -> str:
    """The written method, from the right, ten lent where a digit is too small: `52 - 17: 12 - 7 = 5, 5 - 1 - 1 = 3.`"""
    high, low = (a, b) if sign == "+" or a >= b else (b, a)
    steps, carry = [], 0
    for column in range(max(len(str(high)), len(str(low)))):
        x, y = high // 10**column % 10, low // 10**column % 10
        lent = 10 if sign == "-" and x < y + carry else 0
        total = result(x + lent, y, sign) + (carry if sign == "+" else -carry)
        steps.append(f"{x + lent} {sign} {y}{f' {sign} 1' if carry else ''} = {total}")
        carry = int(lent > 0 or (sign == "+" and total > 9))
    return f"{high} {sign} {low}: {', '.join(steps)}."


def answer(a: int, b: int, sign: str) -> str:
    """Return the reply: one-digit sums directly, longer sums after their columns."""
    equals = equation(a, b, sign)
    return equals if max(a, b) < 10 else f"{columns(a, b, sign)} {equals}"


def arithmetic(rng: random.Random, held_out: bool) -> Sample:
    """One problem in words or signs."""
    a, b, sign = problem(rng, held_out)
    question = rng.choice(ADD if sign == "+" else SUBTRACT).format(a=a, b=b)
    worked = rng.random() < THINKING_SHARE
    reply = equation(a, b, sign) if worked else answer(a, b, sign)
    return Sample("arithmetic", key(a, b, sign), ask(question), reply, columns(a, b, sign), thinking=worked)


def several(rng: random.Random, held_out: bool) -> Sample:
    """Two or three problems in one message, answered a line each."""
    problems = [problem(rng, held_out, short) for _ in range(rng.randint(2, 3))]
    questions = [f"{a} {sign} {b}" for a, b, sign in problems]
    text = rng.choice(MANY).format(list=listed(questions), lines="\n".join(questions))
    reply = "\n".join(answer(*p) for p in problems)
    return Sample("several", " ".join(questions), ask(text), reply, "One line each.")


def lines(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Plain lines for training, each a question and its answer: the densest form of the skill."""
    pairs = []
    for _ in range(count):
        a, b, sign = problem(rng, held_out=False)
        pairs.append((f"{a} {sign} {b} = ?\n", f"{answer(a, b, sign)}\n"))
    return pairs
