"""Numbers and flags of a body.

true and false are not accepted as numbers. Numbers and flags written as text are accepted only if the validation
context has `TEXT_NUMBERS`, as in vLLM.
"""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

TEXT_NUMBERS: Final = "text_numbers"


def _takes_text(info: ValidationInfo) -> bool:
    return info.context is None or bool(info.context.get(TEXT_NUMBERS))


def _number(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not true or false")
    if isinstance(value, str) and not _takes_text(info):
        raise PydanticCustomError("number_type", "Input should be a number, not a string")
    return value


def _flag(value: Any, info: ValidationInfo) -> Any:
    if value is not None and not isinstance(value, bool) and not _takes_text(info):
        raise PydanticCustomError("bool_type", "Input should be true or false")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Int64 = Annotated[int, BeforeValidator(_number), Field(ge=-(2**63), le=2**63 - 1)]
# Strict, because lists of IDs are long and a Python validator costs 0.2 µs per element.
TokenId = Annotated[int, Field(strict=True, le=2**63 - 1)]
