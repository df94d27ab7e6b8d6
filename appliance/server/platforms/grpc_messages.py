"""Messages of the Open Inference Protocol in gRPC, and of gRPC's health checks, as protobuf classes.

The classes are built from this table, so that no generated code depends on a version of protobuf. The definitions are
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto and
https://grpc.io/docs/guides/health-checking.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto

_SCALARS = {
    "bool": Field.TYPE_BOOL,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
    "float": Field.TYPE_FLOAT,
    "double": Field.TYPE_DOUBLE,
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
}
_NAMED = "name:string version:string"
_TENSOR = "name:string datatype:string shape:int64* parameters:Parameters contents:InferTensorContents"
_INFER = "model_name:string model_version:string id:string parameters:Parameters"
_REPOSITORY = "repository_name:string model_name:string"

_INFERENCE = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:bool",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "ready:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name:string version:string extensions:string*",
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse.TensorMetadata": "name:string datatype:string shape:int64*",
    "ModelMetadataResponse": "name:string versions:string* platform:string "
    "inputs:ModelMetadataResponse.TensorMetadata* outputs:ModelMetadataResponse.TensorMetadata*",
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "name:string parameters:Parameters",
    "ModelInferRequest": f"{_INFER} inputs:ModelInferRequest.InferInputTensor* "
    "outputs:ModelInferRequest.InferRequestedOutputTensor* raw_input_contents:bytes*",
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "ModelInferResponse": f"{_INFER} outputs:ModelInferResponse.InferOutputTensor* raw_output_contents:bytes*",
    "InferParameter": "bool_param:bool int64_param:int64 string_param:string double_param:double uint64_param:uint64",
    "InferTensorContents": "bool_contents:bool* int_contents:int32* int64_contents:int64* uint_contents:uint32* "
    "uint64_contents:uint64* fp32_contents:float* fp64_contents:double* bytes_contents:bytes*",
    "RepositoryModelLoadRequest": _REPOSITORY,
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": _REPOSITORY,
    "RepositoryModelUnloadResponse": "",
}
"""Fields of each message, in the order of their numbers. `*`: repeated; Parameters: map of names to InferParameter."""

_HEALTH = {"HealthCheckRequest": "service:string", "HealthCheckResponse": "status:int32"}
"""`status` is an enumeration, which has the encoding of an int32."""

CHOICE = "parameter_choice"


def _build(package: str, table: dict[str, str]) -> dict[str, Any]:
    """Return the classes of a package by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"slipway/{package}.proto", package=package, syntax="proto3")
    for name in dict.fromkeys(name.partition(".")[0] for name in table):
        file.message_type.add(name=name)
    for name, fields in table.items():
        outer, _, inner = name.rpartition(".")
        at = next(one for one in file.message_type if one.name == (outer or name))
        _add_fields(package, at.nested_type.add(name=inner) if outer else at, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in table}


def _add_fields(package: str, message: Any, name: str, fields: str) -> None:
    if name == "InferParameter":
        message.oneof_decl.add(name=CHOICE)
    for number, text in enumerate(fields.split(), 1):
        field, _, kind = text.partition(":")
        repeated = kind.endswith("*") or kind == "Parameters"
        made = message.field.add(
            name=field, number=number, label=Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
        )
        kind = kind.removesuffix("*")
        if name == "InferParameter":
            made.oneof_index = 0
        if kind == "Parameters":
            entry = message.nested_type.add(name="ParametersEntry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
            value = entry.field.add(name="value", number=2, type=Field.TYPE_MESSAGE, label=Field.LABEL_OPTIONAL)
            value.type_name = f".{package}.InferParameter"
            made.type, made.type_name = Field.TYPE_MESSAGE, f".{package}.{name}.ParametersEntry"
        elif kind in _SCALARS:
            made.type = _SCALARS[kind]
        else:
            made.type, made.type_name = Field.TYPE_MESSAGE, f".{package}.{kind}"


MESSAGES: dict[str, Any] = _build("inference", _INFERENCE)
HEALTH: dict[str, Any] = _build("grpc.health.v1", _HEALTH)
