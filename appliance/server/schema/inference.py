"""Bodies of hosting platforms: predictions for instances, and the Open Inference Protocol."""

from typing import Annotated, Any, Literal

from pydantic import Field

from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Flag


class PredictRequest(Wire):
    instances: Annotated[list[Any], Field(min_length=1)]
    parameters: dict[str, Any] = {}


class InputTensor(Wire):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: Literal["BYTES"]
    parameters: dict[str, Any] = {}
    data: list[Any]


class OutputTensor(Wire):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(Wire):
    id: Annotated[str, Field(max_length=1000)] | None = None
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[InputTensor], Field(min_length=1)]
    outputs: list[OutputTensor] = []


class GenerateRequest(Wire):
    text_input: str
    id: Annotated[str, Field(max_length=1000)] | None = None
    parameters: dict[str, Any] = {}
    stream: Flag | None = None
