"""Tools of Anthropic's API that the client runs (bash, text editor, memory).

Requests give only their type, without a schema, because Anthropic's models know them. Other models get the inputs that
the API documents.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_TYPE: Final = re.compile(r"(bash|text_editor|memory)_(\d{8})")
_UNDO_UNTIL: Final = "20250124"  # last version of the text editor with the command undo_edit

_PATH: Final = {"type": "string", "description": "Absolute path of a file or directory."}
_EDITING: Final[dict[str, Any]] = {
    "path": _PATH,
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view of a file: first and last line, counted from 1; -1 is the last line of the file.",
    },
    "file_text": {"type": "string", "description": "For create: content of the file."},
    "old_str": {"type": "string", "description": "For str_replace: the text to replace, which occurs exactly once."},
    "new_str": {"type": "string", "description": "For str_replace: the text in its place."},
    "insert_line": {"type": "integer", "description": "For insert: the line to insert after; 0 is the beginning."},
    "insert_text": {"type": "string", "description": "For insert: the text to insert."},
}
_RENAMING: Final[dict[str, Any]] = {
    "old_path": {"type": "string", "description": "For rename: the present path."},
    "new_path": {"type": "string", "description": "For rename: the new path."},
}
_EDITS: Final = ("view", "create", "str_replace", "insert")


@dataclass(frozen=True)
class ClientTool:
    """Function definition of a client tool, as the model sees it."""

    description: str
    parameters: dict[str, Any]


def _parameters(commands: Sequence[str], more: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(commands), "description": "What to do."}
    return {
        "type": "object",
        "properties": {"command": command, **more},
        "required": list(required),
        "additionalProperties": False,
    }


_BASH: Final = ClientTool(
    "Run a command in a bash session that keeps its state between calls.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run."},
            "restart": {"type": "boolean", "description": "Restart the session instead of running a command."},
        },
        "additionalProperties": False,
    },
)
_EDITOR: Final = "View, create and edit text files. view shows a file with line numbers, or lists a directory."
_MEMORY: Final = ClientTool(
    "Read and write files below /memories, which are kept between conversations. View the directory before a task.",
    _parameters((*_EDITS, "delete", "rename"), {**_EDITING, **_RENAMING}, ("command",)),
)


def client_tool(kind: str) -> ClientTool | None:
    """Return the tool for a type such as bash_20250124, or None if the client does not run that type."""
    found = _TYPE.fullmatch(kind)
    if found is None:
        return None
    if found[1] == "bash":
        return _BASH
    if found[1] == "memory":
        return _MEMORY
    commands = (*_EDITS, "undo_edit") if found[2] <= _UNDO_UNTIL else _EDITS
    return ClientTool(_EDITOR, _parameters(commands, _EDITING, ("command", "path")))
