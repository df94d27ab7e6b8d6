"""Prompt prefixes by input type, with the names from the checkpoint or from Cohere's API."""

from appliance.config.gateway import PooledModel
from engine.api.errors import RequestError

# Cohere's input types → names of prompts in checkpoints (config_sentence_transformers.json and the like).
ALIASES = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "passage": ("document", "corpus"),
    "document": ("passage", "corpus"),
    "query": ("search_query",),
}


def _found(model: PooledModel, name: str) -> str | None:
    known = {key.lower(): text for key, text in model.prompts.items()}
    return next((known[each] for each in (name.lower(), *ALIASES.get(name, ())) if each in known), None)


def lead(model: PooledModel, input_type: str | None, field: str) -> str:
    """Return the prefix for an input type, or the model's default prefix without one.

    Raise RequestError that lists the known types.
    """
    if input_type is None:
        return model.prompts.get(model.default_prompt, "")
    text = _found(model, input_type)
    if text is None:
        possible = ", ".join(sorted(model.prompts))
        known = f"it has {possible}" if possible else "it has none. Leave the field out"
        raise RequestError(f"{field}={input_type!r}: the model has no such prompt; {known}.", field)
    return text


def side_lead(model: PooledModel, side: str) -> str:
    """Return the prefix for the `query` or the `document` of a pair whose vectors are compared."""
    text = _found(model, side)
    return model.prompts.get(model.default_prompt, "") if text is None else text
