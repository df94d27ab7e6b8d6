"""Speculative decoding: `speculation`."""

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.key import Effect, declare
from appliance.config.sections.values import Section

_DRAFTS = Effect("engine", outputs="rounding", memory=True)
_METHOD = Effect("service", outputs="rounding", memory=True)
_SEARCH = Effect("engine", outputs="rounding")


class Speculation(Section):
    method: Literal["auto", "off", "jump-ahead", "ngram", "suffix", "draft", "eagle", "eagle3", "mtp"] = declare(
        "off",
        effect=_METHOD,
        target=("engine.speculation.method", "gateway.speculation"),
        aliases={"vLLM": ("speculative_config", "spec_method"), "SGLang": "speculative_algorithm"},
        example="ngram",
    )
    """Drafts that a step verifies: ngram takes tokens that followed an earlier occurrence of the last tokens, and
    text that a grammar forces; suffix takes those that followed most occurrences, in recent replies too; jump-ahead
    takes only forced text; draft takes tokens of a second, smaller model; eagle and eagle3
    take tokens of a head that was trained for the served model; mtp takes tokens of the checkpoint's own
    prediction heads. auto selects a method for the checkpoint, and pauses drafts per request and per number of running
    requests while measured step times and acceptance say that they do not pay. Replies are the same with each value."""
    model: str | None = declare(
        None,
        effect=_DRAFTS,
        affects="engine.speculation.model",
        aliases={"vLLM": "speculative_model", "SGLang": "speculative_draft_model_path"},
        is_path=True,
        example="../qwen3-0.6b",
    )
    """Folder of the draft model, for the method draft: a decoder with the tokenizer of the served model. For eagle and
    eagle3: folder of the head. Relative paths start at the manifest's folder."""
    tokens: Annotated[int, Field(ge=1, le=32)] = declare(
        4,
        effect=_DRAFTS,
        target="engine.speculation.tokens",
        aliases={
            "vLLM": ("num_speculative_tokens", "spec_tokens"),
            "SGLang": "speculative_num_draft_tokens",
            "TGI": "speculate",
        },
        example=8,
    )
    """Maximum tokens of a draft by lookup or a model, and number of rows of logits that a step has for drafts alone.
    Text that a grammar forces also uses the rows that other requests leave."""
    ngram_min: Annotated[int, Field(ge=1, le=32)] = declare(
        2,
        effect=_SEARCH,
        target="engine.speculation.ngram_min",
        aliases={"vLLM": "prompt_lookup_min", "SGLang": "speculative_ngram_min_match_window_size"},
        example=3,
    )
    """Minimum number of last tokens that must occur earlier; among several occurrences, the longest match is used."""
