"""Routes of each task, errors of the other routes, and /invocations."""

import pytest

from appliance.server.app import ROUTES, build_app
from appliance.server.schema.cohere import EmbedRequest
from appliance.server.schema.pooling import ClassifyRequest, EmbeddingRequest, PoolingFields, PoolingRequest
from appliance.server.schema.scoring import RerankRequest, ScoreRequest

CHAT = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/classify": {"input": "hello"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["hello"]},
}
SCORED = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
SERVED = {
    ("embed", "score"): {"/v1/embeddings", "/pooling", "/v2/embed", *SCORED},
    ("token_embed", "score"): {"/v1/embeddings", "/pooling", *SCORED},
    ("classify",): {"/pooling", "/classify"},
    ("token_classify",): {"/pooling"},
}


@pytest.mark.parametrize("compat", ["openai", "vllm"])
@pytest.mark.parametrize("tasks", SERVED, ids=" ".join)
def test_a_model_serves_what_its_tasks_allow(make_pooling, tasks, compat):
    """A.3; SC-03 a classifier of several labels does not score"""
    gateway = make_pooling(*tasks, **{"endpoints.compat": compat})
    refused = (404, "NotFoundError") if compat == "openai" else (501, "NotImplementedError")
    for path, body in BODIES.items():
        status, reply = gateway.post(path, body)
        if path in SERVED[tasks]:
            assert status == 200, (path, reply)
        else:
            assert (status, reply["error"]["type"]) == refused, (path, reply)
            assert path in reply["error"]["message"] and f"it serves {', '.join(tasks)}" in reply["error"]["message"]
    paths = build_app(gateway.service).openapi()["paths"]
    assert {path for path in BODIES if path in paths} == SERVED[tasks]


def test_a_generative_model_rejects_pooling(make_gateway):
    """H-7 no 5xx for a task that the model does not support"""
    gateway = make_gateway(**{"endpoints.compat": "openai"})
    for path, body in BODIES.items():
        if "completions" not in path:
            status, reply = gateway.post(path, body)
            assert status == 404 and "it serves generate" in reply["error"]["message"]
    assert gateway.post("/v1/nothing", {})[1]["error"]["message"].startswith("Not Found")


def test_every_route_of_a_task_is_among_the_bodies():
    listed = {route.path for need, router in ROUTES if need is not None for route in router.routes}
    assert set(BODIES) >= {path for path in listed if path.split("/")[-1] in ("score", "rerank", "embed", "classify")}


@pytest.mark.parametrize(
    ("tasks", "body", "prefix"),
    [
        (("embed", "score"), {"input": "hello"}, "embd-"),
        (("embed", "score"), {"messages": CHAT}, "embd-"),
        (("embed", "score"), {"input": "hello", "task": "embed"}, "pooling-"),
        (("embed", "score"), {"texts": ["hello"]}, "embd-"),
        (("embed", "score"), {"query": "a", "documents": ["b"]}, "score-"),
        (("embed", "score"), {"queries": "a", "documents": ["b"]}, "score-"),
        (("embed", "score"), {"text_1": "a", "text_2": "b"}, "score-"),
        (("embed", "score"), {"data_1": "a", "data_2": ["b"], "input": None}, "score-"),
        (("embed", "score"), {"queries": ["a"], "items": ["b"]}, "score-"),
        (("classify", "score"), {"query": "a", "documents": ["b"]}, "score-"),
        (("token_embed",), {"input": "hello"}, "embd-"),
        (("classify",), {"input": "hello"}, "classify-"),
        (("classify",), {"messages": CHAT}, "classify-"),
        (("token_classify",), {"input": "hello"}, "pooling-"),
    ],
)
def test_invocations_finds_the_route_by_the_body(make_pooling, tasks, body, prefix):
    """B9 invocations"""
    status, reply = make_pooling(*tasks).post("/invocations", body)
    assert status == 200 and reply["id"].startswith(prefix)


