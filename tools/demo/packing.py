"""Samples to token ids, and ids to packed rows of fixed length."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from tools.demo import arithmetic
from tools.demo.network import Rows
from tools.demo.sample import Sample
from tools.demo.template import prompt
from tools.demo.tokenizer import END, START, spell
from tools.demo_corpus import SCENES, WEIGHTS, training_groups

SHORT_ROW, LONG_ROW = 128, 512  # tokens
LINES_SHARE = 0.15  # of the short groups


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sample or of a turn that several samples share."""

    ids: list[int]
    trained: list[bool]  # whether the token is one the model has to write
    start: int = 0  # position of the first token


@dataclass
class Row:
    """A row being filled."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)

    def add(self, group: list[Piece]) -> None:
        """A first piece and, if there are more, samples that continue it each on its own."""
        first = self.sample[-1] + 1 if self.sample else 0
        for number, piece in enumerate(group, first):
            self.ids += piece.ids
            nexts = zip(piece.ids[1:], piece.trained[1:], strict=True)
            self.targets += [*(token if trained else -1 for token, trained in nexts), -1]
            self.positions += range(piece.start, piece.start + len(piece.ids))
            self.sample += [number] * len(piece.ids)
            self.parent += [first if len(group) > 1 else number] * len(piece.ids)


def encode(tokenizer: Tokenizer, sample: Sample) -> Piece:
    """One sample as ids: the prompt is read, the reply and its end are trained."""
    read = tokenizer.encode(prompt(sample)).ids
    if sample.spelled:
        thought = (
            tokenizer.encode(sample.target[: len(sample.target) - len(sample.reply)]).ids if sample.thinking else []
        )
        written = thought + spell(tokenizer, sample.reply)
    else:
        written = tokenizer.encode(sample.target).ids
    written.append(tokenizer.token_to_id(END))
    return Piece(read + written, [False] * len(read) + [True] * len(written))


def encode_group(tokenizer: Tokenizer, group: tuple[Sample, ...]) -> list[Piece]:
    """Samples with one system turn: that turn once, then each sample's rest."""
    pieces = [encode(tokenizer, sample) for sample in group]
    if len(pieces) == 1:
        return pieces
    start, ids = tokenizer.token_to_id(START), pieces[0].ids
    shared = ids.index(start, 1)
    rests = [Piece(piece.ids[shared:], piece.trained[shared:], shared) for piece in pieces]
    return [Piece(ids[:shared], [False] * shared), *rests]


def encode_lines(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[Piece]:
    """Plain sums; only the answers are trained."""
    ids: list[int] = []
    trained: list[bool] = []
    for question, answer in arithmetic.lines(rng, count):
        for text, wanted in ((question, False), (answer, True)):
            tokens = tokenizer.encode(text).ids
            ids += tokens
            trained += [wanted] * len(tokens)
    return [Piece(ids, trained)]


def length(group: list[Piece]) -> int:
    return sum(len(piece.ids) for piece in group)


def fill(rows: list[Row], tokens: int, groups: Iterator[list[Piece]], misses: int) -> list[list[Piece]]:
    """Puts groups into the first row of `tokens` that has space, until `misses` of them fit nowhere; returns these."""
    left: list[list[Piece]] = []
    while len(left) < misses:
        group = next(groups)
        needed = length(group)
        row = next((row for row in rows if len(row.ids) + needed <= tokens), None)
        if row is None:
            left.append(group)
        else:
            row.add(group)
    return left


def stack(rows: Iterable[Row], tokens: int, device: str) -> Rows:
    """Rows as tensors, padded at the end with tokens that see only themselves."""
    columns: dict[str, list[list[int]]] = {"ids": [], "targets": [], "positions": [], "sample": [], "parent": []}
    for row in rows:
        gap = tokens - len(row.ids)
        padding = range(-gap, 0)
        columns["ids"].append(row.ids + [0] * gap)
        columns["targets"].append(row.targets + [-1] * gap)
        columns["positions"].append(row.positions + [0] * gap)
        columns["sample"].append([*row.sample, *padding])
        columns["parent"].append([*row.parent, *padding])
    return Rows(**{name: torch.tensor(values, device=device) for name, values in columns.items()})


class Feed:
    """Endless batches of short and of long rows from the training stream of one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.plain, self.scenes = training_groups(seed, WEIGHTS), training_groups(seed + 1, SCENES)
        self.short: list[list[Piece]] = []  # groups that found no place yet
        self.long: list[list[Piece]] = []

    def _short(self) -> Iterator[list[Piece]]:
        while True:
            if self.short:
                yield self.short.pop()
                continue
            if self.random.random() < LINES_SHARE:
                group = encode_lines(self.tokenizer, self.random, self.random.randint(1, 2))
            else:
                group = encode_group(self.tokenizer, next(self.plain))
            if length(group) > SHORT_ROW:
                self.long.append(group)
            else:
                yield group

    def _long(self) -> Iterator[list[Piece]]:
        while True:
            group = self.long.pop() if self.long else encode_group(self.tokenizer, next(self.scenes))
            if length(group) <= LONG_ROW:
                yield group

    def short_rows(self, count: int) -> list[Row]:
        """Rows of at most SHORT_ROW tokens."""
        rows = [Row() for _ in range(count)]
        self.short += fill(rows, SHORT_ROW, self._short(), 8)
        return rows

    def long_rows(self, count: int) -> list[Row]:
        """Rows of at most LONG_ROW tokens: tool scenes and other long conversations, gaps filled with short ones."""
        rows = [Row() for _ in range(count)]
        self.long += fill(rows, LONG_ROW, self._long(), 2)
        self.short += fill(rows, LONG_ROW, self._short(), 4)
        return rows
