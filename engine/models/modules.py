"""Read the module files of sentence-transformers, which define pooling and projection of an embedding model.

modules.json lists Transformer, Pooling, Dense (any number) and Normalize, each in a folder with a config.json; Dense
has
weights. Source: sentence_transformers/models of that library. A list without Pooling is a PyLate model, which returns a
normalised vector for each token (late interaction). Source: pylate/models/colbert.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_json
from engine.models.headers import TensorInfo, read_headers
from engine.models.labels import dense
from engine.models.parts import Dense, Pool

LIST = "modules.json"
OF_THE_TEXT = "sentence_bert_config.json"
OF_THE_WHOLE = "config_sentence_transformers.json"
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
NAMED_POOLS: dict[str, Pool] = {"cls": "first", "lasttoken": "last", "max": "max", "mean": "mean"}
ACTS = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
SERVED = ("Transformer", "Pooling", "Dense", "Normalize")
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class LateInteraction:
    """Settings of a late-interaction model. Pairs are (queries, documents)."""

    markers: tuple[str, str]  # token inserted after the first one; "": none
    lengths: tuple[int, int]  # maximum number of tokens, to which texts are truncated
    skipped: tuple[str, ...]  # document tokens that are computed but not compared
    expands: bool  # queries are padded with mask tokens
    prompts: tuple[str, str] = ("", "")
    """Prompts of a query and of a document that is an image: {1} is the text, {2} the padding of a query, {bos} the
    first token, {image} the placeholder. Empty for models of texts alone."""
    padding: int = 0  # padding tokens that {2} is


@dataclass(frozen=True)
class Modules:
    """Modules of an embedding model after the transformer."""

    pool: Pool
    dense: tuple[Dense, ...] = ()  # in order; their tensors have the names of the module folders
    normalizes: bool = False
    longest: int | None = None  # maximum number of tokens of a text
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text to prepend)
    default_prompt: str = ""
    similarity: str = "cosine"
    late: LateInteraction | None = None
    files: tuple[tuple[str, Path], ...] = ()  # (folder, weight file) of the Dense modules
    stored: tuple[tuple[str, TensorInfo], ...] = ()  # instead, their tensors in the file of the transformer

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors of all Dense modules."""
        found = {name.replace(".", ".linear."): info for name, info in self.stored}
        for folder, file in self.files:
            if not file.exists():
                raise CheckpointError(
                    f"{file}: missing; {LIST} names a Dense module there, whose weights must be safetensors"
                )
            found |= {f"{folder}.{name}": info for name, info in read_headers(file).items()}
        return found


def read_modules(folder: Path) -> Modules | None:
    """Return the modules, or None for a folder without modules.json. Raises CheckpointError for unsupported modules."""
    if not (folder / LIST).is_file():
        return None
    listed = _read(folder / LIST)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise CheckpointError(f"{folder / LIST}: must be a list of objects")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in listed]
    strange = [kind for kind in kinds if kind not in SERVED]
    pools = [kind for kind in kinds if kind == "Pooling"]
    is_late = kinds[:2] == ["Transformer", "Dense"] and not pools
    is_whole = kinds[:2] == ["Transformer", "Pooling"] and len(pools) == 1
    if strange or not (is_late or is_whole) or "Normalize" in kinds[:-1]:
        raise CheckpointError(
            f"{folder / LIST}: lists {', '.join(kinds) or 'nothing'}; supported are Transformer, Pooling, any number "
            "of Dense, and Normalize at the end, in this order, or for late interaction the same without Pooling"
        )
    if is_late:
        found = Modules("first", normalizes=True, late=_late(folder / OF_THE_WHOLE))
    else:
        pool = _pool(folder / str(listed[1].get("path")) / "config.json")
        found = Modules(pool, normalizes=kinds[-1] == "Normalize")
    for kind, one in zip(kinds, listed, strict=True):
        if kind == "Dense":
            name = str(one.get("path"))
            files = (*found.files, (name, folder / name / WEIGHTS))
            found = replace(found, dense=(*found.dense, _dense(folder / name / "config.json", name)), files=files)
    return _with_texts(found, folder)


