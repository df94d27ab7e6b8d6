"""POST /v1/embeddings, /pooling and /classify over a toy model."""

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from appliance.server.pooling.contents import content_of
from engine.api.errors import RequestError
from engine.api.messages import Delta, Pooled
from tests.appliance.server.http.pooling.model import LABELS, WIDTH, softmax, tokens, unit, values

URL = "/v1/embeddings"
TEXTS = ["hello world", "the answer is 42", "stop"]


def vector(gateway, text, **pooling):
    """Return the model's vector of a text."""
    (submit,) = [one for one in gateway.submits if list(one.prompt) == gateway.tokenizer.encode(text)][:1]
    return values(submit).astype("f4").tolist()


def refusal(gateway, body, url=URL):
    status, reply = gateway.post(url, body)
    assert status == 400, reply
    return reply["error"]["message"], reply["error"]["param"]


def test_the_official_client_gets_the_models_vectors(embedder):
    """EM-01 the client's default, base64"""
    reply = embedder.openai(lambda client: client.embeddings.create(model="qwen", input=TEXTS))
    assert reply.object == "list" and reply.model == "qwen"
    assert [one.index for one in reply.data] == [0, 1, 2]
    assert [one.embedding for one in reply.data] == [vector(embedder, text) for text in TEXTS]


def test_floats_are_the_numbers_of_base64(embedder):
    """EM-01 bit for bit"""
    _, plain = embedder.post(URL, {"input": TEXTS})
    _, coded = embedder.post(URL, {"input": TEXTS, "encoding_format": "base64"})
    for one, other in zip(plain["data"], coded["data"], strict=True):
        assert one["embedding"] == np.frombuffer(base64.b64decode(other["embedding"]), "<f4").astype(float).tolist()


def test_a_reply_has_the_shape_of_the_reference(embedder):
    """B5.2 reply and usage"""
    status, reply = embedder.post(URL, {"input": "hello world", "model": "alias", "user": "me"})
    count = len(embedder.tokenizer.encode("hello world"))
    assert status == 200 and reply.pop("id").startswith("embd-") and isinstance(reply.pop("created"), int)
    assert reply.pop("data")[0].keys() == {"index", "object", "embedding"}
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
    assert reply == {"object": "list", "model": "qwen", "usage": usage}


def test_cached_tokens_are_reported_in_the_openai_profile(make_pooling):
    gateway = make_pooling("embed", cached=3, **{"endpoints.compat": "openai"})
    _, reply = gateway.post(URL, {"input": TEXTS})
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 9, "cache_write_tokens": 18}


def test_a_batch_has_the_same_results_as_single_texts(embedder):
    """EM-02 order"""
    together = [one["embedding"] for one in embedder.post(URL, {"input": TEXTS})[1]["data"]]
    alone = [embedder.post(URL, {"input": text})[1]["data"][0]["embedding"] for text in TEXTS]
    assert together == alone and len({tuple(one) for one in together}) == 3


def test_replies_that_come_out_of_order_are_put_in_order(embedder):
    """EM-02 order of a batch"""
    answered = embedder.router.reply
    slow = embedder.tokenizer.encode(TEXTS[0])
    # An empty delta first makes the first text's vector arrive last.
    embedder.router.reply = lambda submit: [*[Delta(submit.id)] * (list(submit.prompt) == slow), *answered(submit)]
    _, reply = embedder.post(URL, {"input": TEXTS})
    assert [one["embedding"] for one in reply["data"]] == [vector(embedder, text) for text in TEXTS]


def test_token_ids_have_the_same_result_as_their_text(embedder):
    """EM-03 ids and texts"""
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]
    texts = embedder.post(URL, {"input": TEXTS})[1]
    assert embedder.post(URL, {"input": ids})[1]["data"] == texts["data"]
    assert embedder.post(URL, {"input": ids[1]})[1]["data"][0]["embedding"] == texts["data"][1]["embedding"]


def test_prompts_are_the_ids_of_transformers(embedder, bert):
    """EM-03 special tokens"""
    theirs = AutoTokenizer.from_pretrained(bert)
    for special in (True, False):
        embedder.post(URL, {"input": TEXTS, "add_special_tokens": special})
        wanted = [tuple(theirs(text, add_special_tokens=special)["input_ids"]) for text in TEXTS]
        assert [submit.prompt for submit in embedder.submits[-3:]] == wanted


