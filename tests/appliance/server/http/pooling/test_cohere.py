"""POST /v2/embed with Cohere's own client, over a toy model."""

import base64

import cohere
import numpy as np
import pytest

from tests.appliance.server.http.pooling.model import WIDTH, unit, values
from tests.appliance.server.http.pooling.test_scoring import client_of

URL = "/v2/embed"
TEXTS = ["hello world", "stop"]


@pytest.fixture
def gateway(make_pooling):
    return make_pooling("embed", any_dimensions=True, **{"endpoints.compat": "openai"})


def refusal(gateway, body):
    status, reply = gateway.post(URL, body)
    assert status == 400, reply
    return reply["error"]["message"], reply["error"]["param"]


def test_coheres_client_gets_every_type_of_number(gateway):
    """B5.3 embedding_types"""
    kinds = ["float", "base64", "binary", "ubinary"]
    reply = client_of(
        gateway,
        lambda client: client.embed(model="qwen", texts=TEXTS, input_type="search_query", embedding_types=kinds),
    )
    wanted = [values(submit).astype("f4") for submit in gateway.submits]
    assert reply.texts == TEXTS and reply.meta.api_version.version == "2"
    assert reply.meta.billed_units.input_tokens == sum(len(submit.prompt) for submit in gateway.submits)
    assert (np.array(reply.embeddings.float_, "f4") == wanted).all()
    assert [base64.b64decode(one) for one in reply.embeddings.base64] == [one.tobytes() for one in wanted]
    packed = np.packbits(np.array(wanted) >= 0, axis=1)
    assert (np.array(reply.embeddings.ubinary) == packed).all()
    assert (np.array(reply.embeddings.binary) == packed.astype(int) - 128).all()


def test_floats_are_the_default(gateway):
    """B5.3 reply"""
    status, reply = gateway.post(URL, {"model": "qwen", "texts": TEXTS})
    assert status == 200 and reply["embeddings"].keys() == {"float"}
    assert reply["id"].startswith("embd-") and reply["response_type"] == "embeddings_by_type"


def test_inputs_of_parts_are_texts(gateway):
    """B5.3 inputs"""
    inputs = [{"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]}]
    assert gateway.post(URL, {"inputs": inputs})[0] == 200
    assert list(gateway.submits[0].prompt) == gateway.tokenizer.encode("hello\nworld")


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ({}, lambda ids: [ids[0], *ids[1:31], ids[-1]]),
        ({"truncate": "END", "max_tokens": 6}, lambda ids: [ids[0], *ids[1:5], ids[-1]]),
        ({"truncate": "START"}, lambda ids: [ids[0], *ids[-31:]]),
        ({"truncate": "START", "max_tokens": 6}, lambda ids: [ids[0], *ids[-5:]]),
    ],
)
def test_a_long_text_is_truncated_at_the_requested_side(gateway, extra, kept):
    """B5.3 truncate and max_tokens"""
    text = "hello world stop the answer is 42 " * 6
    assert gateway.post(URL, {"texts": [text], **extra})[0] == 200
    assert list(gateway.submits[0].prompt) == kept(gateway.tokenizer.encode(text))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": ["hello " * 40], "truncate": "NONE"}, "input_tokens"),
        ({"texts": ["x", "hello world stop"], "truncate": "NONE", "max_tokens": 3}, "max_tokens"),
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["x"], "images": ["data:…"]}, "texts"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "inputs"),
        ({"texts": ["x"], "embedding_types": ["int8"]}, "body.embedding_types.0"),
        ({"texts": ["x"], "output_dimension": 12, "embedding_types": ["binary"]}, "embedding_types"),
        ({"texts": ["x"], "output_dimension": WIDTH + 1}, "output_dimension"),
        ({"texts": ["x"], "input_type": "other"}, "input_type"),
    ],
)
def test_unsupported_requests_are_rejected_with_their_field(gateway, body, param):
    """B5.3 parameters outside of the supported range"""
    assert refusal(gateway, body)[1] == param
    assert not gateway.submits


def test_vectors_are_cut_to_a_dimension(gateway):
    """B5.3 output_dimension"""
    _, reply = gateway.post(URL, {"texts": TEXTS, "output_dimension": 8})
    whole = [values(submit) for submit in gateway.submits]
    assert [submit.pooling.dimensions for submit in gateway.submits] == [8, 8]
    assert np.allclose(reply["embeddings"]["float"], [unit(one[:8]) for one in whole], atol=1e-6)


def test_a_type_of_input_is_the_models_prompt(make_pooling):
    """B5.3 input_type"""
    prompts = {"query": "hello ", "passage": "the "}
    gateway = make_pooling("embed", prompts=prompts, **{"endpoints.compat": "openai"})
    for kind, prefix in (("search_query", "hello "), ("search_document", "the ")):
        gateway.post(URL, {"texts": ["world"], "input_type": kind})
        assert list(gateway.submits[-1].prompt) == gateway.tokenizer.encode(prefix + "world")
    assert refusal(gateway, {"texts": ["world"], "input_type": "clustering"})[1] == "input_type"


def test_a_type_of_input_without_prompts_follows_the_profile(make_pooling):
    """B5.3 input_type for a model without input types"""
    body = {"texts": ["world"], "input_type": "search_query"}
    assert refusal(make_pooling("embed", **{"endpoints.compat": "vllm"}), body)[1] == "input_type"
    assert make_pooling("embed", **{"endpoints.compat": "openai"}).post(URL, body)[0] == 200


def test_the_cohere_client_raises_the_expected_errors(gateway):
    with pytest.raises(cohere.errors.BadRequestError, match="output_dimension"):
        client_of(
            gateway,
            lambda client: client.embed(model="qwen", texts=["x"], input_type="clustering", output_dimension=99),
        )