def module_names(folder: Path) -> tuple[str, ...]:
    """Return the files to read from a folder with modules.json, whether they exist or not. Empty if modules.json is
    damaged; reading it then raises a better error."""
    try:
        listed = _read(folder / LIST)
    except CheckpointError:
        return ()
    paths = [one.get("path") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    inside = [path for path in paths if isinstance(path, str) and path]
    return (
        LIST,
        OF_THE_TEXT,
        OF_THE_WHOLE,
        *(f"{path}/{name}" for path in inside for name in ("config.json", WEIGHTS)),
    )


def _late(file: Path) -> LateInteraction:
    """Read PyLate's settings. All of them are required."""
    values = _settings(file)
    marks = values.get("query_prefix"), values.get("document_prefix")
    lengths = values.get("query_length"), values.get("document_length")
    skipped, expands = values.get("skiplist_words"), values.get("do_query_expansion")
    is_texts = all(isinstance(mark, str) for mark in marks)
    is_whole = all(isinstance(length, int) and length > 2 for length in lengths)
    if not is_texts or not is_whole or not isinstance(skipped, list) or not isinstance(expands, bool):
        raise CheckpointError(
            f"{file}: this is a late-interaction model (one vector per token); query_prefix, document_prefix, "
            "query_length, document_length, skiplist_words and do_query_expansion must be set, as PyLate writes them"
        )
    if expands and values.get("attend_to_expansion_tokens") is not True:
        raise CheckpointError(
            f"{file}: do_query_expansion without attend_to_expansion_tokens is not supported; set "
            "attend_to_expansion_tokens to true if the model was trained that way"
        )
    return LateInteraction(
        (str(marks[0]), str(marks[1])),
        (int(lengths[0] or 0), int(lengths[1] or 0)),
        tuple(map(str, skipped)),
        expands,
    )


def _with_texts(found: Modules, folder: Path) -> Modules:
    """Add the settings of texts before tokenization."""
    of_text, whole = _settings(folder / OF_THE_TEXT), _settings(folder / OF_THE_WHOLE)
    longest, prompts = of_text.get("max_seq_length"), whole.get("prompts")
    if found.late is not None:  # max_seq_length is whatever the Transformer was last set to
        longest = max(found.late.lengths)
    return replace(
        found,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        prompts=tuple((str(k), str(v)) for k, v in prompts.items()) if isinstance(prompts, dict) else (),
        default_prompt=str(whole.get("default_prompt_name") or ""),
        similarity=str(whole.get("similarity_fn_name") or "cosine"),
    )


def _pool(file: Path) -> Pool:
    values = _settings(file)
    chosen = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    named = values.get("pooling_mode")
    if isinstance(named, str) and named in NAMED_POOLS:
        return NAMED_POOLS[named]
    if values.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt is false; supported is pooling over all tokens")
    if len(chosen) != 1 or chosen[0] not in POOLS:
        what = ", ".join(chosen) or repr(named)
        raise CheckpointError(f"{file}: pools by {what}; supported is one of {', '.join(POOLS)}")
    return POOLS[chosen[0]]


def _dense(file: Path, name: str) -> Dense:
    values = _settings(file)
    if values.get("use_residual") is True:
        raise CheckpointError(f"{file}: use_residual is true, which is not supported")
    act = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    inputs, outputs = values.get("in_features"), values.get("out_features")
    if act not in ACTS:
        raise CheckpointError(f"{file}: activation_function is {act}; supported are {', '.join(ACTS)}")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise CheckpointError(f"{file}: in_features and out_features must be whole numbers")
    return dense(name, "linear", inputs, outputs, act=ACTS[act], bias=values.get("bias", True) is True)


def _settings(file: Path) -> Mapping[str, Any]:
    """Return the settings in a JSON file, or {} if it does not exist."""
    value = _read(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must be a JSON object")
    return value


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