def test_unit_length_can_be_switched_off(embedder):
    """EM-03 activation; POOL-02"""
    on, off, unsaid = (
        np.array(embedder.post(URL, {"input": "hello", **extra})[1]["data"][0]["embedding"])
        for extra in ({"use_activation": True}, {"use_activation": False}, {})
    )
    assert np.linalg.norm(on) == pytest.approx(1, abs=1e-6) and abs(np.linalg.norm(off) - 1) > 0.01
    assert (on == unsaid).all() and np.allclose(on, off / np.linalg.norm(off), atol=1e-6)


def test_the_old_name_of_activation_is_refused_with_the_new_one(embedder):
    """B5.1 normalize"""
    message, param = refusal(embedder, {"input": "hello", "normalize": False})
    assert (message, param) == ("Parameter normalize was removed; use use_activation instead.", "normalize")


def test_inputs_that_are_too_long_are_refused(embedder):
    """EM-04 the window"""
    message, param = refusal(embedder, {"input": "hello " * 40})
    count = len(embedder.tokenizer.encode("hello " * 40))
    assert message.startswith(
        f"This model's maximum context length is 32 tokens. However, your prompt contains {count}"
    )
    assert param == "input_tokens" and not embedder.submits


def test_a_prompt_may_fill_the_window(embedder):
    """EM-04 the window itself"""
    ids = [7] * 32
    assert embedder.post(URL, {"input": ids})[0] == 200
    assert refusal(embedder, {"input": [*ids, 7]})[1] == "input_tokens"


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("keep", [-1, 5])
def test_a_text_is_cut_as_transformers_cuts_it(embedder, bert, keep, side):
    """EM-04 truncation keeps the special tokens"""
    text = "the answer is 42 hello world stop " * 8
    body = {"input": text, "truncate_prompt_tokens": keep} | ({"truncation_side": side} if side else {})
    status, reply = embedder.post(URL, body)
    length = 32 if keep == -1 else keep
    theirs = AutoTokenizer.from_pretrained(bert, truncation_side=side or "right")
    wanted = theirs(text, truncation=True, max_length=length)["input_ids"]
    assert status == 200 and reply["usage"]["prompt_tokens"] == length
    assert embedder.submits[0].prompt == tuple(wanted)


