"""Variables of hosting platforms and of other servers' containers that set keys of the manifest.

    SM_SLIPWAY_MODEL_MAX_CONTEXT=4096     the key model.max_context, as a container of Amazon SageMaker names options
    SM_VLLM_MAX_MODEL_LEN=4096            an option of vLLM, as in AWS's image of vLLM
    OPTION_TENSOR_PARALLEL_DEGREE=2       an option of DJL Serving, as in AWS's LMI images
    NIM_SERVED_MODEL_NAME=assistant       a variable of NVIDIA NIM
    SAGEMAKER_ENABLE_STATEFUL_SESSIONS    switches of AWS's model hosting container standards

Names of other servers are the aliases that are declared with the keys (config/key.py). These variables override the
manifest and are overridden by `SLIPWAY__…`. A variable of another server without a counterpart causes a warning, and an
unknown SM_SLIPWAY_ name is an error.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from appliance.config.aliases import flat
from appliance.config.key import Server
from appliance.config.keys import Key, find, leaves, metadata
from appliance.config.problems import Problem
from appliance.config.variables import value
from appliance.config.yaml_loader import Fault, Place, Tree, single_value

OWN = "SM_SLIPWAY_"


@dataclass(frozen=True)
class Prefix:
    """Variables that start with `text` name options of `servers`, the first with precedence."""

    text: str
    servers: tuple[Server, ...]
    whole: bool = False
    """The declared alias includes the prefix."""


# LMI passes options that it does not know to vLLM.
PREFIXES = (
    Prefix("SM_VLLM_", ("vLLM",)),
    Prefix("OPTION_", ("DJL Serving", "vLLM")),
    Prefix("NIM_", ("NVIDIA NIM",), whole=True),
)
MODEL = ("SM_SLIPWAY_MODEL", "SM_VLLM_MODEL", "NIM_MODEL_NAME", "NIM_MODEL_PATH")
"""Variables that name the model: a folder, a repository of the hub, or a folder of a bucket. SageMaker's ladder reads
OPTION_MODEL_ID and HF_MODEL_ID, which a mounted model precedes."""
SECRET = "SM_VLLM_API_KEY"
# Options with the name of the key itself. trust_remote_code is not one: it permits other code than vLLM's.
_SAME = {"dtype": "model.dtype", "chattemplate": "model.chat_template", "port": "endpoints.port",
         "host": "endpoints.host"}  # fmt: skip
# Read where the model is searched (checkpoints/download_spec.py).
_ELSEWHERE = ("OPTION_MODEL_ID",)
# Words of other servers for values. Their formats of tool calls have other names, and auto detects the format.
_WORDS: dict[str, dict[str, str]] = {
    "model.dtype": {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"},
    "parallelism.tensor": {"max": "auto"},
    "observability.log_level": {"default": "info", "trace": "debug", "critical": "error"},
}
PROFILER: tuple[str, ...] = ("VLLM_TORCH_PROFILER_DIR", "VLLM_TORCH_CUDA_PROFILE", "VLLM_TORCH_PROFILER_WITH_STACK")
PROFILER += ("VLLM_TORCH_PROFILER_RECORD_SHAPES", "VLLM_TORCH_PROFILER_WITH_FLOPS", "SGLANG_TORCH_PROFILER_DIR")
"""Variables with which vLLM and SGLang enabled their profilers."""
# Kubernetes sets these for a service with the name nim.
_SERVICE = re.compile(r"NIM_(SERVICE_HOST|SERVICE_PORT.*|PORT(_.*)?)")
_NOT_TRANSLATED = ("model.format", "endpoints.api_keys", "model.source.path")


def read_platform_variables(environ: Mapping[str, str]) -> list[Tree]:
    """Return a tree for each variable that sets a key, the lowest precedence first."""
    trees = [_tree(key, environ[name], Place(name)) for name, _, key in _foreign(environ) if key is not None]
    if name := named_model(environ):
        trees.append(_nested({"model": {"source": source_of(environ[name])}}, Place(name)))
    if value(environ, "SAGEMAKER_ENABLE_STATEFUL_SESSIONS").lower() in ("true", "1"):
        keep = value(environ, "SAGEMAKER_SESSIONS_EXPIRATION") or "1200"
        place = Place("SAGEMAKER_ENABLE_STATEFUL_SESSIONS")
        trees.append(single_value(("endpoints", "sessions", "keep"), f"{keep.removesuffix('s')}s", place))
    if environ.get(SECRET):
        # Only the variable's name becomes part of the configuration.
        name = SECRET.lower()
        trees.append(_nested({"secrets": {name: {"env": SECRET}}, "endpoints": {"api_keys": name}}, Place(SECRET)))
    return [*trees, *_own(environ)]


def unused_variables(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a warning for each option of another server without a counterpart, and for variables of their profilers."""
    for name in PROFILER:
        if name in environ:
            what = "is a variable of another server's profiler; it has no effect: set observability.profiler_folder"
            yield Problem(Place(name), "", what, code="no-effect")
    for name, prefix, key in _foreign(environ):
        if key is None:
            what = f"is an option of {' or '.join(prefix.servers)} without a counterpart in Slipway; it has no effect"
            yield Problem(Place(name), "", what, code="no-effect")


