"""ColPali and ColQwen2: vision-language models that return a normalised vector for each token (late interaction).

`vlm_config` declares the model without its head; a projection follows its states. A document is an image, a query a
text, each in the prompt with which the model was trained. Source: transformers modeling_colpali.py,
processing_colpali.py, modeling_colqwen2.py, processing_colqwen2.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_json_object
from engine.models.config import Config, shown
from engine.models.labels import dense
from engine.models.modules import LateInteraction, Modules

PROCESSOR = "processor_config.json"


@dataclass(frozen=True)
class _Kind:
    """Properties of an architecture, and the defaults of its processor."""

    inner: str  # architecture of the model without its projection
    document: str  # prompt of an image, with its placeholder; {1}: `visual_prompt_prefix`
    query: str  # {0}: `query_prefix`, {1}: the text, {2}: padding tokens
    visual_prompt_prefix: str
    query_prefix: str


_KINDS = {
    "ColPaliForRetrieval": _Kind(
        "PaliGemmaForConditionalGeneration",
        "{image}{bos}{1}\n",
        "{bos}{0}{1}{2}\n",
        "Describe the image.",
        "Question: ",
    ),
    "ColQwen2ForRetrieval": _Kind(
        "Qwen2VLForConditionalGeneration",
        "{1}",
        "{0}{1}{2}\n",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>",
        "Query: ",
    ),
}
ARCHITECTURES = tuple(_KINDS)
EXPANSION = 10  # padding tokens after a query


def retrieval_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture in a config.json if it is one of these, else ""."""
    names = config.get("architectures")
    listed = names if isinstance(names, list) else []
    return next((name for name in listed if isinstance(name, str) and name in _KINDS), "")


def inner_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the model without its projection. Raises CheckpointError."""
    inner, name = config.get("vlm_config"), retrieval_architecture(config)
    if not isinstance(inner, dict):
        raise CheckpointError(f"config.json: vlm_config is {shown(inner)}; it must declare the vision-language model")
    dtypes = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    return {**inner, **dtypes, "architectures": [_KINDS[name].inner]}


def retrieval_modules(config: Mapping[str, Any], hidden: int, max_context: int, folder: Path) -> Modules:
    """Return the projection and the prompts of a model whose states have `hidden` columns."""
    kind = _KINDS[retrieval_architecture(config)]
    width = Config.of({"embedding_dim": config.get("embedding_dim", 128)}).whole("embedding_dim")
    file = folder / PROCESSOR
    settings = read_json_object(file) if file.exists() else {}
    described, asked = (
        str(settings.get(key) or getattr(kind, key)) for key in ("visual_prompt_prefix", "query_prefix")
    )
    late = LateInteraction(
        markers=("", ""),
        lengths=(max_context, max_context),
        skipped=(),
        expands=False,
        prompts=(kind.query.replace("{0}", asked), kind.document.replace("{1}", described)),
        padding=EXPANSION,
    )
    projection = dense("", "embedding_proj_layer", hidden, width)
    return Modules("last", dense=(projection,), normalizes=True, late=late)
