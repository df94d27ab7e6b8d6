"""Late interaction, as PyLate reads texts and compares them: markers, lengths, skipped tokens, expanded queries. The
oracle cuts and joins with the tokenizers library itself, and goes through all pairs of tokens."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from appliance.config.gateway import LateReading
from tests.appliance.server.http.pooling.model import tokens, unit

READING = {"markers": ("[Q] ", "[D] "), "lengths": (8, 12), "skipped": (".", ",", "nowhere")}
QUERY = "the answer is hello"
DOCUMENTS = [
    "hello world, hello.",
    "stop. stop, world",
    "the answer is 42, isn't it? hello world stop the answer is 42",
]


@pytest.fixture(scope="module")
def colbert(bert, tmp_path_factory):
    """A tokenizer that has the markers, as PyLate adds them."""
    folder = shutil.copytree(bert, tmp_path_factory.mktemp("late") / "bert")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in READING["markers"]])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": "[MASK]"}))
    return folder


@pytest.fixture
def make_late(make_pooling, colbert):
    def make(**changes):
        reading = LateReading(**(READING | changes))
        return make_pooling("token_embed", "score", late=reading, model=str(colbert), max_context=64)

    return make


def read(folder, text, side, *, expands=False, length=None):
    """Ids of a text as PyLate makes them."""
    backend, at = Tokenizer.from_file(str(folder / "tokenizer.json")), ("query", "document").index(side)
    length = length or READING["lengths"][at]
    backend.enable_truncation(length - 1)
    if expands and side == "query":
        backend.enable_padding(length=length - 1, pad_id=backend.token_to_id("[MASK]"), pad_token="[MASK]")
    ids = backend.encode(text).ids
    return [ids[0], backend.token_to_id(READING["markers"][at]), *ids[1:]]


def vectors(folder, text, side, **options):
    """Return a vector of each token that is not skipped."""
    ids, backend = read(folder, text, side, **options), Tokenizer.from_file(str(folder / "tokenizer.json"))
    skipped = [backend.token_to_id(word) for word in READING["skipped"]] if side == "document" else []
    return [row for row, token in zip(unit(tokens(ids)), ids, strict=True) if token not in skipped]


def alike(query, document):
    best = dict.fromkeys(range(len(query)), -np.inf)
    for (at, left), right in product(enumerate(query), document):
        best[at] = max(best[at], sum(one * other for one, other in zip(left, right, strict=True)))
    return sum(best.values())


@pytest.mark.parametrize("expands", [False, True])
def test_scores_use_the_closest_tokens(make_late, colbert, expands):
    """SC-02"""
    gateway = make_late(expands=expands)
    status, reply = gateway.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    query = vectors(colbert, QUERY, "query", expands=expands)
    want = [alike(query, vectors(colbert, text, "document")) for text in DOCUMENTS]
    assert status == 200
    np.testing.assert_allclose([one["score"] for one in reply["data"]], want, atol=1e-5)
    sent = [list(submit.prompt) for submit in gateway.submits]
    assert sent[0] == read(colbert, QUERY, "query", expands=expands)
    assert sent[1:] == [read(colbert, text, "document") for text in DOCUMENTS]
    assert len(sent[0]) == 8 if expands else len(sent[0]) < 8
    assert len(sent[3]) == 12, "a text is cut to what the model was trained with"
    assert reply["usage"]["prompt_tokens"] == sum(map(len, sent)) + 2 * len(sent[0])


def test_documents_are_ranked_by_them(make_late, colbert):
    status, reply = make_late().post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    query = vectors(colbert, QUERY, "query")
    want = [alike(query, vectors(colbert, text, "document")) for text in DOCUMENTS]
    assert status == 200 and [one["index"] for one in reply["results"]] == list(np.argsort(want)[::-1])


@pytest.mark.parametrize(
    ("kind", "side"), [("query", "query"), ("passage", "document"), ("search_document", "document")]
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_vectors_of_either_kind_of_text(make_late, colbert, path, kind, side):
    status, reply = make_late().post(path, {"input": DOCUMENTS, "input_type": kind})
    assert status == 200
    for one, text in zip(reply["data"], DOCUMENTS, strict=True):
        got = one["embedding" if path == "/v1/embeddings" else "data"]
        np.testing.assert_allclose(got, vectors(colbert, text, side), atol=1e-6)


def test_a_request_may_cut_further(make_late, colbert):
    gateway = make_late()
    body = {"input": DOCUMENTS[2], "input_type": "document", "truncate_prompt_tokens": 6}
    assert gateway.post("/v1/embeddings", body)[0] == 200
    assert list(gateway.submits[0].prompt) == read(colbert, DOCUMENTS[2], "document", length=6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "hello"}, "input_type"),
        ({"input": "hello", "input_type": "clustering"}, "input_type"),
        ({"input": [5, 6], "input_type": "query"}, "input"),
        ({"messages": [{"role": "user", "content": "x"}], "input_type": "query"}, "input"),
    ],
)
def test_a_text_without_input_type_is_rejected(make_late, body, param):
    gateway = make_late()
    status, reply = gateway.post("/v1/embeddings", body)
    assert (status, reply["error"]["param"]) == (400, param) and not gateway.submits


def test_a_tokenizer_without_the_marker_is_an_error(make_late):
    status, reply = make_late(markers=("[X] ", "[D] ")).post("/score", {"text_1": "a", "text_2": "b"})
    assert status == 400 and "needs the token '[X] '" in reply["error"]["message"]