def test_ids_are_cut_as_they_are(embedder):
    """EM-04 truncation of ids"""
    ids = list(range(10, 20))
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        embedder.post(URL, {"input": ids, "truncate_prompt_tokens": 4, "truncation_side": side})
        assert list(embedder.submits[-1].prompt) == kept


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "hello", "truncate_prompt_tokens": 33}, "truncate_prompt_tokens"),
        ({"input": "hello", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["hello", 3]}, "input"),
        ({"input": {"text": "hello"}}, "input"),
        ({}, "input"),
        ({"input": "hello", "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"input": [5, 420]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "hello", "dimensions": 8}, "dimensions"),
        ({"input": "hello", "dimensions": 0}, "dimensions"),
        ({"input": "hello", "padding": "max_length"}, "padding"),
        ({"input": "hello", "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
        ({"input": "hello", "cache_salt": ""}, "cache_salt"),
        ({"input": "hello", "request_id": "a b"}, "request_id"),
        ({"input": "hello", "input_type": "query"}, "input_type"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": "hello", "deadline_ms": 0}, "deadline_ms"),
    ],
)
def test_unsupported_requests_are_rejected_with_their_field(embedder, body, param):
    """EM-06 empty inputs; B5.1 fields"""
    assert refusal(embedder, body)[1] == param
    assert not embedder.submits


@pytest.mark.parametrize("field", ["encoding_format", "embed_dtype", "endianness"])
def test_words_that_a_field_does_not_know_are_refused(embedder, field):
    """ER-21 literal_error"""
    message, param = refusal(embedder, {"input": "hello", field: "other"})
    assert "literal_error" in message and param == f"body.{field}"


def test_an_empty_text_has_the_tokens_that_every_text_has(embedder):
    """EM-06 the empty string"""
    status, reply = embedder.post(URL, {"input": ""})
    assert status == 200 and reply["usage"]["prompt_tokens"] == 2


def test_the_input_that_is_wrong_is_named(embedder):
    for wrong in ("hello " * 40, ""):
        body = {"input": ["hello", wrong, "stop"], "add_special_tokens": False}
        assert refusal(embedder, body)[0].startswith("input[1]: ")
    assert (
        refusal(embedder, {"input": [[7], [8], [500]]})[0]
        == "input[2]: Token id 500 is out of vocabulary; ids are 0 to 419."
    )


def test_the_input_that_fails_in_the_engine_is_named(embedder):
    answered = embedder.router.reply
    bad = embedder.tokenizer.encode(TEXTS[1])

    def reply(submit):
        return [Delta(submit.id, finish="error")] if list(submit.prompt) == bad else answered(submit)

    embedder.router.reply = reply
    status, told = embedder.post(URL, {"input": TEXTS})
    assert status == 500 and told["error"]["message"].startswith("input[1]: ")
    embedder.router.reply, embedder.router.failure = answered, RequestError("no such row", "input")
    message, param = refusal(embedder, {"input": TEXTS})
    assert message.endswith(": no such row") and message.startswith("input[") and param == "input"
    assert all(generation.closed for generation in embedder.router.generations)


def test_a_batch_is_limited(make_pooling):
    gateway = make_pooling("embed", **{"limits.max_prompts": 2})
    assert gateway.post(URL, {"input": TEXTS[:2]})[0] == 200
    message, param = refusal(gateway, {"input": TEXTS})
    assert "limits.max_prompts allows 2" in message and param == "input"


def test_a_client_that_is_gone_ends_all_its_sequences(embedder):
    """ER-15 disconnect"""
    embedder.router.reply, embedder.router.hold = (lambda submit: []), True
    messages = [{"type": "http.request", "body": json.dumps({"input": TEXTS}).encode()}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        await asyncio.sleep(0)
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    head = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": URL, "headers": head, "query_string": b"", "client": None}
    asyncio.run(embedder.app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send))
    assert len(embedder.router.generations) == 3
    assert all(generation.closed for generation in embedder.router.generations)


def test_a_gateway_that_shuts_down_reports_it(embedder):
    embedder.router.reply = lambda submit: [Delta(submit.id, finish="abort")]
    status, _ = embedder.post(URL, {"input": "hello"})
    assert status == 503


def test_a_passed_deadline_is_reported(embedder):
    embedder.router.reply = lambda submit: [Delta(submit.id, finish="deadline")]
    status, _ = embedder.post(URL, {"input": "hello", "deadline_ms": 5})
    assert status == 504 and embedder.submits[0].deadline is not None


def test_the_engine_gets_the_request_options(embedder):
    """B5.1 priority, salt, owner of every sequence; B5.2 nothing is generated"""
    body = {"input": TEXTS, "priority": 4, "cache_salt": "pepper", "request_id": "mine"}
    _, reply = embedder.post(URL, body)
    assert reply["id"] == "embd-mine"
    for index, submit in enumerate(embedder.submits):
        assert (submit.id, submit.priority, submit.salt, submit.max_tokens) == (f"mine-{index}", 4, "pepper", 0)
        assert submit.pooling.task == "embed" and submit.pooling.dimensions is None


def test_vectors_are_cut_for_models_that_were_trained_for_it(make_pooling):
    """EM-05 matryoshka"""
    gateway = make_pooling("embed", any_dimensions=True)
    whole, cut = (
        gateway.post(URL, {"input": "hello", **more})[1]["data"][0]["embedding"] for more in ({}, {"dimensions": 4})
    )
    assert len(whole) == WIDTH and len(cut) == 4 and np.linalg.norm(cut) == pytest.approx(1, abs=1e-6)
    assert np.allclose(cut, unit(np.array(whole)[:4]), atol=1e-6)
    assert refusal(gateway, {"input": "hello", "dimensions": WIDTH + 1})[1] == "dimensions"
    some = make_pooling("embed", dimensions=(4, 8))
    assert len(some.post(URL, {"input": "hello", "dimensions": 8})[1]["data"][0]["embedding"]) == 8
    assert "trained for 4, 8" in refusal(some, {"input": "hello", "dimensions": 5})[0]


def test_a_text_longer_than_a_window_is_embedded_in_pieces(make_pooling):
    """EM-07 the mean of the pieces by their tokens"""
    gateway = make_pooling("embed", "score", max_input=80)
    ids = [5 + at % 300 for at in range(75)]
    status, reply = gateway.post(URL, {"input": [ids, [7, 8], ids[:33]]})
    assert status == 200 and reply["usage"]["prompt_tokens"] == 110
    assert [len(submit.prompt) for submit in gateway.submits] == [32, 32, 11, 2, 32, 1]
    parts = [values(submit) for submit in gateway.submits]
    wanted = [
        unit((32 * parts[0] + 32 * parts[1] + 11 * parts[2]) / 75),
        parts[3],
        unit((32 * parts[4] + parts[5]) / 33),
    ]
    given = [one["embedding"] for one in reply["data"]]
    assert np.allclose(given, wanted, atol=1e-6)
    _, raw_reply = gateway.post(URL, {"input": ids, "use_activation": False})
    plain = [values(submit) for submit in gateway.submits[-3:]]
    mean = (32 * plain[0] + 32 * plain[1] + 11 * plain[2]) / 75
    assert np.allclose(raw_reply["data"][0]["embedding"], mean, atol=1e-5)
    message, param = refusal(gateway, {"input": [9] * 81})
    assert "maximum context length is 80 tokens" in message and param == "input_tokens"
    assert refusal(gateway, {"text_1": "hello " * 40, "text_2": "x"}, "/score")[1] == "input_tokens"
    assert gateway.post("/v2/embed", {"texts": ["hello " * 12, "x"], "truncate": "NONE"})[0] == 200


def test_the_native_vector_length_is_allowed_as_dimensions(embedder):
    """EM-05 the model's own length"""
    assert embedder.post(URL, {"input": "hello", "dimensions": WIDTH})[0] == 200


# Conversations


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "stop"}]


def test_a_conversation_goes_through_the_template(embedder):
    """B5.1 messages"""
    for options, text in (
        ({}, "user: hello\nassistant: stop\n"),
        ({"add_generation_prompt": None}, "user: hello\nassistant: stop\n"),
        ({"add_generation_prompt": True}, "user: hello\nassistant: stop\nassistant:"),
        ({"continue_final_message": True}, "user: hello\nassistant: stop"),
    ):
        assert embedder.post(URL, {"messages": CHAT, **options})[0] == 200
        assert list(embedder.submits[-1].prompt) == embedder.tokenizer.encode(text, add_special_tokens=False)
    embedder.post(URL, {"messages": CHAT, "add_special_tokens": True})
    assert list(embedder.submits[-1].prompt) == embedder.tokenizer.encode("user: hello\nassistant: stop\n")


def test_several_conversations_are_several_inputs(embedder):
    """B5.1 a batch of conversations"""
    _, reply = embedder.post(URL, {"messages": [CHAT, CHAT[:1]]})
    assert [one["index"] for one in reply["data"]] == [0, 1]
    assert refusal(embedder, {"messages": [CHAT, [{"role": "user", "content": 3}]]})[0].startswith("messages[1]: ")


def test_continuing_and_beginning_exclude_each_other(embedder):
    """TK-05"""
    body = {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}
    assert refusal(embedder, body)[1] == "continue_final_message"


def test_a_template_of_a_request_is_refused_unless_it_is_trusted(make_pooling):
    body = {"messages": CHAT, "chat_template": "hello {{ messages[0].content }}"}
    assert refusal(make_pooling("embed"), body)[1] == "chat_template"
    trusting = make_pooling("embed", **{"endpoints.trust_request_chat_template": True})
    assert trusting.post(URL, body)[0] == 200
    assert list(trusting.submits[0].prompt) == trusting.tokenizer.encode("hello hello", add_special_tokens=False)


# Prefixes of texts


PROMPTS = {"query": "hello ", "passage": "the ", "Classification": "stop "}


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [(None, ""), ("query", "hello "), ("search_query", "hello "), ("search_document", "the "), ("document", "the ")],
)
def test_a_type_of_input_puts_the_models_prompt_in_front(make_pooling, kind, prefix):
    gateway = make_pooling("embed", prompts=PROMPTS)
    assert gateway.post(URL, {"input": "world", "input_type": kind})[0] == 200
    assert list(gateway.submits[0].prompt) == gateway.tokenizer.encode(prefix + "world")


