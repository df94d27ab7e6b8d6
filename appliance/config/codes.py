"""Problem codes of manifests: a stable short name, the meaning and the remedy. SARIF calls them rules."""

CODES: dict[str, tuple[str, str]] = {
    "not-yaml": (
        "The file cannot be read as YAML.",
        "Mend the place that is named; what stands behind it was not read, so more may be found then.",
    ),
    "no-plain-yaml": (
        "YAML that is not allowed here: anchors, aliases, merge keys, tags, several documents.",
        "Write the values out; one file is one service.",
    ),
    "ambiguous": (
        "Two readers of YAML take this for different values: no, 010, 1e3, 12:30, 2026-01-01.",
        "Write true or false, a plain number, or put a text in quotes.",
    ),
    "duplicate-key": ("The same key stands twice in one section.", "Keep one of them."),
    "unknown-key": (
        "No key has this name in this place.",
        "Take the suggested name or place; `slipway schema` and docs/manifest.md list all keys.",
    ),
    "missing-key": ("A key that must be given is missing.", "Write it."),
    "wrong-value": ("The key takes no such value.", "Take one of the values that the message names."),
    "literal-secret": (
        "A secret must be a reference, {file: path} or {env: NAME}, never the value itself.",
        "Move the value into a file or a variable, and change it: it has been written down.",
    ),
    "clear-text": (
        "A value looks like a token, a private key or an address with a password.",
        "Put it into a file or a variable, name that below `secrets`, and change the secret: it has been written down.",
    ),
    "wrong-secret": ("A reference to a secret that is not complete or not named rightly.", "Write one of its forms."),
    "unknown-secret": ("A key names a secret that `secrets` does not have.", "Name one that is there, or add it."),
    "unread": ("A file or variable that the manifest names is missing, empty or unreadable.", "Correct its name."),
    "wrong-layer": (
        "A file, overlay, profile or variable that cannot be what the manifest is composed of.",
        "Layers are described in docs/manifest.md; change the key that is named.",
    ),
    "interpolation": (
        "A ${…} that is none, that names nothing in `variables`, or that would show a secret.",
        "Write ${NAME} or ${var.name}, or $$ for one dollar; name secrets below `secrets`.",
    ),
    "unset": (
        "A variable of the environment that a text names is not set, and has no default there.",
        "Set it, or give it a default as in ${NAME:-8000}.",
    ),
    "deprecated": ("A key has another name now.", "Rename it before the version that drops the old name."),
    "no-effect": (
        "A key of a file that the manifest extends does nothing for the model that is served.",
        "Leave it where it is meant for other services; the manifest itself may not have it (docs/compatibility.md).",
    ),
    "not-as-locked": (
        "A file of the checkpoint is not the one that the lock beside the manifest names, or the lock is damaged.",
        "Restore the file; where the change is meant, `slipway lock MANIFEST` locks what is there.",
    ),
    "impossible": (
        "Each key is right by itself, but this checkpoint, this machine or another key does not allow it.",
        "Change the key that the message names; `slipway plan` shows what the others were settled to.",
    ),
}
