"""Messages of commands for a refused manifest, and the fixes of `check --fix`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from appliance.cli.fix import MOST_ROUNDS, fix, left
from appliance.cli.formats import FORMATS, as_text, has_colours
from appliance.config.environment import environment
from appliance.config.findings import findings
from appliance.config.problems import Problem, Refused


def print_problems(refused: Refused, manifest: Path, form: str, to: TextIO) -> None:
    found = findings(refused.problems)
    if form != "text":
        print(FORMATS[form](found), file=to)
        return
    count = len(found)
    last = f"{manifest}: {count} problem{'s' * (count > 1)}"
    if fixable := sum(finding.fixable for finding in found):
        last += f"; slipway check --fix corrects {'it' if count == 1 else 'all' if fixable == count else fixable}"
    print(f"{as_text(found, has_colours(to.isatty(), environment()))}\n{last}", file=to)


def warn(notices: Sequence[Problem], form: str, to: TextIO) -> None:
    """Print notices that are not errors."""
    if notices:
        found = findings(notices)
        text = as_text(found, has_colours(to.isatty(), environment())) if form == "text" else FORMATS[form](found)
        print(text, file=to)


def apply_fixes(validate: Callable[[], Any]) -> None:
    """Apply unambiguous fixes until no more are found."""
    for _ in range(MOST_ROUNDS):
        try:
            found = findings(validate().notices)
        except Refused as refused:
            found = findings(refused.problems)
        try:
            said = fix(found)
        except OSError as error:
            print(
                f"{error.filename}: cannot change the file: {(error.strerror or str(error)).lower()}", file=sys.stderr
            )
            return
        if not said:
            print(*left(found), sep="\n", end="\n" if left(found) else "", file=sys.stderr)
            return
        print("\n".join(said), file=sys.stderr)
