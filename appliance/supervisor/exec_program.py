"""Prepare this process as described in a file, then exec the program: `python -I -S exec_program.py FILE`.

Supervisor runs this script. It runs without site packages, so that it takes a few milliseconds, and it uses system
calls where a shell would need nice, env and cat, which an image may not have. FILE is JSON; every key but `argv` is
optional:

argv         the command
directory    working directory
nice         added to the priority
inherit      patterns of the names of inherited variables to keep; without it all are kept
environment  variables to set
secrets      files with the values of further variables, by name
announce     a pipe, and the line to write to it first
"""

from __future__ import annotations

import json
import os
import sys
from fnmatch import fnmatchcase

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing these takes longer than the rest of this script
    from collections.abc import Iterable, Mapping
    from typing import Any, NoReturn


def select_variables(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match one of the patterns."""
    known = tuple(patterns)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, one) for one in known)}


def exec_program(description: dict[str, Any]) -> NoReturn:
    """Exec the program described by `description`. Raise OSError if that fails."""
    if "announce" in description:
        path, line = description["announce"]
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, line.encode() + b"\n")
        os.close(pipe)
    environment = dict(os.environ)
    if "inherit" in description:
        environment = select_variables(environment, description["inherit"])
    environment.update(description.get("environment", {}))
    for name, file in description.get("secrets", {}).items():
        with open(file, "rb") as value:
            environment[name] = os.fsdecode(value.read())
    os.chdir(description.get("directory", "."))
    if description.get("nice"):
        os.nice(description["nice"])
    os.execve(description["argv"][0], description["argv"], environment)


if __name__ == "__main__":
    try:
        with open(sys.argv[1], encoding="utf-8", errors="surrogateescape") as file:
            exec_program(json.load(file))
    except OSError as error:
        print(f"slipway: {sys.argv[1]}: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
