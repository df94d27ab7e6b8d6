"""Names that other servers use for keys of this manifest.

Most are declared with their key (config/key.py). Sources: the command-line references of vLLM,
text-generation-inference, SGLang and llama.cpp's server, the environment variables of NVIDIA NIM, the options of DJL
Serving and Ollama, and the fields of KServe's InferenceService.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from appliance.config.keys import metadata

# Names of sections and of keys that compose files, in lower case and without separators. The latter are words of
# Kustomize, Helm, Docker Compose and configuration files of editors and linters.
_SECTIONS = {
    "base": "extends",
    "bases": "extends",
    "import": "extends",
    "imports": "extends",
    "include": "extends",
    "includes": "extends",
    "inherit": "extends",
    "inherits": "extends",
    "environments": "overlays",
    "overrides": "overlays",
    "patches": "overlays",
    "params": "variables",
    "parameters": "variables",
    "vars": "variables",
    "logging": "observability",
    "logs": "observability",
    "server": "endpoints",
    "storageuri": "model.source",  # KServe
}
# Names without a counterpart: parts of Kubernetes objects, enforce_eager of vLLM (Slipway captures CUDA graphs if they
# are exact), and rolling_batch of DJL Serving.
_WITHOUT_COUNTERPART = ("kind", "metadata", "enforceeager", "rollingbatch")


def flat(name: str) -> str:
    """Normalise a name: maxRunning, max-running and max_running are equal."""
    return re.sub(r"[-_ ]", "", name).lower()


@cache
def foreign_keys() -> dict[str, str]:
    """Return the key here by each normalised name of another server, "" for a name without a counterpart."""
    found = {flat(word): key for key, declared in metadata().items() for word in _words(declared.aliases.values())}
    return {**dict.fromkeys(_WITHOUT_COUNTERPART, ""), **_SECTIONS, **found}


def _words(names: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for words in names:
        yield from words


def other_names(key: str) -> str:
    """Return the names of a key in other servers as text, such as `max_num_seqs (vLLM), num_parallel (Ollama)`."""
    declared = metadata().get(key)
    named = () if declared is None else declared.aliases.items()
    return ", ".join(f"{word} ({server})" for server, words in named if server != "synonyms" for word in words)