def test_the_default_prompt_is_applied_automatically(make_pooling):
    gateway = make_pooling("embed", prompts=PROMPTS, default_prompt="Classification")
    gateway.post(URL, {"input": ["world", "answer"]})
    assert [list(one.prompt) for one in gateway.submits] == [
        gateway.tokenizer.encode(text) for text in ("stop world", "stop answer")
    ]
    gateway.post(URL, {"input": [9, 8]})
    assert gateway.submits[-1].prompt == (9, 8)
    assert "Classification, passage, query" in refusal(gateway, {"input": "x", "input_type": "other"})[0]


# Bytes


def raw(gateway, body, url=URL):
    async def call():
        async with gateway.client() as client:
            return await client.post(url, json=body)

    return asyncio.run(call())


TYPES = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_at_the_offsets_of_the_header(embedder, dtype, endianness):
    """B5.2 bytes and bytes_only"""
    body = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
    reply = raw(embedder, {**body, "encoding_format": "bytes"})
    assert reply.headers["content-type"] == "application/octet-stream"
    told = json.loads(reply.headers["metadata"])
    assert told.keys() == {"id", "created", "model", "data", "usage"} and told["usage"]["completion_tokens"] == 0
    plain = raw(embedder, {**body, "encoding_format": "bytes_only"})
    assert plain.content == reply.content and "metadata" not in plain.headers
    coded = embedder.post(URL, {**body, "encoding_format": "base64"})[1]["data"]
    for entry, one in zip(told["data"], coded, strict=True):
        assert (entry["embed_dtype"], entry["endianness"], entry["shape"]) == (dtype, endianness, [WIDTH])
        part = reply.content[entry["start"] : entry["end"]]
        assert part == base64.b64decode(one["embedding"])
    first = np.frombuffer(
        reply.content[: WIDTH * int(TYPES[dtype][1])], (">" if endianness == "big" else "<") + TYPES[dtype]
    )
    if TYPES[dtype][0] == "f":
        assert np.allclose(first, vector(embedder, TEXTS[0]), atol=1e-3)
    assert told["data"][-1]["end"] == len(reply.content)


