"""Architectures of GGUF files: the architecture of Hugging Face that each one is, and its configuration.

`general.architecture` names the kind of a file. `FAMILIES` derives for each kind what config.json would say: most of it
from keys that all kinds share (`shared`), the rest by the function of the family, which knows what the file leaves out.
Sources: the converter of llama.cpp (conversion/*.py), which writes the keys, and its loader (src/llama-model.cpp),
which knows the constants.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.api.errors import CheckpointError
from engine.gguf.file import GgufFile, GgufTensor, read_gguf
from engine.models.gguf_families import dense, encoders, gemma, latent, mixtures, older, recurrent
from engine.models.gguf_families.keys import POSITIONS, Family, Keys, rope_scaling, shared
from engine.models.headers import TensorInfo
from engine.models.labels import dense as dense_stage
from engine.models.modules import Modules
from engine.models.parts import Dense, Pool

__all__ = ("FAMILIES", "KINDS", "POSITIONS", "Family", "Keys", "made_config", "stated_modules")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dense.FAMILIES,
        **mixtures.FAMILIES,
        **recurrent.FAMILIES,
        **latent.FAMILIES,
        **gemma.FAMILIES,
        **older.FAMILIES,
        **encoders.FAMILIES,
    }
)
"""By `general.architecture`."""

# Keys of tokens that end a reply, and texts of such control tokens for files of old converters without these keys.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3  # tokenizer.ggml.token_type


KINDS: Mapping[str, str] = MappingProxyType(
    {architecture: kind for kind, family in reversed(list(FAMILIES.items())) for architecture in family.architectures}
)
"""Kinds of files by architecture of Hugging Face."""


def made_config(file: Path) -> dict[str, Any]:
    """Return the contents of config.json, derived from the keys of a file. Raises CheckpointError if keys are
    missing."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}; supported from GGUF are {', '.join(FAMILIES)}. Serve other models "
            "from a checkpoint in Hugging Face's layout"
        )
    family, keys = FAMILIES[kind], Keys(found, kind)
    try:
        return _made(found, family, keys)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: its keys have values that no {kind} model has ({error}); copy the file again, or convert the "
            "model again"
        ) from error


def _made(found: GgufFile, family: Family, keys: Keys) -> dict[str, Any]:
    made = {
        **shared(keys, family),
        "rope_theta": keys.positive("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys, family.yarn(keys)),
        "eos_token_id": _end_ids(found) or None,
        "bos_token_id": found.keys.get("tokenizer.ggml.bos_token_id"),
    }
    made = {key: value for key, value in made.items() if value is not None and key not in family.without}
    made = {family.names.get(key, key): value for key, value in made.items()}
    return {"architectures": [family.architectures[0]], "model_type": keys.kind, **made, **family.more(keys)}


_POOLS: Mapping[object, Pool | None] = {0: None, 1: "mean", 2: "first", 3: "last"}  # by pooling_type
_RERANKER = 4  # pooling_type
DENSE = ("dense_2", "dense_3")  # projections after the pooling, numbered like the modules of sentence-transformers


def stated_modules(file: Path) -> Modules | None:
    """Return the pooling of a file of an embedding model, with the projections after it, or None. Raises
    CheckpointError for a pooling that is not supported."""
    found = read_gguf(file)
    kind = found.require("general.architecture")
    key = f"{kind}.pooling_type"
    stated = found.keys.get(key, 0)
    if stated not in _POOLS:
        what = "a reranker, which is not supported from GGUF" if stated == _RERANKER else "supported are 0 to 3"
        raise CheckpointError(f"{file}: {key} is {stated!r}, {what}; serve a checkpoint in Hugging Face's layout")
    pool = _POOLS[stated]
    if pool is None:
        return None
    own = {tensor.name: tensor for tensor in found.tensors}
    stages, stored = list[Dense](), list[tuple[str, TensorInfo]]()
    width = found.keys.get(f"{kind}.embedding_length")
    for name in DENSE:
        weight, bias = own.get(f"{name}.weight"), own.get(f"{name}.bias")
        if weight is None:
            continue
        shape = weight.shape
        if len(shape) != 2 or shape[1] != (width or shape[1]):
            raise CheckpointError(f"{file}: {name}.weight has shape {list(shape)}; it must be [outputs, {width}]")
        if bias is not None and bias.shape != shape[:1]:
            raise CheckpointError(f"{file}: {name}.bias has shape {list(bias.shape)}; it must be [{shape[0]}]")
        width = shape[0]
        stages.append(dense_stage(name, "linear", shape[1], shape[0], bias=bias is not None))
        stored += [(one, TensorInfo(*_place(own[one]))) for one in (f"{name}.weight", f"{name}.bias") if one in own]
    return Modules(pool, tuple(stages), normalizes=True, stored=tuple(stored))


def _place(tensor: GgufTensor) -> tuple[Path, str, tuple[int, ...], int, int]:
    return tensor.file, tensor.type, tensor.shape, tensor.offset, tensor.bytes


def _end_ids(found: GgufFile) -> list[int]:
    """Return the tokens that end a reply, beginning with tokenizer.ggml.eos_token_id."""
    ids = [found.keys.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens, kinds = (found.keys.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
    controls = (token for token, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
    ids += [token for token in controls if tokens[token] in END_TEXTS]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))
