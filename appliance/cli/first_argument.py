"""Distinguish a manifest or model from a subcommand. Imports nothing, so that signals are handled first."""


def names_manifest(word: str) -> bool:
    """Return whether a first word looks like the path of a manifest or a model: `slipway MANIFEST` serves it."""
    return "/" in word or word.endswith((".yaml", ".yml", ".json", ".gguf"))