# Vectors of tokens


def test_a_token_vector_model_returns_matrices(make_pooling):
    """B5.2 token_embed"""
    gateway = make_pooling("token_embed", "score")
    _, reply = gateway.post(URL, {"input": TEXTS[:2]})
    for one, submit in zip(reply["data"], gateway.submits, strict=True):
        assert submit.pooling.task == "token_embed"
        assert np.allclose(one["embedding"], unit(tokens(submit.prompt)), atol=1e-6)


def test_late_chunking_returns_a_vector_per_chunk(embedder):
    """B5.2 late_chunking_params"""
    _, reply = embedder.post(URL, {"input": "the answer is 42", "late_chunking_params": {"chunk_size": 3}})
    (submit,) = embedder.submits
    assert submit.pooling.task == "token_embed" and submit.pooling.activate is False
    rows = tokens(submit.prompt).astype("f4")
    wanted = [unit(rows[at : at + 3].mean(axis=0)) for at in range(0, len(rows), 3)]
    assert np.allclose(reply["data"][0]["embedding"], wanted, atol=1e-6)


def test_late_chunking_needs_vectors_of_tokens(make_pooling):
    body = {"input": "hello", "late_chunking_params": {"chunk_size": 3}}
    assert refusal(make_pooling("embed"), body)[1] == "late_chunking_params"


# /pooling and /classify


