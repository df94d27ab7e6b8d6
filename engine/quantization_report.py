"""Cost of quantizing a model: `python -m engine.quantization_report JOB.json`, which `slipway quantize` runs.

The model runs in float32 with torch over windows of a text. The matrices of one layer at a time are then replaced by
their rounded values, in each format, and the distributions of the next token are compared: mean KL divergence from the
unrounded model, change of the perplexity, and share of positions with the same most likely token. The KL divergences
of the layers are added to predict those of a mix of formats. For a budget of bytes, a mix is proposed: from 4 bits
everywhere, layers get more bits in the order of the divergence that a byte removes. The mix is measured too.
"""

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.api.config import WeightBits
from engine.api.errors import EXIT_PERMANENT, CheckpointError, EngineError
from engine.convert import refusal
from engine.distributed.world import SINGLE
from engine.formats.load_time import LOAD_FORMATS
from engine.kv.layout import layout
from engine.layers.linear import LinearLayer
from engine.layers.model import TextModel, make_pages
from engine.lowering.footprint import quantization_group
from engine.models.checkpoint import read_checkpoint
from engine.models.sources import join, sources
from engine.text import Tokenizer
from engine.weights.files import Weights
from engine.weights.quantized import QuantizedWeights
from engine.worker.batch import build_batch

WINDOW = 512  # tokens that are scored from an empty context
BLOCK = 16  # tokens of a KV block
FORMATS = ("int4", "int8", "stored")  # with rising accuracy
_BITS: Mapping[WeightBits, int] = {"int4": 4, "int8": 8}
SCALE_BITS = 16
_NUMBER = re.compile(r"(.+?\.\d+)\.")