def _foreign(environ: Mapping[str, str]) -> Iterator[tuple[str, Prefix, Key | None]]:
    """Yield the variables that name options of other servers, the lowest precedence first, with their keys."""
    for prefix in reversed(PREFIXES):
        for name in sorted(name for name in environ if name.startswith(prefix.text)):
            if name not in (*MODEL, SECRET, *_ELSEWHERE) and not _SERVICE.fullmatch(name):
                yield name, prefix, _key(name, prefix)


def source_of(text: str) -> dict[str, object]:
    """Return the value of model.source for a model as other servers name it."""
    for scheme in ("s3", "gs", "az"):
        if text.startswith(f"{scheme}://"):
            return {scheme: {"uri": text}}
    if text.startswith(("/", ".", "file://")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return {"path": text.removeprefix("file://")}
    return {"huggingface": {"repo": text}}


def named_model(environ: Mapping[str, str]) -> str:
    """Return the variable that names the model, or "" if none does."""
    return next((name for name in MODEL if environ.get(name)), "")


def _own(environ: Mapping[str, str]) -> Iterator[Tree]:
    names = {_spelled(key): key for key in leaves() if "*" not in key.path}
    for name in sorted(environ):
        if not name.startswith(OWN) or name in MODEL:
            continue
        place, key = Place(name), names.get(name)
        if key is None:
            near = difflib.get_close_matches(name, names, 1, 0.8)
            hint = f"did you mean {near[0]}?" if near else "the names are those of the manifest's keys"
            yield Tree(value={}, faults=[Fault((name,), place, "unknown setting", hint=hint, code="unknown-key")])
        else:
            yield single_value(key.path, environ[name], place)


def _spelled(key: Key) -> str:
    return OWN + "_".join(key.path).upper()


def _key(name: str, prefix: Prefix) -> Key | None:
    """Return the key that a variable of another server sets, or None."""
    word = flat(name if prefix.whole else name.removeprefix(prefix.text))
    for server in prefix.servers:
        for key, declared in metadata().items():
            if key not in _NOT_TRANSLATED and word in map(flat, declared.aliases.get(server, ())):
                return find(tuple(key.split(".")))
    same = None if prefix.whole else _SAME.get(word)
    return find(tuple(same.split("."))) if same else None


def _translated(key: Key, text: str) -> str:
    """Return a value in the syntax of the manifest: lists may be separated by commas, switches may be 1 or 0."""
    text = _WORDS.get(key.name, {}).get(text.lower(), text)
    if key.name == "observability.log_level":
        return text.lower()
    if "array" in key.types and not text.lstrip().startswith("["):
        return json.dumps([part.strip() for part in text.split(",") if part.strip()])
    if key.types == {"boolean"}:
        return {"1": "true", "0": "false"}.get(text, text.lower())
    return text


def _tree(key: Key, text: str, place: Place) -> Tree:
    return single_value(key.path, _translated(key, text), place)


def _nested(tree_value: dict[str, object], place: Place) -> Tree:
    """Return a tree with this value, all of it from one place."""
    tree = Tree(value=tree_value)
    for path in _paths(tree_value, ()):
        tree.keys[path] = tree.values[path] = place
    return tree


def _paths(node: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _paths(inner, (*path, name))