def test_pooling_returns_the_result_of_the_task(make_pooling):
    """B5.4 tasks"""
    gateway = make_pooling("embed", "token_embed", "token_classify")
    for task, asked in ((None, "embed"), ("token_embed", "token_embed"), ("token_classify", "token_classify")):
        status, reply = gateway.post("/pooling", {"input": TEXTS} | ({"task": task} if task else {}))
        assert status == 200 and reply["id"].startswith("pooling-") and reply["object"] == "list"
        for index, (one, submit) in enumerate(zip(reply["data"], gateway.submits[-3:], strict=True)):
            assert (one["index"], one["object"], submit.pooling.task) == (index, "pooling", asked)
            assert np.allclose(one["data"], values(submit), atol=1e-6)


def test_pooling_rejects_fields_of_other_routes(make_pooling):
    """B5.4 task and dimensions"""
    gateway = make_pooling("classify")
    message, param = refusal(gateway, {"input": "x", "task": "embed"}, "/pooling")
    assert param == "task" and "serves classify" in message
    assert refusal(gateway, {"input": "x", "dimensions": 3}, "/pooling")[1] == "dimensions"


def test_a_text_is_labelled(make_pooling):
    """B5.5 labels and probabilities; POOL-03"""
    gateway = make_pooling("classify", activation="softmax")
    status, reply = gateway.post("/classify", {"input": TEXTS})
    assert status == 200 and reply["id"].startswith("classify-")
    for one, submit in zip(reply["data"], gateway.submits, strict=True):
        wanted = values(submit)
        assert np.allclose(one["probs"], wanted, atol=1e-6) and sum(one["probs"]) == pytest.approx(1, abs=1e-6)
        assert (one["label"], one["num_classes"]) == (LABELS[wanted.argmax()], 3)
    _, plain = gateway.post("/classify", {"input": TEXTS[0], "use_activation": False})
    logits = plain["data"][0]["probs"]
    assert np.allclose(softmax(np.array(logits)), reply["data"][0]["probs"], atol=1e-6)
    assert plain["data"][0]["label"] == reply["data"][0]["label"]


def test_embeddings_are_served_in_one_pass_over_many_inputs(make_pooling):
    """EM-02 a large batch; POOL-02 its JSON is JSON"""
    gateway = make_pooling("embed", max_context=64)
    numbers = np.random.default_rng(0).standard_normal((256, 384)).astype("<f4")
    gateway.router.reply = lambda submit: [
        Delta(submit.id, finish="stop", pooled=Pooled((384,), numbers[submit.prompt[0]].tobytes()))
    ]
    _, reply = gateway.post(URL, {"input": [[index] for index in range(256)]})
    assert (np.array([one["embedding"] for one in reply["data"]], "f4") == numbers).all()


def test_the_parameters_are_logged_without_the_texts(make_pooling, caplog):
    gateway = make_pooling("embed", **{"observability.log_requests": True})
    with caplog.at_level("INFO"):
        gateway.post(URL, {"input": "a secret", "encoding_format": "base64"})
    (line,) = [record for record in caplog.records if record.getMessage() == "parameters of embeddings"]
    assert line.fields == {"encoding_format": "base64"}


def test_the_official_client_raises_the_expected_errors(embedder):
    with pytest.raises(openai.BadRequestError, match="dimensions=3 is not supported"):
        embedder.openai(lambda client: client.embeddings.create(model="qwen", input="hello", dimensions=3))
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        embedder.openai(lambda client: client.embeddings.create(model="absent", input="hello"))


def test_a_load_balancer_receives_the_load(embedder):
    async def call() -> httpx.Response:
        async with embedder.client() as client:
            return await client.post(URL, json={"input": "x"}, headers={"endpoint-load-metrics-format": "TEXT"})

    assert "num_requests_waiting=3" in asyncio.run(call()).headers["endpoint-load-metrics"]


@pytest.mark.parametrize("other", [{"type": "text", "text": None}, {"type": "text", "text": 3}, {"type": "x"}, "x", 3])
def test_parts_beside_an_image_that_are_no_blank_text_are_refused(other: Any) -> None:
    """A model without a chat template reads one image; blank texts are left out."""
    served = SimpleNamespace(text=SimpleNamespace(known_media={"image": None}, media=None))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert content_of([image, {"type": "text", "text": " "}], "input", "input", served).kind == "image"
    with pytest.raises(RequestError, match="either a text or one image"):
        content_of([image, other], "input", "input", served)
