"""Compare a served late-interaction model with transformers' hidden states and all token pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from transformers import BertConfig, BertModel

from tests.appliance.server.http.pooling.conftest import save_bert

MARKERS, LENGTHS, SKIPPED = ("[Q] ", "[D] "), (8, 12), [",", "?"]
QUERY = "what is the answer"
DOCUMENTS = ["hello world, hello", "the answer is 42, isn't it? stop hello world", "stop"]
ACTIVATION = "torch.nn.modules.linear.Identity"


class Late:
    def __init__(self, folder: Path) -> None:
        save_bert(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKERS])
        self.tokenizer.save(str(folder / "tokenizer.json"))
        torch.manual_seed(11)
        size = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        vocab = self.tokenizer.get_vocab_size()
        self.model = BertModel(BertConfig(vocab_size=vocab, max_position_embeddings=64, **size)).eval()
        self.model.save_pretrained(folder)
        self.weight = torch.randn(16, 48)
        kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
        modules = [{"idx": at, "name": str(at), "path": "1_Dense" * at, "type": kind} for at, kind in enumerate(kinds)]
        (folder / "1_Dense").mkdir()
        save_file({"linear.weight": self.weight}, folder / "1_Dense" / "model.safetensors")
        dense = {"in_features": 48, "out_features": 16, "bias": False, "activation_function": ACTIVATION}
        reading = {
            **{"query_prefix": MARKERS[0], "document_prefix": MARKERS[1], "skiplist_words": SKIPPED},
            **{"query_length": LENGTHS[0], "document_length": LENGTHS[1], "do_query_expansion": False},
        }
        for name, value in (
            ("modules.json", modules),
            ("1_Dense/config.json", dense),
            ("config_sentence_transformers.json", reading),
        ):
            (folder / name).write_text(json.dumps(value))

    def vectors(self, text: str, side: int) -> np.ndarray:
        """Return the vectors of the tokens that take part in scoring."""
        self.tokenizer.enable_truncation(LENGTHS[side] - 1)
        ids = self.tokenizer.encode(text).ids
        ids.insert(1, self.tokenizer.token_to_id(MARKERS[side]))
        with torch.no_grad():
            states = self.model(torch.tensor([ids])).last_hidden_state[0] @ self.weight.T
        skipped = [self.tokenizer.token_to_id(word) for word in SKIPPED] if side else []
        kept = [at for at, token in enumerate(ids) if token not in skipped]
        found: np.ndarray = torch.nn.functional.normalize(states, dim=-1).numpy()[kept]
        return found

    def score(self, document: str) -> float:
        query, other = self.vectors(QUERY, 0), self.vectors(document, 1)
        return float(sum(max(float(left @ right) for right in other) for left in query))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> tuple[Late, Path]:
    folder = tmp_path_factory.mktemp("late")
    return Late(folder), folder


@pytest.fixture(scope="module")
def served(launch: Callable[..., Any], late: tuple[Late, Path]) -> Any:
    path = late[1] / "manifest.yaml"
    model = {"source": {"path": str(late[1])}, "names": ["late"], "dtype": "float32"}
    path.write_text(yaml.safe_dump({"apiVersion": "slipway/v2", "model": model, "hardware": {"device": "cpu"}}))
    appliance = launch(path)
    appliance.wait_ready()
    return appliance


@pytest.mark.nightly("tests/appliance/server/http/pooling/test_late.py::test_vectors_of_either_kind_of_text")
def test_scores_and_rankings_are_those_of_the_closest_tokens(served: Any, late: tuple[Late, Path]) -> None:
    """SC-02"""
    want = [late[0].score(text) for text in DOCUMENTS]
    reply = served.client.post("/score", json={"queries": QUERY, "documents": DOCUMENTS}).json()
    assert np.allclose([one["score"] for one in reply["data"]], want, atol=1e-4)
    ranked = served.client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [one["index"] for one in ranked] == list(np.argsort(want)[::-1])


@pytest.mark.nightly("tests/e2e/test_pooling.py::test_vectors_of_tokens_are_those_of_transformers")
def test_vectors_of_tokens_are_those_of_transformers(served: Any, late: tuple[Late, Path]) -> None:
    for side, kind in enumerate(("query", "document")):
        body = {"input": DOCUMENTS, "input_type": kind}
        reply = served.client.post("/v1/embeddings", json=body).json()
        for one, text in zip(reply["data"], DOCUMENTS, strict=True):
            assert np.allclose(one["embedding"], late[0].vectors(text, side), atol=1e-4)
    refused = served.client.post("/v1/embeddings", json={"input": DOCUMENTS})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_type"
