"""The error object: one shape on every route, no leaks. Ids of docs/http.md."""

import json

import pytest

from appliance.server.errors.api import ApiError, BadRequest, NotFound, api_error, error_object, sanitise
from engine.api.errors import EngineGone, RequestError, StepError
from engine.api.messages import Failed


@pytest.fixture
def gateway(start_gateway, engine):
    """Start a gateway on a port, with a fake engine."""
    return start_gateway(engine)


KEYS = {"message", "type", "param", "code", "request_id"}


def error_of(reply, status):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == KEYS
    assert body["error"]["code"] == status
    return body["error"]


def post(gateway, content, content_type="application/json"):
    return gateway.client.post("/test/generate", content=content, headers={"content-type": content_type})


def test_malformed_json_is_a_validation_error(gateway):
    """ER-01 body `{`"""
    error = error_of(post(gateway, b"{"), 400)
    assert error["type"] == "Bad Request"
    assert error["message"].startswith("1 validation error")


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"7", b"null", b"", b"true"])
def test_a_body_that_is_no_object_is_refused(gateway, body):
    """ER-02 body `[]` or `"x"`"""
    assert error_of(post(gateway, body), 400)["type"] == "Bad Request"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_only_json_is_a_content_type(gateway, content_type):
    """ER-03 wrong content type"""
    error = error_of(post(gateway, b"{}", content_type), 400)
    assert "Unsupported Media Type: Only 'application/json' is allowed" in error["message"]


def test_a_content_type_may_have_parameters_and_capitals(gateway):
    """ER-03 parameters are allowed"""
    assert post(gateway, b"{}", "Application/JSON; charset=utf-8").status_code == 200


def test_an_unknown_model_is_not_found_and_the_aliases_are_named(gateway):
    """ER-04 unknown model"""
    with pytest.raises(NotFound) as raised:
        gateway.service.model_name("/models/absent")
    error = error_object(raised.value, "r")["error"]
    assert (error["code"], error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert error["message"] == "The model `/models/absent` does not exist. Valid aliases: tiny, org/alias."


@pytest.mark.parametrize("requested", [None, "", "tiny", "org/alias"])
def test_no_model_means_the_served_one_and_aliases_are_answered_under_the_first_name(gateway, requested):
    """ER-05 `model` missing or empty"""
    assert gateway.service.model_name(requested) == "tiny"


@pytest.mark.parametrize(
    "body",
    [b'{"raises": "\xff\xfe"}', rb'{"raises": "\ud800"}', rb'{"raises": "\udc00\ud800"}', b'\xef\xbb\xbf{"n": 1'],
)
def test_text_that_is_no_unicode_is_refused(gateway, body):
    """ER-19 invalid UTF-8 and lone surrogates"""
    assert error_of(post(gateway, body), 400)["type"] == "Bad Request"


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400])
def test_integers_beyond_64_bit_are_refused(gateway, value):
    """ER-20 huge integers"""
    error = error_of(post(gateway, f'{{"seed": {value}}}'.encode()), 400)
    assert error["param"] == "body.seed"


def test_messages_name_the_kind_of_the_validation_error(gateway):
    """ER-21 the pydantic error kind"""
    low = error_of(gateway.generate(seed=-(2**63) - 1), 400)["message"]
    high = error_of(gateway.generate(seed=2**63), 400)["message"]
    assert "greater_than_equal" in low
    assert "less_than_equal" in high


def test_a_nested_fault_is_named_by_its_path(gateway):
    """ER-10 param of a range or type error"""
    error = error_of(gateway.generate(prompt=[1, "x", 3]), 400)
    assert error["param"] == "body.prompt.1"


def test_validation_messages_list_ten_faults_and_echo_little(gateway):
    """ER-10 up to ten entries, echoed input shortened"""
    message = error_of(gateway.generate(prompt=["y" * 5000] * 13), 400)["message"]
    assert message.startswith("13 validation errors:")
    assert message.count("body.prompt.") == 10
    assert message.endswith("and 3 more")
    assert all(len(line) <= 1000 for line in message.splitlines())
    assert "y" * 201 not in message


