"""POST /score and /rerank over a toy model, in every spelling and for every kind of model."""

import asyncio
from typing import Any

import cohere
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from appliance.server.pooling.pairs import RERANKER_BEGIN, RERANKER_END, RERANKER_TASK
from engine.text.backend import divide_room
from tests.appliance.server.http.pooling.model import tokens, unit, values

QUERY = "the answer is 42"
DOCUMENTS = ["hello world", "stop", "isn't it? the answer"]


@pytest.fixture
def crosser(make_pooling):
    """A cross-encoder: pairs as its tokenizer joins them, one label."""
    return make_pooling("classify", "score", labels=1, pairs="tokenizer", activation="sigmoid")


def refusal(gateway, body, url="/score"):
    status, reply = gateway.post(url, body)
    assert status == 400, reply
    return reply["error"]["message"], reply["error"]["param"]


def scores(gateway, body, url="/score") -> list[float]:
    status, reply = gateway.post(url, body)
    assert status == 200, reply
    assert [one["index"] for one in reply["data"]] == list(range(len(reply["data"])))
    return [one["score"] for one in reply["data"]]


def of_pairs(gateway, count: int) -> list[float]:
    """Return the cross-encoder's scores of the last prompts."""
    return [float(values(submit, 1)[0]) for submit in gateway.submits[-count:]]


SIDES = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]


@pytest.mark.parametrize("url", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), SIDES)
def test_every_name_of_the_sides_means_the_same(crosser, first, second, url):
    """SC-01 spellings; POOL-04"""
    expected = scores(crosser, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert scores(crosser, {first: QUERY, second: DOCUMENTS}, url) == expected
    assert expected == pytest.approx(of_pairs(crosser, 3), abs=1e-6)


def test_a_side_may_be_an_object_of_parts(crosser):
    """POOL-04 string, list, object and mixed forms"""
    plain = scores(crosser, {"text_1": QUERY, "text_2": DOCUMENTS})
    parts: list[Any] = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
    assert scores(crosser, {"text_1": {"content": QUERY}, "text_2": parts}) == plain
    assert scores(crosser, {"text_1": [QUERY], "text_2": [DOCUMENTS[0], *parts[1:]]}) == plain


def test_one_goes_with_one_with_all_or_each_with_its_own(crosser):
    """SC-01 1:1, 1:N, N:N"""
    assert len(scores(crosser, {"text_1": QUERY, "text_2": DOCUMENTS[0]})) == 1
    assert scores(crosser, {"text_1": [QUERY] * 3, "text_2": DOCUMENTS}) == scores(
        crosser, {"text_1": QUERY, "text_2": DOCUMENTS}
    )
    swapped = scores(crosser, {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]})
    alone = [scores(crosser, {"text_1": a, "text_2": b})[0] for a, b in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert swapped == alone


@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (2, 1)])
def test_other_counts_are_refused(crosser, counts):
    """SC-01 lengths"""
    message, _ = refusal(crosser, {"text_1": [QUERY] * counts[0], "text_2": ["stop"] * counts[1]})
    assert message.startswith("Input lengths must be either 1:1, 1:N or N:N")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": [], "text_2": ["x"]}, "text_1"),
        ({"queries": "x", "documents": []}, "documents"),
        ({"text_1": "x", "documents": "y"}, "text_1"),
        ({"text_1": "x", "text_2": "y", "data_1": "x", "data_2": "y"}, "text_1"),
        ({"text_1": "x", "text_2": {"type": "text", "text": "y"}}, "body.text_2"),
        ({"text_1": "x", "text_2": {"content": [{"type": "image_url", "image_url": {"url": "u"}}]}}, "text_2"),
        ({"text_1": "x", "text_2": "y", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"text_1": "x", "text_2": "y", "max_tokens_per_query": 32}, "max_tokens_per_query"),
        ({"text_1": "x", "text_2": "hello " * 40}, "input_tokens"),
        ({"text_1": "x", "text_2": "y", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"text_1": "x", "text_2": "y", "cache_salt": "a/b"}, "cache_salt"),
        ({"text_1": "x", "text_2": "y", "normalize": True}, "normalize"),
    ],
)
def test_unscorable_inputs_are_refused_with_their_field(crosser, body, param):
    """SC-01 empty sides; POOL-04 bare parts and media"""
    assert refusal(crosser, body)[1] == param
    assert not crosser.submits


