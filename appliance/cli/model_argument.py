"""Model in place of a manifest: `slipway serve MODEL`, where MODEL is a folder, a .gguf file or a repository of the
Hugging Face hub. The manifest is created in memory and printed."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from appliance.config.files import HUB_ID
from appliance.config.manifest import API_VERSION

MANIFESTS = (".yaml", ".yml", ".json")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class NamedModel:
    """A model named on the command line."""

    word: str
    source: dict[str, Any]
    """Value of model.source, with an absolute path."""
    name: str
    """Name of the model, and of the file in which its manifest would be saved."""

    @property
    def manifest(self) -> Path:
        """Return the path that the manifest would have, in the current folder."""
        return Path(f"{self.name}.yaml")

    @property
    def text(self) -> str:
        made = {"apiVersion": API_VERSION, "model": {"source": self.source, "names": [self.name]}}
        return yaml.safe_dump(made, sort_keys=False, allow_unicode=True)


def named_model(word: str) -> NamedModel | None:
    """Return the model that a word refers to, or None if it can only be a manifest."""
    path = Path(word)
    if path.is_dir() or path.suffix == ".gguf":
        name = path.resolve().name.removesuffix(".gguf")
        return NamedModel(word, {"path": str(path.resolve())}, _NO_NAME.sub("-", name).strip("-") or "model")
    if path.suffix in MANIFESTS or not HUB_ID.fullmatch(word) or Path(path.parts[0]).exists():
        return None  # a path inside an existing folder, even if it does not exist
    return NamedModel(word, {"huggingface": {"repo": word}}, path.name)


def explain_missing(word: str) -> str:
    """Return a hint about what a model is, for a word that is neither a model nor a manifest; "" for other words."""
    path = Path(word)
    if path.exists() or path.suffix in MANIFESTS or named_model(word) is not None:
        return ""
    return f"{word} is not a manifest. A model is a folder, a .gguf file or a hub ID such as Qwen/Qwen3-0.6B"


def notes(model: NamedModel) -> list[str]:
    """Return lines that show the manifest and explain how to keep it."""
    how = f"to change it, save it with `slipway init {model.word} -o my.yaml` and serve my.yaml"
    return [f"serving {model.word} with this manifest; {how}:", *(f"  {line}" for line in model.text.splitlines())]