class Job(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Model and text of a measurement."""

    model: str  # folder of a checkpoint, or a GGUF file
    text: str  # a text file
    tokens: int = 1024  # read from the text, at most
    budget: int = 0  # bytes of all matrices of a mix; 0: no mix is proposed
    is_applied: bool = False  # the mix is for `slipway convert` of this checkpoint
    threads: int = 0  # 0: as torch chooses
    trust_remote_code: bool = False


class Cost(msgspec.Struct, kw_only=True):
    """Cost of rounding some matrices, against the model in float32."""

    kl: float  # mean KL divergence of the distributions, nats
    perplexity: float
    change: float  # of the perplexity, relative
    same_top: float  # share of positions with the same most likely token


class LayerCost(msgspec.Struct, kw_only=True):
    """Bytes of the matrices of a layer in each format, and the cost of rounding these alone."""

    name: str
    bytes: dict[str, int]
    costs: dict[str, Cost]


class Report(msgspec.Struct, kw_only=True):
    """Results of a measurement."""

    tokens: int
    perplexity: float  # of the model in float32
    layers: list[LayerCost]
    all: dict[str, Cost]  # all layers in one format
    all_bytes: dict[str, int]
    other_bytes: int = 0  # other tensors in the format of the checkpoint
    mix: dict[str, str] = {}  # layer → format
    mix_bytes: int = 0
    mix_cost: Cost | None = None


@dataclass(frozen=True)
class _Reader:
    """Reads weights of a checkpoint and rounds them."""

    weights: Weights | QuantizedWeights
    format: str
    group: int

    def __call__(self, name: str) -> Tensor:
        found = self.weights.read(name)
        if self.format == "stored" or not name.endswith(".weight"):
            return found
        rounded: Tensor = LOAD_FORMATS[self.format].quantize(found, self.group).restored()
        return rounded


class _Measured:
    """A model in float32 whose matrices can be replaced by rounded ones."""

    def __init__(self, job: Job) -> None:
        checkpoint = read_checkpoint(job.model, job.trust_remote_code)
        model = checkpoint.model
        if model.head is None or model.encoder is not None or model.foreign is not None:
            raise CheckpointError(
                f"{checkpoint.path}: only decoders are measured; this model has other outputs or inputs"
            )
        if job.is_applied and (reason := refusal(checkpoint)):
            raise CheckpointError(f"{checkpoint.path}: {reason}")
        tokenizer = Tokenizer(checkpoint.path)
        ids = tokenizer.encode(_text(Path(job.text)))[: job.tokens]
        self._windows = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
        self._windows = [window for window in self._windows if len(window) > 1]
        if not self._windows:
            raise CheckpointError(f"{job.text}: has {len(ids)} tokens; at least 2 are needed")
        self._layout = layout(model, block_tokens=BLOCK, element_bytes=4, scale_bytes=0, ranks=1)
        self._model = TextModel(model, self._layout, SINGLE, torch.float32, "cpu")
        self._model.load(checkpoint)
        plain = Weights(checkpoint.tensors, lambda fraction: None)
        own = checkpoint.quantization
        self._weights = plain if own is None else QuantizedWeights(plain, own, sources(model))
        self._stored: dict[str, int] = {}
        for one, info in checkpoint.tensors.items():
            path, _, last = one.rpartition(".")
            self._stored[path] = self._stored.get(path, 0) + (0 if last == "bias" else info.bytes)
        self._rows = {one.removesuffix(".weight"): shape[0] for one, shape in sources(model).items()}
        self._groups: dict[str, int] = {format: quantization_group(format, model) for format in _BITS}
        self.layers: dict[str, list[LinearLayer]] = {}
        for layer in self._model.weights.by_name.values():
            if isinstance(layer, LinearLayer) and layer._rounded:
                name = _NUMBER.match(f"{layer.path}.")
                self.layers.setdefault(name[1] if name else layer.path, []).append(layer)

    @property
    def tokens(self) -> int:
        return sum(map(len, self._windows))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors but biases."""
        return sum(self._stored.values())

    def sizes(self, name: str) -> dict[str, int]:
        """Return the bytes of a layer's matrices in each format, with the scales."""
        found = dict.fromkeys(FORMATS, 0)
        for layer in self.layers[name]:
            for piece in layer.slots.pieces:
                numbers, path = piece.rows * layer.slots.inputs, join(layer.path, piece.source)
                found["stored"] += self._stored.get(path, 0) * piece.rows // self._rows[path]
                for format, bits in _BITS.items():
                    found[format] += numbers * bits // 8 + numbers // self._groups[format] * SCALE_BITS // 8
        return found

    @torch.inference_mode()
    def round(self, name: str, format: str) -> None:
        """Replace the matrices of a layer by their values in a format."""
        read = _Reader(self._weights, format, self._groups.get(format, 0))
        for layer in self.layers[name]:
            layer.load(read, self._model.target)
        self._weights.release()

    @torch.inference_mode()
    def score(self) -> list[Tensor]:
        """Return the log probabilities at all positions of each window, [tokens - 1, vocabulary] float32."""
        blocks = WINDOW // BLOCK
        pages = make_pages(self._layout, blocks + 1, torch.float32, torch.device("cpu"))
        table = np.arange(1, blocks + 1, dtype=np.int32)[None]
        found = []
        for window in self._windows:
            batch = build_batch(
                np.zeros(1, np.int64),
                np.zeros(1, np.int64),
                np.array([len(window)]),
                tokens=np.array([window], np.int32),
                rope_lengths=np.array([len(window)]),
                tables=[table] * len(self._layout.groups),
                block_tokens=BLOCK,
            )
            hidden = self._model.forward(batch, pages)
            found.append(self._model.logits(hidden[:-1].clone()).log_softmax(1))
        return found

    def cost(self, base: Sequence[Tensor], rows: Sequence[Tensor]) -> Cost:
        """Compare log probabilities. base: of the model in float32."""
        count = sum(map(len, rows))
        kl = sum(float((b.exp() * (b - a)).sum()) for a, b in zip(rows, base, strict=True)) / count
        same = sum(int((a.argmax(1) == b.argmax(1)).sum()) for a, b in zip(rows, base, strict=True)) / count
        own, other = self._loss(rows), self._loss(base)
        return Cost(kl=max(kl, 0.0), perplexity=math.exp(own), change=math.expm1(own - other), same_top=same)

    def _loss(self, rows: Sequence[Tensor]) -> float:
        """Return the mean negative log probability of the text."""
        chosen = [
            row.gather(1, torch.tensor(window[1:])[:, None]) for row, window in zip(rows, self._windows, strict=True)
        ]
        return -float(torch.cat(chosen).double().mean())

    def perplexity(self, rows: Sequence[Tensor]) -> float:
        return math.exp(self._loss(rows))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as a text in UTF-8: {error}") from error


def measure(job: Job) -> Report:
    """Measure each layer in each format, all layers in one format, and a mix for the budget. Raises CheckpointError if
    the budget is too small, or the mix cannot be applied."""
    if job.threads:
        torch.set_num_threads(job.threads)
    model = _Measured(job)
    base = model.score()
    rounded = [format for format in FORMATS if format != "stored"]
    layers, began_s = [], time.monotonic()
    for number, name in enumerate(model.layers, 1):
        costs = {}
        for format in rounded:
            model.round(name, format)
            costs[format] = model.cost(base, model.score())
        model.round(name, "stored")
        layers.append(LayerCost(name=name, bytes=model.sizes(name), costs=costs))
        left = format_duration((time.monotonic() - began_s) / number * (len(model.layers) - number))
        print(f"{number} of {len(model.layers)} layers measured, {left} left", file=sys.stderr, flush=True)
    report = Report(
        tokens=model.tokens,
        perplexity=model.perplexity(base),
        layers=layers,
        all={},
        all_bytes={format: sum(layer.bytes[format] for layer in layers) for format in FORMATS},
    )
    report.other_bytes = model.stored_bytes - report.all_bytes["stored"]
    for format in rounded:
        report.all[format] = _together(model, base, dict.fromkeys(model.layers, format))
    if job.budget:
        report.mix = proposal(layers, job.budget)
        report.mix_bytes = sum(layer.bytes[report.mix[layer.name]] for layer in layers)
        report.mix_cost = _together(model, base, report.mix)
    return report


def format_duration(seconds: float) -> str:
    """Return a duration for people, in seconds below 2 minutes, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _together(model: _Measured, base: Sequence[Tensor], mix: Mapping[str, str]) -> Cost:
    for name, format in mix.items():
        model.round(name, format)
    return model.cost(base, model.score())


def useful(layer: LayerCost) -> list[str]:
    """Return the formats of a layer without those that take as many bytes as a more accurate one, with rising
    accuracy. Matrices that are quantized in the checkpoint may be smaller than int8."""
    found: list[str] = []
    for format in reversed(FORMATS):
        if not found or layer.bytes[format] < layer.bytes[found[-1]]:
            found.append(format)
    return found[::-1]


def proposal(layers: Sequence[LayerCost], budget: int) -> dict[str, str]:
    """Return a format for each layer, whose bytes do not exceed the budget. Steps to more bits are taken in the order
    of the divergence that they remove per byte. Raises CheckpointError if the smallest formats need more."""
    formats = {layer.name: useful(layer) for layer in layers}
    mix = {name: found[0] for name, found in formats.items()}
    used = sum(layer.bytes[mix[layer.name]] for layer in layers)
    if used > budget:
        raise CheckpointError(f"the budget of {budget:,} bytes is too small: the matrices need at least {used:,}")
    steps = []
    for layer in layers:
        costs = {**{format: cost.kl for format, cost in layer.costs.items()}, "stored": 0.0}
        for lower, higher in pairwise(formats[layer.name]):
            more = layer.bytes[higher] - layer.bytes[lower]
            steps.append(((costs[lower] - costs[higher]) / more, more, layer.name, lower, higher))
    taken = True
    while taken:
        possible = [step for step in steps if mix[step[2]] == step[3] and used + step[1] <= budget and step[0] > 0]
        taken = bool(possible)
        if taken:
            _, more, name, _, higher = max(possible)
            mix[name] = higher
            used += more
    return mix


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine.quantization_report JOB.json", file=sys.stderr)
        return 2
    try:
        report = measure(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job))
    except EngineError as error:
        print(error, file=sys.stderr)
        return EXIT_PERMANENT
    print(msgspec.json.encode(report).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
