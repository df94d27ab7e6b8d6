"""The bodies of POST /tokenize, in its two forms, and POST /detokenize."""

from typing import Annotated

from pydantic import Field

from appliance.schema.chat import Conversation
from appliance.schema.common import TokenId, Wire


class TokenizeText(Wire):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(Conversation):
    return_token_strs: bool | None = False


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[Annotated[TokenId, Field(ge=0)]]