def test_a_deeply_nested_body_is_refused(gateway):
    """ER-01 a body designed to exhaust the stack"""
    error_of(post(gateway, b'{"prompt": ' + b"[" * 100_000), 400)
    error_of(
        gateway.client.post("/invocations", content=b"[" * 100_000, headers={"content-type": "application/json"}), 400
    )


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_an_error_object(gateway, method):
    """H-21 router-level 404"""
    error = error_of(gateway.client.request(method, "/v1/nothing"), 404)
    assert error["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/test/generate", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/ping", {"GET", "HEAD", "POST"}),
    ],
)
def test_a_wrong_method_is_an_error_object_with_allow(gateway, method, path, allowed):
    """H-21 router-level 405"""
    reply = gateway.client.request(method, path)
    error_of(reply, 405)
    assert set(reply.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    ("raised", "status", "type"),
    [
        ("ValueError", 400, "BadRequestError"),
        ("OverflowError", 400, "BadRequestError"),
        ("NotImplementedError", 501, "NotImplementedError"),
        ("KeyError", 500, "InternalServerError"),
        ("RuntimeError", 500, "InternalServerError"),
    ],
)
def test_exceptions_have_one_translation(gateway, raised, status, type):
    """API-03 status by exception; no paths, addresses or messages of bugs"""
    reply = gateway.generate(raises=raised)
    assert error_of(reply, status)["type"] == type
    for secret in ("/srv", "0x7f", "file.bin", "canary", "Traceback"):
        assert secret not in reply.text


def test_permanent_errors_forbid_a_retry(gateway):
    """H-7 the SDKs retry 5xx unless a header forbids it"""
    assert gateway.generate(raises="NotImplementedError").headers["x-should-retry"] == "false"


def test_every_error_carries_the_request_id(gateway):
    """H-18 error.request_id"""
    headers = {"x-request-id": "client-chose-7"}
    for reply in (
        gateway.client.get("/nowhere", headers=headers),
        gateway.client.post("/test/generate", json={"raises": "KeyError"}, headers=headers),
        gateway.client.post("/test/generate", json={"seed": "x"}, headers=headers),
    ):
        assert reply.json()["error"]["request_id"] == "client-chose-7"


def test_an_engine_that_refuses_a_request_is_a_400_with_its_param(gateway, engine):
    """ER-06 limits that only the engine knows"""
    engine.refusal = Failed(None, "request", "the prompt needs 12 blocks, the cache has 10", "prompt")
    error = error_of(gateway.generate(), 400)
    assert (error["type"], error["param"]) == ("BadRequestError", "prompt")
    assert "12 blocks" in error["message"]


def test_a_request_that_fails_in_the_engine_is_a_plain_500(gateway, engine, eventually):
    """ER-12 a failure of one request, such as logits with NaN"""
    import threading

    engine.holding = True
    replies = []
    thread = threading.Thread(target=lambda: replies.append(gateway.generate(max_tokens=5)))
    thread.start()
    eventually("submitted", lambda: len(engine.open) == 1)
    engine.say(Failed(engine.submits[0].id, StepError.code, "row 3 of /srv/models/x has NaN"))
    thread.join()
    assert error_of(replies[0], 500)["message"] == "The server had an error while processing your request."


def test_a_failure_after_the_first_byte_is_a_record_in_the_stream(gateway, engine, eventually):
    """ER-17 failure after first stream byte"""
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 5, "stream": True}) as stream:
        eventually("submitted", lambda: len(engine.open) == 1)
        engine.give(1)
        lines = stream.iter_lines()
        assert json.loads(next(lines).removeprefix("data: ")) == {"ids": [100], "finish": None}
        engine.say(Failed(engine.submits[0].id, StepError.code, "NaN"))
        rest = [line for line in lines if line]
    error = json.loads(rest[0].removeprefix("data: "))["error"]
    assert error.keys() == KEYS
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert rest[1:] == ["data: [DONE]"]


@pytest.mark.parametrize(
    ("message", "clean"),
    [
        ("no file /srv/models/x.bin here", "no file <path> here"),
        ("use /v1/chat/completions", "use /v1/chat/completions"),
        ("<Thing object at 0x7fa0b1> broke", "<Thing> broke"),
        ("bad\nTraceback (most recent call last):\n  File x", "bad"),
        ("tokens/second and 3/4 and https://a.b/c/d stay", "tokens/second and 3/4 and https://a.b/c/d stay"),
        ("GET /ready shows it", "GET /ready shows it"),
    ],
)
def test_messages_lose_paths_addresses_and_tracebacks(message, clean):
    """Sanitised messages"""
    assert sanitise(message) == clean


def test_engine_errors_and_engine_bugs_are_distinguished():
    assert api_error(RequestError("too long", "prompt")).status == 400
    assert api_error(EngineGone("left")).status == 500
    assert type(api_error(ZeroDivisionError("secret"))) is ApiError
    assert "secret" not in api_error(ZeroDivisionError("secret")).message
    assert api_error(BadRequest("x", "top_logprobs")).param == "top_logprobs"
