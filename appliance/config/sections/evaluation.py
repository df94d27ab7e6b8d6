"""Accuracy measurements of the service: `evaluation`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from appliance.config.key import NO_EFFECT, declare
from appliance.config.sections.values import Count, Section

TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Kind = Literal[
    "gsm8k",
    "multiple_choice",
    "multiple_choice_logprobs",
    "continuation_logprobs",
    "exact_match",
    "perplexity",
]


class EvaluationTask(Section):
    file: str = declare(effect=NO_EFFECT, is_path=True, example="gsm8k.jsonl")
    """File of the samples: JSON lines, or plain text for `perplexity`."""
    kind: Kind = declare(effect=NO_EFFECT)
    """Format of the samples and rule by which a reply is correct."""
    api: Literal["chat", "completions"] = declare("chat", effect=NO_EFFECT)
    """Route of generated answers; models without a chat template need completions. Log probabilities use
    completions."""
    shots: Annotated[int, Field(ge=0, le=1000)] = declare(0, effect=NO_EFFECT, example=5)
    """Number of solved examples before each question."""
    shots_file: str | None = declare(None, effect=NO_EFFECT, is_path=True, example="gsm8k-train.jsonl")
    """File of the solved examples; default: the first lines of `file`, which are then not measured."""
    extract: Annotated[str, Field(min_length=1)] | None = declare(None, effect=NO_EFFECT, example=r"answer is (\w+)")
    """Regular expression whose last match in the reply is the answer, or its first group (`exact_match`)."""
    max_tokens: Count = declare(512, effect=NO_EFFECT, example=1024)
    """Maximum tokens of a generated answer."""
    limit: Count | None = declare(None, effect=NO_EFFECT, example=200)
    """Number of samples, drawn with the seed; default: all."""
    minimum: Annotated[float, Field(ge=0, le=1)] | None = declare(None, effect=NO_EFFECT, example=0.45)
    """Minimum accuracy, from 0 to 1; `slipway eval` exits with 1 below it."""
    maximum: Annotated[float, Field(ge=1)] | None = declare(None, effect=NO_EFFECT, example=12.5)
    """Maximum perplexity of a token; `slipway eval` exits with 1 above it."""

    @model_validator(mode="after")
    def _keys_suit_the_kind(self) -> "EvaluationTask":
        perplexity = self.kind == "perplexity"
        unused = {
            "minimum": perplexity and self.minimum is not None,
            "maximum": not perplexity and self.maximum is not None,
            "shots": perplexity and self.shots > 0,
            "shots_file": self.shots == 0 and self.shots_file is not None,
            "extract": self.kind != "exact_match" and self.extract is not None,
        }
        instead = {
            "minimum": "use `maximum` with perplexity",
            "maximum": "use `minimum`; only perplexity has a maximum",
            "shots": "perplexity has no solved examples; remove it",
            "shots_file": "set `shots` to the number of examples to take from it",
            "extract": "only exact_match has it; remove it",
        }
        for key, wrong in unused.items():
            if wrong:
                raise PydanticCustomError("unsuitable_key", "{key}: {instead}", {"key": key, "instead": instead[key]})
        return self