def test_the_pair_that_is_wrong_is_named(crosser):
    assert refusal(crosser, {"text_1": "x", "text_2": ["y", "hello " * 40]})[0].startswith("text_2[1]: This model")


def test_pairs_are_joined_as_transformers_joins_them(crosser, bert):
    """SC-02 cross-encoder prompts and token types"""
    crosser.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    theirs = AutoTokenizer.from_pretrained(bert)
    for submit, document in zip(crosser.submits, DOCUMENTS, strict=True):
        wanted = theirs(QUERY, document, return_token_type_ids=True)
        assert list(submit.prompt) == wanted["input_ids"]
        types = [kind for kind, count in enumerate(submit.segments) for _ in range(count)]
        assert types == wanted["token_type_ids"]
        assert submit.pooling.task == "classify"


@pytest.mark.parametrize("texts", [(QUERY, "hello world " * 20), (QUERY * 8, "stop"), (QUERY * 8, "hello world " * 20)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [-1, 9, 12])
def test_pairs_are_cut_as_transformers_cuts_them(crosser, bert, texts, side, keep):
    """SC-02 the longer text is truncated first"""
    body = {"text_1": texts[0], "text_2": texts[1], "truncate_prompt_tokens": keep, "truncation_side": side}
    crosser.post("/score", body)
    theirs = AutoTokenizer.from_pretrained(bert, truncation_side=side)
    wanted = theirs(*texts, truncation="longest_first", max_length=32 if keep == -1 else keep)
    assert list(crosser.submits[0].prompt) == wanted["input_ids"]


def test_room_is_shared_without_loss():
    for first in range(12):
        for second in range(12):
            for room in range(24):
                kept = divide_room([first, second], room)
                assert sum(kept) == min(room, first + second)
                assert 0 <= kept[0] <= first and 0 <= kept[1] <= second


def test_a_side_is_cut_before_it_is_joined(crosser):
    """B6 max_tokens_per_query and max_tokens_per_doc"""
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    crosser.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS[2], **limits})
    own = [crosser.tokenizer.encode(text, add_special_tokens=False) for text in (QUERY, DOCUMENTS[2])]
    cls, *_, sep = crosser.tokenizer.encode("")
    assert list(crosser.submits[0].prompt) == [cls, *own[0][:2], sep, *own[1][:3], sep]
    assert crosser.submits[0].segments == (4, 4)


def test_usage_counts_both_sides_of_every_pair(crosser, embedder):
    """SC-04"""
    for gateway in (crosser, embedder):
        _, reply = gateway.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        sides = [len(gateway.tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS)]
        pairs = sum(sides[0] + count for count in sides[1:])
        joint = 3 if gateway is crosser else 0  # [CLS] appears once in a pair that is one prompt
        assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == pairs - joint


def test_logits_are_scores_where_the_activation_is_off(crosser):
    """B6 use_activation"""
    (on,) = scores(crosser, {"text_1": QUERY, "text_2": "stop"})
    (off,) = scores(crosser, {"text_1": QUERY, "text_2": "stop", "use_activation": False})
    assert on == pytest.approx(1 / (1 + np.exp(-off)), abs=1e-6)


# Models whose vectors are compared


