"""An engine process with a real model is killed in the middle of replies; the next one continues them.

Like the gateway, the test submits each request again, with the tokens so far.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api.client import EngineClient, Interrupted
from engine.api.config import write_config
from engine.api.messages import Sampling, Submit, Timing
from engine.arguments import engine_config
from engine.media.spectrogram import spectrogram_item
from kernels.cpu.library import best
from tests.cells import Shows
from tests.engine import test_speculation as lookup
from tests.engine.layers import conftest, families
from tests.engine.layers.test_families import Family
from tests.engine.speech import whisper
from tests.engine.test_process import connected
from tests.engine.test_recurrent_drafts import recurrent
from tests.engine.translators import CASES as TRANSLATORS
from tests.engine.translators import write
from tests.tiers import thinned

ROOT = Path(__file__).parents[2]
path = lookup.path  # fixture
TIE = 1e-5  # two logprobs that differ by less may be exchanged by rounding
FIRST = {kind: name for name, (kind, _) in reversed(conftest.CASES.items())}  # of each architecture
MODELS = [
    *(f"decoder-{name}" for name in FIRST.values()),
    *(f"family-{name}" for name in families.CASES if not name.endswith("-odd")),
    *(f"translator-{name}" for name in TRANSLATORS),
    "whisper",
]


@dataclass
class Case:
    """A checkpoint, requests with its greedy replies, and the logits of transformers for a reply."""

    path: Path
    submits: list[Submit]
    logits: Any  # from a request and its reply to the logits after each token of the reply

    def check(self, submit: Submit, reply: tuple[int, ...]) -> None:
        assert len(reply) == submit.max_tokens
        rows = self.logits(submit, list(reply)).log_softmax(-1)
        for token, row in zip(reply, rows, strict=True):
            assert row.max() - row[token] < TIE, f"{submit.id}: {token} instead of {row.argmax()}"


def ask(number: int, prompt: tuple[int, ...], **more: Any) -> Submit:
    return Submit(str(number), prompt, Sampling(temperature=0.0), 17 + number, ignore_eos=True, **more)


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(model: str, folder: Path) -> Case:
    kind, _, name = model.partition("-")
    lengths = [1 + 5 * number % 23 for number in range(12)]
    if kind == "whisper":
        return make_whisper(folder)
    if kind == "translator":
        translator = write(folder, name)
        begins = len(translator.begins)

        def replied(submit: Submit, reply: list[int]) -> torch.Tensor:
            source = list(submit.prompt[: submit.source])
            return translator.logits(source, [*translator.begins, *reply[:-1]])[begins - 1 :]

        prompts = [(*random_ids(length, length), *translator.begins) for length in lengths]
        submits = [ask(at % 20, one, source=len(one) - begins) for at, one in enumerate(prompts)]
        return Case(translator.path, submits, replied)
    if kind == "decoder":
        path = folder / name
        conftest.random_model(name).save_pretrained(path)
        saved: Any = conftest.Saved(path)
    else:
        saved = Family(name, folder / name)

    def continued(submit: Submit, reply: list[int]) -> torch.Tensor:
        return saved.logits([*submit.prompt, *reply])[len(submit.prompt) - 1 : -1]

    return Case(saved.path, [ask(at, tuple(random_ids(one, one))) for at, one in enumerate(lengths)], continued)


def make_whisper(folder: Path) -> Case:
    made = whisper.write(folder)
    spectrograms = [whisper.spectrogram(seed) for seed in range(12)]
    source = spectrograms[0].shape[1] // 2
    prompt = ((0,) * source) + made.begins()

    def heard(submit: Submit, reply: list[int]) -> torch.Tensor:
        ids = [*submit.prompt[source:], *reply[:-1]]
        return made.logits(spectrograms[int(submit.id)], ids)[len(submit.prompt) - source - 1 :]

    submits = [ask(at, prompt, source=source, media=(spectrogram_item(one),)) for at, one in enumerate(spectrograms)]
    return Case(made.path, submits, heard)


@contextmanager
def started(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "engine", str(config)], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def read(
    client: EngineClient,
    submit: Submit,
    got: dict[str, list[int]],
    timings: list[Timing] | None = None,
    victim: subprocess.Popen[bytes] | None = None,
) -> Submit | None:
    """Read a reply; kill the engine after 20 tokens of all replies. Return the interrupted request."""
    try:
        async for delta in client.generate(submit):
            got[submit.id] += delta.ids
            if timings is not None and delta.timing is not None:
                timings.append(delta.timing)
            if victim is not None and sum(map(len, got.values())) >= 20:
                victim.kill()
    except Interrupted as interrupted:
        return interrupted.resume()
    return None


def continue_replies(
    model: Path, submits: list[Submit], folder: Path, **more: Any
) -> tuple[dict[str, list[int]], list[Timing]]:
    """Kill an engine in the middle of replies, and let the next one continue them. Return the replies by request, and
    the costs of those that the next engine continued."""
    config, small = folder / "config.json", {"block_tokens": 4, "kv_bytes": 1 << 22, "max_running": 4}
    where = {"model": str(model), "socket": str(folder / "e"), "threads": 1, "kernels": best()}
    settings = engine_config(**where, **{**small, **more})
    write_config(settings, config)
    got: dict[str, list[int]] = {submit.id: [] for submit in submits}
    timings: list[Timing] = []

    async def main() -> list[Submit | None]:
        with started(config) as first:
            async with connected(type("Process", (), {"config": settings})) as client:
                rest = await asyncio.gather(*(read(client, one, got, victim=first) for one in submits))
        with started(config):
            async with connected(type("Process", (), {"config": settings})) as client:
                await asyncio.gather(*(read(client, one, got, timings) for one in rest if one is not None))
        return list(rest)

    rest = asyncio.run(main())
    assert any(one is not None and one.emitted for one in rest), "no reply was interrupted after its first token"
    return got, timings


@pytest.mark.parametrize("model", thinned(MODELS, ["family-jamba"]))
def test_next_engine_continues_replies_of_a_killed_one(model: str, tmp_path: Path, shows: Shows) -> None:
    case = make(model, tmp_path / "model")
    got, _ = continue_replies(case.path, case.submits, tmp_path, max_context=64 if model != "whisper" else 200)
    for submit in case.submits:
        case.check(submit, tuple(got[submit.id]))
    shows(case.path, "resumed after SIGKILL")


@pytest.mark.parametrize("name", thinned(("qwen3_5", "mamba2", "recurrent-gemma"), ["qwen3_5"]))
def test_recurrent_replies_with_drafts_continue_after_a_kill(name: str, path: Path, tmp_path: Path) -> None:
    """Sampled and greedy replies equal those without drafts, although states of rejected drafts are lost."""
    folder = recurrent(name, tmp_path / name, path)
    wanted = [*lookup.requests("greedy", 3), *lookup.requests("sampled", 2)]
    with lookup.engine(folder, "off", best()) as llm:
        expected = [reply.ids for reply in llm.generate([lookup.REPEATED] * 5, wanted)]
        submits = [llm._submit(lookup.REPEATED, one)[0] for one in wanted]
    drafts = {"speculation": "ngram", "draft_tokens": 3, "max_step_tokens": 32, "max_context": 256}
    got, timings = continue_replies(folder, submits, tmp_path, **drafts)
    assert [got[one.id] for one in submits] == expected
    assert sum(one.accepted_tokens for one in timings) > 0 and sum(one.rejected_tokens for one in timings) > 0
