"""KServe's port for gRPC (KS-17), with messages that protoc made from the definition of the protocol.

After a change of open_inference.proto: `protoc --descriptor_set_out=open_inference.bin open_inference.proto`.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.contracts.conftest import KEY

TEXTS = ["Hello", "One two"]
PARAMETERS = {"max_tokens": 2, "temperature": 0}


def definitions() -> dict[str, Any]:
    """Return the classes of the protocol's messages by name."""
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("open_inference.bin").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    names = [message.name for file in files.file for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in names}


MESSAGES = definitions()
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def channel(url: str, grpc_port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"{urlsplit(url).hostname}:{grpc_port}") as opened:
        yield opened


@pytest.fixture(scope="module")
def call(channel: grpc.Channel) -> Call:
    def run(method: str, key: str | None = KEY, **fields: Any) -> Any:
        request, response = MESSAGES[f"{method}Request"], MESSAGES[f"{method}Response"]
        unary = channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}", request.SerializeToString, response.FromString
        )
        return unary(request(**fields), metadata=[("authorization", f"Bearer {key}")] if key else [], timeout=60)

    return run


def refused(call: Call, method: str, **fields: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(method, **fields)
    assert caught.value.details()
    code: grpc.StatusCode = caught.value.code()
    return code


@pytest.fixture(scope="module")
def expected(client, model) -> list[str]:
    body = {"prompt": TEXTS, **PARAMETERS}
    return [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [2], **more}


OPTIONS = {"max_tokens": {"int64_param": 2}, "temperature": {"double_param": 0.0}}


def test_ks_17_health_needs_no_key(call, channel):
    assert call("ServerLive", key=None).live and call("ServerReady", key=None).ready
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"", timeout=60) == b"\x08\x01"


def test_ks_17_server_and_model_are_described(call, model):
    about = call("ServerMetadata")
    assert about.name == "slipway" and about.version and "generate" in about.extensions
    assert call("ModelReady", name=model).ready and call("ModelReady", name=model, version="1").ready
    found = call("ModelMetadata", name=model)
    assert (found.name, list(found.versions), found.inputs[0].datatype) == (model, ["1"], "BYTES")
    assert list(found.inputs[0].shape) == [-1]


def test_ks_17_tensors_are_inferred(call, model, expected):
    given = tensor(contents={"bytes_contents": [text.encode() for text in TEXTS]})
    reply = call("ModelInfer", model_name=model, id="42", inputs=[given], parameters=OPTIONS)
    (output,) = reply.outputs
    assert (reply.id, reply.model_name, output.datatype, list(output.shape)) == ("42", model, "BYTES", [2])
    assert [text.decode() for text in output.contents.bytes_contents] == expected


def test_ks_17_raw_contents_are_answered_with_raw_contents(call, model, expected):
    raw = b"".join(struct.pack("<I", len(text)) + text.encode() for text in TEXTS)
    reply = call("ModelInfer", model_name=model, inputs=[tensor()], raw_input_contents=[raw], parameters=OPTIONS)
    assert reply.raw_output_contents[0] == b"".join(
        struct.pack("<I", len(text.encode())) + text.encode() for text in expected
    )
    code = refused(call, "ModelInfer", model_name=model, inputs=[tensor()], raw_input_contents=[raw[:-1]])
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_ks_17_errors_have_the_codes_of_grpc(call, model):
    given = tensor(contents={"bytes_contents": [b"x"]})
    assert refused(call, "ModelInfer", model_name=model, inputs=[given]) is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(call, "ModelInfer", model_name="absent", inputs=[given]) is grpc.StatusCode.NOT_FOUND
    assert refused(call, "ModelReady", name=model, version="2") is grpc.StatusCode.NOT_FOUND
    assert refused(call, "ModelInfer", model_name=model, key=None) is grpc.StatusCode.UNAUTHENTICATED
    assert refused(call, "ModelInfer", model_name=model, key="sk-wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert refused(call, "RepositoryModelLoad", model_name="x") is grpc.StatusCode.NOT_FOUND