def test_vectors_are_compared_by_their_angle(embedder):
    """SC-02 bi-encoder; POOL-05 equals the cosine of /v1/embeddings"""
    given = scores(embedder, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert len(embedder.submits) == 4 and {one.pooling.task for one in embedder.submits} == {"embed"}
    data = embedder.post("/v1/embeddings", {"input": [QUERY, *DOCUMENTS]})[1]["data"]
    rows = torch.tensor([one["embedding"] for one in data], dtype=torch.float64)
    assert given == pytest.approx(torch.cosine_similarity(rows[:1], rows[1:]).tolist(), abs=1e-9)


def test_vectors_are_compared_with_the_model_similarity(make_pooling):
    gateway = make_pooling("embed", "score", similarity="dot", activation="none")
    (given,) = scores(gateway, {"text_1": QUERY, "text_2": "stop", "use_activation": False})
    one, other = (values(submit).astype("f4").astype(float) for submit in gateway.submits)
    assert given == pytest.approx(one @ other)


def test_queries_and_documents_have_prompts_of_their_own(make_pooling):
    gateway = make_pooling("embed", "score", prompts={"query": "hello ", "document": "the "})
    scores(gateway, {"text_1": "world", "text_2": "world"})
    wanted = [gateway.tokenizer.encode(text) for text in ("hello world", "the world")]
    assert [list(submit.prompt) for submit in gateway.submits] == wanted


def test_an_instruction_is_nothing_to_vectors(embedder):
    assert refusal(embedder, {"text_1": "x", "text_2": "y", "instruction": "z"})[1] == "instruction"


def test_token_vectors_are_compared_each_with_the_closest(make_pooling):
    """SC-02 late interaction"""
    gateway = make_pooling("token_embed", "score")
    given = scores(gateway, {"text_1": QUERY, "text_2": DOCUMENTS})
    query, *documents = [torch.from_numpy(unit(tokens(submit.prompt))) for submit in gateway.submits]
    assert given == pytest.approx([(query @ one.T).amax(dim=1).sum().item() for one in documents], abs=1e-5)


# Rerankers that were language models


PAIR = "Q: {{ query }} D: {{ messages[1].content }}{% if instruction %} I: {{ instruction }}{% endif %}{{ more }}"


def test_a_template_joins_the_pair(make_pooling, tmp_path):
    """SC-02 a template; ENC-03"""
    path = tmp_path / "pair.jinja"
    path.write_text(PAIR)
    gateway = make_pooling("classify", "score", labels=1, pairs="template", chat_template=str(path))
    given = scores(gateway, {"text_1": QUERY, "text_2": DOCUMENTS})
    wanted = [gateway.tokenizer.encode(f"Q: {QUERY} D: {text}", add_special_tokens=False) for text in DOCUMENTS]
    assert [list(submit.prompt) for submit in gateway.submits] == wanted
    assert given == pytest.approx(of_pairs(gateway, 3), abs=1e-6)
    body = {"text_1": "a", "text_2": "b", "instruction": "c", "chat_template_kwargs": {"more": "!"}}
    scores(gateway, body)
    assert gateway.tokenizer.decode(gateway.submits[-1].prompt) == gateway.tokenizer.decode(
        gateway.tokenizer.encode("Q: a D: b I: c!", add_special_tokens=False)
    )


def test_a_reranker_without_its_template_is_an_error(make_pooling, bert, tmp_path):
    (tmp_path / "tokenizer.json").write_text((bert / "tokenizer.json").read_text())
    gateway = make_pooling("classify", "score", labels=1, pairs="template", model=str(tmp_path))
    message, _ = refusal(gateway, {"text_1": "a", "text_2": "b"})
    assert "model.chat_template" in message


def test_the_yes_or_no_form_stands_between_its_begin_and_end(make_pooling, checkpoint):
    """SC-02 Qwen's rerankers; ENC-03"""
    gateway = make_pooling("classify", "score", labels=1, pairs="reranker", model=str(checkpoint), max_context=900)
    scores(gateway, {"text_1": QUERY, "text_2": DOCUMENTS[:1]})
    text = f"<Instruct>: {RERANKER_TASK}\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}"
    assert list(gateway.submits[0].prompt) == gateway.ids(RERANKER_BEGIN + text + RERANKER_END)
    cut = {"text_1": QUERY, "text_2": "hello " * 900, "instruction": "find", "truncate_prompt_tokens": -1}
    scores(gateway, cut)
    prompt = list(gateway.submits[-1].prompt)
    begin, end = gateway.ids(RERANKER_BEGIN), gateway.ids(RERANKER_END)
    assert len(prompt) == 900 and prompt[: len(begin)] == begin and prompt[-len(end) :] == end
    assert "<Instruct>: find" in gateway.tokenizer.decode(prompt)


# /rerank


RANK = {"query": QUERY, "documents": DOCUMENTS}


@pytest.mark.parametrize("url", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_from_the_best_on(crosser, url):
    """B6 rerank"""
    status, reply = crosser.post(url, RANK)
    assert status == 200 and reply["id"].startswith("score-") and reply["model"] == "qwen"
    known = scores(crosser, {"text_1": QUERY, "text_2": DOCUMENTS})
    order = sorted(range(3), key=lambda index: -known[index])
    assert [one["index"] for one in reply["results"]] == order
    assert [one["relevance_score"] for one in reply["results"]] == [known[index] for index in order]
    assert [one["document"]["text"] for one in reply["results"]] == [DOCUMENTS[index] for index in order]
    tokens = sum(len(submit.prompt) for submit in crosser.submits[:3])
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert reply["meta"]["api_version"]["version"] == ("2" if url == "/v2/rerank" else "1")


@pytest.mark.parametrize(("top", "count"), [(None, 3), (0, 3), (2, 2), (9, 3)])
def test_top_n_limits_the_documents(crosser, top, count):
    """B6 top_n"""
    assert len(crosser.post("/rerank", {**RANK, "top_n": top})[1]["results"]) == count


def test_documents_may_be_objects_and_be_left_out(crosser):
    """B6 shapes of Cohere and Jina"""
    plain = crosser.post("/rerank", RANK)[1]["results"]
    objects = [{"text": DOCUMENTS[0]}, {"content": DOCUMENTS[1]}, DOCUMENTS[2]]
    assert crosser.post("/rerank", {**RANK, "documents": objects})[1]["results"] == plain
    bare = crosser.post("/rerank", {**RANK, "return_documents": False})[1]["results"]
    assert [one.keys() for one in bare] == [{"index", "relevance_score"}] * 3


def test_equal_documents_keep_their_order(crosser):
    results = crosser.post("/rerank", {"query": "x", "documents": ["stop"] * 5})[1]["results"]
    assert [one["index"] for one in results] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**RANK, "top_n": -1}, "body.top_n"),
        ({**RANK, "documents": []}, "documents"),
        ({**RANK, "documents": [{"type": "text", "text": "x"}]}, "body.documents.0"),
        ({"documents": DOCUMENTS}, "body.query"),
    ],
)
def test_unrankable_inputs_are_refused_with_their_field(crosser, body, param):
    assert refusal(crosser, body, "/rerank")[1] == param


