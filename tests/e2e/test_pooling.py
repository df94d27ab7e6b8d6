"""Compare a served embedding model and a served cross-encoder with transformers in float32."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import yaml
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel

from tests.appliance.server.http.pooling.conftest import save_bert
from tests.documented import documented

TEXTS = ["hello world", "the answer is 42", "isn't it? stop", "hello"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class Served:
    """An appliance of a tiny model, and transformers' own."""

    def __init__(self, launch: Callable[..., Any], folder: Path, kind: type, **more: Any) -> None:
        torch.manual_seed(7)
        self.model = kind(BertConfig(**SIZES, **more)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter if parameter.ndim == 1 else 0))
        self.model.save_pretrained(folder)
        save_bert(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        manifest = {
            "apiVersion": "slipway/v2",
            "model": {"source": {"path": str(folder)}, "names": ["tiny"], "dtype": "float32"},
            "hardware": {"device": "cpu"},
        }
        path = folder / "manifest.yaml"
        path.write_text(yaml.safe_dump(manifest))
        self.appliance = launch(path)
        self.url = self.appliance.url

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.appliance.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def run(self, *texts: str) -> Any:
        with torch.no_grad():
            return self.model(**self.tokenizer(*texts, return_tensors="pt", return_token_type_ids=True))


@pytest.fixture(scope="module")
def embedder(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Served:
    one = Served(launch, tmp_path_factory.mktemp("embed"), BertModel)
    one.appliance.wait_ready()
    return one


@pytest.fixture(scope="module")
def scorer(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Served:
    labels = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    one = Served(launch, tmp_path_factory.mktemp("score"), BertForSequenceClassification, **labels)
    one.appliance.wait_ready()
    return one


def mean(served: Served, text: str) -> torch.Tensor:
    return served.run(text).last_hidden_state[0].mean(dim=0)


def test_vectors_are_those_of_transformers(embedder: Served) -> None:
    """EM-01 EM-02; POOL-02 within 1e-5 of unit length"""
    one = embedder
    client = openai.OpenAI(api_key="none", base_url=f"{one.url}/v1", max_retries=0)
    for form in ({}, {"encoding_format": "float"}):
        reply = client.embeddings.create(model="tiny", input=TEXTS, **form)
        for entry, text in zip(reply.data, TEXTS, strict=True):
            wanted = torch.nn.functional.normalize(mean(one, text), dim=0)
            assert np.allclose(entry.embedding, wanted, atol=1e-5)
    assert reply.usage.prompt_tokens == sum(len(one.tokenizer(text)["input_ids"]) for text in TEXTS)
    plain = one.post("/v1/embeddings", {"input": TEXTS[0], "use_activation": False})
    assert np.allclose(plain["data"][0]["embedding"], mean(one, TEXTS[0]), atol=1e-4)


def test_a_batch_larger_than_a_step_keeps_its_order(embedder: Served) -> None:
    """EM-02"""
    one = embedder
    texts = [" ".join(TEXTS[at % 4 :] + TEXTS[: at % 7]) for at in range(100)]
    together = one.post("/v1/embeddings", {"input": texts})["data"]
    for at in (0, 1, 57, 99):
        alone = one.post("/v1/embeddings", {"input": texts[at]})["data"][0]["embedding"]
        assert np.allclose(together[at]["embedding"], alone, atol=1e-5)


def test_vectors_of_tokens_are_those_of_transformers(embedder: Served) -> None:
    one = embedder
    reply = one.post("/pooling", {"input": TEXTS[1], "task": "token_embed", "use_activation": False})
    assert np.allclose(reply["data"][0]["data"], one.run(TEXTS[1]).last_hidden_state[0], atol=1e-4)


def test_scores_of_vectors_are_their_cosines(embedder: Served) -> None:
    """SC-02; POOL-05"""
    one = embedder
    reply = one.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    first, *others = (mean(one, text) for text in TEXTS)
    wanted = [torch.cosine_similarity(first, other, dim=0).item() for other in others]
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.nightly("tests/engine/layers/test_encoders.py::test_segments_have_rows_of_their_own")
def test_a_cross_encoder_scores_as_its_own_forward_pass(scorer: Served) -> None:
    """SC-02; POOL-05"""
    one = scorer
    wanted = [one.run(TEXTS[0], text).logits[0, 0] for text in TEXTS]
    body = {"query": TEXTS[0], "documents": TEXTS}
    ranked = one.post("/v1/rerank", body)["results"]
    order = sorted(range(4), key=lambda index: -float(wanted[index]))
    assert [entry["index"] for entry in ranked] == order
    given = [entry["relevance_score"] for entry in ranked]
    assert given == pytest.approx([torch.sigmoid(wanted[index]).item() for index in order], abs=1e-5)
    logits = one.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS, "use_activation": False})["data"]
    assert [entry["score"] for entry in logits] == pytest.approx([float(value) for value in wanted], abs=1e-4)


@pytest.mark.nightly("tests/appliance/server/http/pooling/test_embeddings.py::test_a_text_is_labelled")
def test_a_classifier_names_its_label(scorer: Served) -> None:
    entry = scorer.post("/classify", {"input": TEXTS[0]})["data"][0]
    assert entry["label"] == "relevant" and entry["num_classes"] == 1
    wanted = torch.sigmoid(scorer.run(TEXTS[0]).logits[0, 0]).item()
    assert entry["probs"] == pytest.approx([wanted], abs=1e-5)
    reply = scorer.appliance.client.post("/v1/embeddings", json={"input": "x"})
    assert reply.status_code == 404 and "it serves" in reply.json()["error"]["message"]


def test_what_a_model_does_not_serve_is_told(embedder: Served) -> None:
    """H-7"""
    body = {"messages": [{"role": "user", "content": "x"}]}
    reply = embedder.appliance.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 404 and "it serves" in reply.json()["error"]["message"]


@pytest.mark.nightly("tests/e2e/test_survive.py::test_no_request_notices_that_its_engine_was_killed")
def test_an_engine_that_is_killed_costs_no_request(embedder: Served, eventually: Callable[..., None]) -> None:
    one = embedder
    expected = one.post("/v1/embeddings", {"input": TEXTS})["data"]
    before = one.appliance.pids()["engine-0"]
    os.kill(before, signal.SIGKILL)
    eventually("another engine", lambda: one.appliance.pids().get("engine-0", before) != before)
    reply = httpx.post(f"{one.url}/v1/embeddings", json={"input": TEXTS}, timeout=60)
    assert reply.status_code == 200, reply.text
    for one_entry, other in zip(reply.json()["data"], expected, strict=True):
        assert np.allclose(one_entry["embedding"], other["embedding"], atol=1e-6)


def test_the_command_of_the_page_runs(embedder: Served) -> None:
    reply = json.loads(documented("docs/pooling.md", "one text", embedder.url, {'"demo"': '"tiny"'}))
    assert len(reply["data"]) == 2
