"""Measure speculative decoding without a draft model, relative to decoding without drafts.

    python -m benchmarks.speculation [--shape qwen2.5-0.5b] [--weights int8] [--rows 32] [--scenarios code,rag,…]

The checkpoint has random weights in the shape of a known model. The model runs completely and its tokens are sampled,
but each sampled token is then replaced by that of a known text, so that replies repeat their prompts as real ones do.
Texts are files of this repository, in tokens of a tokenizer that is trained on them:

code        one request: a Python file, and the same file with other names as the reply
rag         one request: paragraphs of documentation, and a reply that quotes them
json        one request with a JSON schema
perfect     one request, whose drafts are always right
random      one request, whose drafts are always wrong
load        `--rows` requests at the same time: half of `code`, and half of texts that do not repeat. Only `off` and
            `auto` are compared, because other methods never pause

Prompts are in the prefix cache after the first round, which warms up, so rounds consist of decode steps.

All engines are loaded at the same time, and rounds of each alternate in one run. A ratio is the median of the ratios of
rounds, in which a disturbance by other processes affects both sides.

    python -m benchmarks.speculation --scenarios code,rag --python llama.cpp=/opt/llama/bin/python

also runs llama.cpp in the same rounds, without drafts and with its prompt lookup, for the scenarios of one request
without a grammar. Its tokens are those of the same texts, and its weights have as many bits.
"""

