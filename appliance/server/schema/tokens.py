"""Bodies of POST /tokenize, in its two forms, and POST /detokenize."""

from typing import Annotated

from pydantic import Field

from appliance.server.schema.chat import Conversation
from appliance.server.schema.common import Wire
from appliance.server.schema.numbers import Flag, TokenId


class TokenizeText(Wire):
    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True
    return_token_strs: Flag | None = False


class TokenizeChat(Conversation):
    return_token_strs: Flag | None = False


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[Annotated[TokenId, Field(ge=0)]]
