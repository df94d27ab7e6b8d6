"""Problem codes of manifests: a stable short name, the meaning and the fix. SARIF calls them rules."""

CODES: dict[str, tuple[str, str]] = {
    "not-yaml": (
        "The file cannot be read as YAML.",
        "Correct the position that the message names. The file was read only up to it, so more problems may follow.",
    ),
    "no-plain-yaml": (
        "The file uses YAML features that are not allowed: anchors, aliases, merge keys, tags, several documents.",
        "Write the values out; one file describes one service.",
    ),
    "ambiguous": (
        "YAML parsers interpret this value differently, for example no, 010, 1e3, 12:30 or 2026-01-01.",
        "Write true or false, write a plain number, or put text in quotes.",
    ),
    "duplicate-key": ("A section contains the same key twice.", "Keep one of them."),
    "unknown-key": (
        "No key has this name in this section.",
        "Use the suggested name or section; `slipway schema` and docs/manifest.md list all keys.",
    ),
    "missing-key": ("A required key is missing.", "Add it."),
    "wrong-value": ("The key does not accept this value.", "Use one of the values that the message names."),
    "literal-secret": (
        "A secret must be a reference, {file: path} or {env: NAME}, not the value itself.",
        "Move the value to a file or a variable, and replace the secret, because it was stored in clear text.",
    ),
    "clear-text": (
        "A value looks like a token, a private key or a URL with a password.",
        "Move it to a file or a variable, declare that in `secrets`, and replace the secret.",
    ),
    "wrong-secret": (
        "A reference to a secret is incomplete or has a wrong name.",
        "Write {file: path} or {env: NAME}, or the name of an entry of `secrets`.",
    ),
    "unknown-secret": (
        "A key names a secret that `secrets` does not contain.",
        "Use an existing name, or add the secret.",
    ),
    "unread": (
        "A file or variable that the manifest names is missing, empty or unreadable.",
        "Correct the name, or create the file or variable.",
    ),
    "wrong-layer": (
        "A file, overlay, profile or variable cannot be part of the manifest.",
        "Change the key that the message names; docs/manifest.md describes the layers.",
    ),
    "interpolation": (
        "A ${…} has a wrong form, names nothing in `variables`, or would show a secret.",
        "Write ${NAME} or ${var.name}, or $$ for one dollar sign; declare secrets in `secrets`.",
    ),
    "unset": (
        "A text names an environment variable that is not set, and has no default for it.",
        "Set the variable, or write a default, as in ${NAME:-8000}.",
    ),
    "other-base": (
        "A LoRA adapter names another base model than the served one.",
        "Check that it was trained for this model: the shapes of other models of the family may agree.",
    ),
    "deprecated": ("The key has a new name.", "Rename it before the version that removes the old name."),
    "no-effect": (
        "A key of an extended file has no effect for the model that is served.",
        "Keep it if other services need it. The manifest itself must not contain it (docs/compatibility.md).",
    ),
    "not-as-locked": (
        "A file of the checkpoint differs from the lock next to the manifest, or the lock is damaged.",
        "Restore the file; if the change is intended, `slipway lock MANIFEST` locks the present files.",
    ),
    "impossible": (
        "Each key is valid by itself, but this checkpoint, this machine or another key does not allow it.",
        "Change the key that the message names; `slipway plan` shows the resolved values of the others.",
    ),
}