def client_of(gateway, work):
    async def call():
        async with gateway.client() as http:
            return await work(cohere.AsyncClientV2("none", base_url="http://gateway", httpx_client=http))

    return asyncio.run(call())


def test_coheres_client_ranks(crosser, embedder):
    """B6 /v2/rerank with the official client"""
    for gateway in (crosser, embedder):
        reply = client_of(
            gateway, lambda client: client.rerank(model="qwen", query=QUERY, documents=DOCUMENTS, top_n=2)
        )
        known = scores(gateway, {"text_1": QUERY, "text_2": DOCUMENTS})
        best = sorted(known, reverse=True)[:2]
        assert [one.relevance_score for one in reply.results] == best
        assert [known[one.index] for one in reply.results] == best
        assert reply.meta.api_version.version == "2"


def test_coheres_first_client_ranks(crosser):
    """B6 /v1/rerank with the official client"""

    async def call():
        async with crosser.client() as http:
            client = cohere.AsyncClient("none", base_url="http://gateway", httpx_client=http)
            documents = [{"text": text} for text in DOCUMENTS]
            return await client.rerank(model="qwen", query=QUERY, documents=documents, return_documents=True)

    reply = asyncio.run(call())
    assert {one.document.text for one in reply.results} == set(DOCUMENTS)
    assert [one.relevance_score for one in reply.results] == sorted(
        (one.relevance_score for one in reply.results), reverse=True
    )