import argparse
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.llama_cpp_peer import LlamaCppPeer, add_option
from benchmarks.lora import Rate
from benchmarks.shapes import make
from engine.api.messages import Grammar
from engine.core.drafting import Propose
from engine.core.loop import Handle
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.core.sequence import Sequence as Request
from engine.llm import LLM, Params

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 6000  # tokens of the tokenizer, which is trained in seconds
PROMPT = 600  # maximum tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer"},
        "shipping_address": {
            "type": "object",
            "properties": {"street_name": {"type": "string"}, "postal_code": {"type": "string"}},
            "required": ["street_name", "postal_code"],
            "additionalProperties": False,
        },
        "payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
        "requires_signature": {"type": "boolean"},
        "requested_delivery_date": {"type": "string"},
    },
    "required": [
        "customer_identifier",
        "shipping_address",
        "payment_method",
        "requires_signature",
        "requested_delivery_date",
    ],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Text:
    """A request and its reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Scenario:
    texts: tuple[Text, ...]
    modes: tuple[str, ...]  # "off" and those that are compared with it


@dataclass(frozen=True)
class Result:
    """Rates are in tokens per second of all requests."""

    scenario: str
    rows: int
    mode: str
    rate: Rate
    relative: Rate  # to the same engine without drafts in the same round
    acceptance_length: float  # mean number of tokens of a row with a draft; 0: not known, of llama.cpp
    draft_tokens: int
    drafting_share: float  # of the time, for the search of drafts


MODES: Mapping[str, Mapping[str, Any]] = {
    "off": {"speculation": "off"},
    "jump-ahead": {"speculation": "jump-ahead"},
    "ngram": {"speculation": "ngram"},
    "suffix": {"speculation": "suffix"},
    "auto": {"speculation": "suffix", "adaptive_drafts": True},
}


PEER = {"llama.cpp": 0, "llama.cpp-lookup": 1}
"""Modes of llama.cpp, and whether they have drafts."""


class ScriptedWorker:
    """A worker whose sampled tokens are replaced by those of known texts. Its steps take the time of real ones."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.texts: dict[tuple[int, ...], tuple[int, ...]] = {}  # prompt -> prompt and reply
        self._slots: dict[int, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Handle:
        for new in plan.new:
            self._slots[new.slot] = self.texts[new.ids[: new.prompt_tokens]]
        return _Scripted(plan, dict(self._slots), self._worker.start(plan, masks))


@dataclass(frozen=True)
class _Scripted:
    plan: StepPlan
    slots: dict[int, tuple[int, ...]]
    handle: Handle

    def result(self) -> StepResult:
        result = self.handle.result()
        sampled, further = list[int](), dict[int, tuple[int, ...]]()
        for index, row in enumerate(self.plan.rows):
            text, position = self.slots[row.slot], row.first + row.count - len(row.drafts)
            tokens = text[position : position + row.samples]
            accepted = _accepted(tokens, row.drafts)
            if accepted:
                further[index] = tokens[1 : 1 + accepted]
            sampled.append(tokens[0] if tokens else 0 if row.sample else -1)
        return replace(result, sampled=tuple(sampled), further=further, failed={})


def _accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    count = 0
    while count + 1 < len(tokens) and tokens[count] == drafts[count]:
        count += 1
    return count


# Texts


def train_tokenizer(out: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer on this repository, and write it to the checkpoint."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "engine").rglob("*.py"))]
    tokenizer.train([str(path) for path in files], trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    return tokenizer


def code_edit(tokenizer: Tokenizer, seed: int, length: int) -> Text:
    """Return a file, and the file with three renamed identifiers."""
    files = sorted((ROOT / "engine").rglob("*.py"))
    source = ""
    while len(source) < 4000:
        source = files[seed % len(files)].read_text()
        seed += 1
    draw = random.Random(seed)
    prompt = tokenizer.encode(f"Rename some identifiers.\n{seed}\n{source}").ids[:PROMPT]
    kept = tokenizer.decode(prompt).partition(f"{seed}\n")[2]
    names = sorted(set(re.findall(r"\b[a-z]{4,}_[a-z]{3,}\b", kept)))
    for name in draw.sample(names, min(3, len(names))):
        kept = re.sub(rf"\b{name}\b", f"new_{name[::-1]}", kept)
    return Text(tuple(prompt), tuple(tokenizer.encode(kept).ids[:length]))


def quotes(tokenizer: Tokenizer, seed: int, length: int) -> Text:
    """Return paragraphs, and a reply that quotes a sentence after some words of its own."""
    files = sorted((ROOT / "docs").glob("*.md"), key=lambda path: -path.stat().st_size)
    paragraphs = [one for one in files[seed % 8].read_text().split("\n\n") if len(one) > 120]
    draw = random.Random(seed)
    draw.shuffle(paragraphs)
    prompt = tokenizer.encode("Answer with quotes.\n" + "\n\n".join(paragraphs)).ids[:PROMPT]
    reply: list[int] = []
    while len(reply) < length:
        reply += [draw.randrange(300, VOCABULARY) for _ in range(5)]  # words of its own
        start = draw.randrange(len(prompt) - 30)
        reply += prompt[start : start + 25]
    return Text(tuple(prompt), tuple(reply[:length]))


def order(tokenizer: Tokenizer) -> Text:
    """Return a reply that follows SCHEMA."""
    reply = json.dumps(
        {
            "customer_identifier": 48213,
            "shipping_address": {"street_name": "Rosenweg 7", "postal_code": "80331"},
            "payment_method": "bank_transfer",
            "requires_signature": True,
            "requested_delivery_date": "2026-03-14",
        }
    )
    prompt = tokenizer.encode("Extract the order as JSON: Rosenweg 7 in 80331, by bank transfer.").ids
    return Text(tuple(prompt), tuple(tokenizer.encode(reply).ids), Grammar("json_schema", json.dumps(SCHEMA)))


def noise(seed: int, length: int) -> Text:
    """Return a text that does not repeat."""
    draw = random.Random(seed)
    return Text(
        tuple(draw.randrange(300, VOCABULARY) for _ in range(200)),
        tuple(draw.randrange(300, VOCABULARY) for _ in range(length)),
    )


def scenarios(tokenizer: Tokenizer, rows: int, length: int) -> dict[str, Scenario]:
    lookup = ("off", "ngram", "suffix", "auto")
    texts = [code_edit(tokenizer, 7 * row, length) if row % 2 else noise(row, length) for row in range(rows)]
    return {
        "code": Scenario((code_edit(tokenizer, 3, length),), lookup),
        "rag": Scenario((quotes(tokenizer, 1, length),), lookup),
        "json": Scenario((order(tokenizer),), ("off", "jump-ahead", "auto")),
        "perfect": Scenario((noise(1, length),), ("off", "ngram")),
        "random": Scenario((noise(1, length),), ("off", "ngram", "auto")),
        "load": Scenario(tuple(texts), ("off", "auto")),
    }


# Measurement


def measure(
    name: str,
    scenario: Scenario,
    llms: Mapping[str, LLM],
    rounds: int,
    peer: LlamaCppPeer | None = None,
    draft_tokens: int = 0,
) -> list[Result]:
    """Return the results of each mode. peer: llama.cpp, which runs in the same rounds."""
    workers: dict[str, ScriptedWorker] = {}
    for mode in scenario.modes:
        llm = llms[mode]
        workers[mode] = ScriptedWorker(llm._worker)
        workers[mode].texts = {text.prompt: text.prompt + text.reply for text in scenario.texts}
        llm._loop._worker = workers[mode]
    counters = {mode: llms[mode]._loop.scheduler.counters for mode in scenario.modes}
    searches = {mode: llms[mode]._loop.scheduler.drafting.search for mode in scenario.modes}
    if name in ("perfect", "random"):
        for mode in scenario.modes:
            llms[mode]._loop.scheduler.drafting.search = _artificial(name, workers[mode].texts)
    rates: dict[str, list[float]] = {mode: [] for mode in scenario.modes}
    before: dict[str, tuple[int, int, int, float]] = {}
    seconds = dict.fromkeys(scenario.modes, 0.0)
    others: dict[str, list[float]] = {}  # of llama.cpp
    for number in range(rounds + 1):  # the first one warms up
        for mode in scenario.modes if number % 2 else scenario.modes[::-1]:
            if number == 1:
                before[mode] = _counts(llms[mode])
            rate, took = _rate(llms[mode], scenario.texts)
            if number:
                rates[mode].append(rate)
                seconds[mode] += took
        for mode in PEER if peer is not None and name in ("code", "rag") else ():
            (text,), drafts = scenario.texts, PEER[mode] * draft_tokens
            assert peer is not None, "checked above"
            rate = peer.measure("text", prompt=text.prompt, reply=text.reply, drafts=drafts)
            if number:
                others.setdefault(mode, []).append(rate)
    for mode, search in searches.items():
        llms[mode]._loop.scheduler.drafting.search = search
    results = []
    for mode in scenario.modes:
        assert counters[mode] is llms[mode]._loop.scheduler.counters, "counters of one run"
        after = _counts(llms[mode])
        drafts, drafted, accepted = (after[at] - before[mode][at] for at in range(3))
        results.append(
            Result(
                name,
                len(scenario.texts),
                mode,
                Rate.of(rates[mode]),
                Rate.of([one / base for one, base in zip(rates[mode], rates["off"], strict=True)]),
                1 + accepted / drafts if drafts else 1.0,
                drafted,
                (after[3] - before[mode][3]) / max(seconds[mode], 1e-9),
            )
        )
    for mode, found in others.items():
        relative = [one / base for one, base in zip(found, others["llama.cpp"], strict=True)]
        results.append(Result(name, 1, mode, Rate.of(found), Rate.of(relative), 0.0, 0, 0.0))
    return results


def _counts(llm: LLM) -> tuple[int, int, int, float]:
    counters, drafting = llm._loop.scheduler.counters, llm._loop.scheduler.drafting
    return counters.drafts, counters.draft_tokens, counters.accepted_tokens, drafting.seconds


def _artificial(name: str, texts: Mapping[tuple[int, ...], tuple[int, ...]]) -> Propose:
    def search(request: Request, count: int) -> tuple[int, ...]:
        text, known = texts[request.submit.prompt], len(request.ids)
        wanted = text[known : known + count]
        return wanted if name == "perfect" else tuple(299 - token % 7 for token in wanted)

    return search


def _rate(llm: LLM, texts: Sequence[Text]) -> tuple[float, float]:
    """Return tokens per second from the last first token to the last token, and the duration."""
    params = [
        Params(temperature=0.0, max_tokens=len(text.reply), ignore_eos=text.grammar is None, grammar=text.grammar)
        for text in texts
    ]
    llm._loop.scheduler.drafting.replies.clear()  # which would have this one
    replies = llm.generate([text.prompt for text in texts], params)
    for reply, text in zip(replies, texts, strict=True):
        assert tuple(reply.ids) == text.reply[: len(reply.ids)] and not reply.error, reply.error
    timings = [reply.timing for reply in replies if reply.timing is not None]
    start, end = min(timing.first_token for timing in timings), max(timing.last_token for timing in timings)
    return (sum(len(reply.ids) for reply in replies) - len(replies)) / max(end - start, 1e-9), end - start


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--checkpoints", type=Path, help="folder that keeps the checkpoint")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--scenarios", default="code,rag,json,perfect,random,load")
    parser.add_argument("--rows", type=int, default=32, help="requests of the scenario load")
    parser.add_argument("--tokens", type=int, default=256, help="length of the replies")
    parser.add_argument("--draft-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_option(parser)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = make(options.shape, (options.checkpoints or Path(folder)) / options.shape)
        tokenizer = train_tokenizer(checkpoint)
        chosen = {
            name: scenario
            for name, scenario in scenarios(tokenizer, options.rows, options.tokens).items()
            if name in options.scenarios.split(",")
        }
        sizes: dict[str, Any] = {
            "weights": options.weights,
            "threads": options.threads,
            "max_running": options.rows,
            "max_context": PROMPT + options.tokens + 8,
            "draft_tokens": options.draft_tokens,
            "weight_cache": folder,
        }
        wanted = dict.fromkeys(mode for scenario in chosen.values() for mode in scenario.modes)
        llms = {mode: stack.enter_context(LLM(checkpoint, **sizes, **MODES[mode])) for mode in wanted}
        peer = None
        if options.python:
            room = sizes["max_context"] + options.draft_tokens
            peer = LlamaCppPeer(options.python, checkpoint, options.weights, threads=options.threads, tokens=room)
            stack.enter_context(peer)
        results: list[Result] = []
        for name, scenario in chosen.items():
            for one in measure(name, scenario, llms, options.rounds, peer, options.draft_tokens):
                results.append(one)
                print(_line(one), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return results


def _line(one: Result) -> str:
    rates = f"{_text(one.rate)} tok/s, {_text(one.relative, 3)} of off"
    if one.mode in PEER:
        return f"{one.scenario} ({one.rows} rows) {one.mode}: {rates}"
    return (
        f"{one.scenario} ({one.rows} rows) {one.mode}: {rates}, acceptance length {one.acceptance_length:.2f}, "
        f"{one.draft_tokens} drafted, search {100 * one.drafting_share:.2f} %"
    )


def _text(rate: Rate, digits: int = 1) -> str:
    return f"{rate.median:.{digits}f} ({rate.low:.{digits}f} to {rate.high:.{digits}f})"


if __name__ == "__main__":
    main()