def test_invocations_of_a_model_that_generates_find_the_route_by_the_body(make_gateway):
    """A.1: `messages` is chat, `prompt` a completion, `input` a response; null counts as absent"""
    gateway = make_gateway(max_context=1024).says("hello")
    for body, path in (
        ({"messages": CHAT}, "/v1/chat/completions"),
        ({"prompt": "hello"}, "/v1/completions"),
        ({"input": "hello"}, "/v1/responses"),
        ({"input": "hello", "messages": None}, "/v1/responses"),
        ({"input": "hello", "messages": CHAT, "prompt": "hello"}, "/v1/chat/completions"),
    ):
        status, reply = gateway.post("/invocations", body)
        direct = gateway.post(path, body)[1]
        assert status == 200 and reply.keys() == direct.keys() and reply["object"] == direct["object"], path
        assert gateway.submits[-1].prompt == gateway.submits[-2].prompt


def test_invocations_stream_a_response(make_gateway):
    gateway = make_gateway(max_context=1024).says("hello")
    lines = gateway.lines("/invocations", {"input": "hello"})
    assert lines[0].startswith("event: response.created\n") and lines[-1].startswith("event: response.completed\n")


@pytest.mark.parametrize("tasks", [("classify",), ("generate",)], ids=" ".join)
def test_invocations_name_the_bodies_that_the_model_takes(make_pooling, tasks):
    status, reply = make_pooling(*tasks).post("/invocations", {"question": "hello"})
    takes = "`messages` or `prompt` or `input`" if tasks == ("generate",) else "`input` or `messages`"
    assert status == 400 and takes in reply["error"]["message"]


@pytest.mark.parametrize(
    ("tasks", "body", "told"),
    [
        (("classify",), {"prompt": "hello"}, "requires a model that serves generate; this one serves classify"),
        (("classify",), {"query": "a", "documents": ["b"]}, "`query` and `documents` requires a model that serves"),
        (("generate",), {"text_1": "a", "text_2": "b"}, "requires a model that serves score; this one serves generate"),
        (("token_classify",), {"texts": ["a"]}, "`texts` requires a model that serves embed; this one"),
    ],
)
def test_invocations_of_another_task_name_the_tasks(make_pooling, tasks, body, told):
    """H-7 no 5xx for a task that the model does not support"""
    status, reply = make_pooling(*tasks).post("/invocations", body)
    assert status == 400 and told in reply["error"]["message"]


@pytest.mark.parametrize("schema", [EmbeddingRequest, PoolingRequest, ClassifyRequest, ScoreRequest, RerankRequest])
def test_all_schemas_have_the_same_base(schema):
    """POOL-01 the base of requests that pool"""
    base = PoolingFields.model_json_schema()["properties"]
    own = schema.model_json_schema()["properties"]
    assert len(base) > 10 and {name: own[name] for name in base} == base
    assert EmbedRequest.model_json_schema()["properties"]["cache_salt"] == base["cache_salt"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (path, field)
        for path in ("/v1/embeddings", "/classify", "/score")
        for field in ("cache_salt", "mm_processor_kwargs")
    ],
)
def test_fields_of_the_base_are_checked(make_pooling, path, field):
    """POOL-01 types"""
    gateway = make_pooling("embed", "classify", "score")
    status, reply = gateway.post(path, {**BODIES[path], field: 7})
    assert status == 400 and reply["error"]["param"] == f"body.{field}"


def test_empty_text_has_no_label(make_pooling):
    """EM-06: a text of special tokens only cannot be classified."""
    gateway = make_pooling("classify", activation="softmax")
    for given, where in (
        ("", "input must"),
        ([""], "input must"),
        (["a", ""], "input[1]: input must"),
        ([], "input must"),
    ):
        status, reply = gateway.post("/classify", {"input": given})
        assert (status, reply["error"]["param"]) == (400, "input")
        assert reply["error"]["message"].startswith(where)
    assert gateway.post("/classify", {"input": [5, 6]})[0] == 200
