"""Problems with their source text: columns, the line to show, and suggested edits."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as File

from appliance.config.document import Document, document, read_document
from appliance.config.fix import Move, Write
from appliance.config.fix_edits import Edit, apply, edits_for, end_of
from appliance.config.overrides import assignment, variable
from appliance.config.problems import Problem
from appliance.config.yaml_loader import Place, dotted

# Every edit is verified by reading the edited file, at 50 µs per line. `check --fix` reads again after each round.
MAX_TRIED = 5_000  # lines that all edits together may read


@dataclass(frozen=True)
class Finding:
    """A problem with its source text. Lines are shown with secrets hidden."""

    problem: Problem
    end: int = 0  # column after the wrong text; 0 if unknown
    line: str = ""  # source line
    edits: tuple[Edit, ...] = ()
    removed: tuple[tuple[int, str], ...] = ()  # lines that the edits remove, with their numbers
    added: tuple[tuple[int, str], ...] = ()  # lines that the edits add, with their numbers
    outside: str = ""  # action that replaces an edit if the value is not in a file
    mark: tuple[int, int] = (0, 0)  # columns of `line` at the start and after the end of the wrong text

    @property
    def fixable(self) -> bool:
        """Return whether the edits can be made without confirmation."""
        return bool(self.edits) and self.problem.certain


def findings(problems: Iterable[Problem]) -> list[Finding]:
    """Return the findings in the order of the problems. Each file is read once."""
    texts: dict[str, Document | None] = {}

    def text(place: Place) -> Document | None:
        if place.line and place.source not in texts:
            texts[place.source] = read_document(File(place.source))
        return texts.get(place.source) if place.line else None

    found, lines = [], 0
    for problem in problems:
        fix_document = text(problem.fix_at or problem.place)
        if problem.fix is not None and fix_document is not None:
            lines += len(fix_document.lines)
        found.append(_finding(problem, text(problem.place), fix_document if lines <= MAX_TRIED else None))
    return found


def _finding(problem: Problem, text: Document | None, fix_document: Document | None) -> Finding:
    """Build a finding. `text` is the problem's file; `mended` is the file of its fix, if an edit is to be tried."""
    place, fix_at = problem.place, problem.fix_at or problem.place
    end, line, mark = 0, "", (0, 0)
    if text is not None:
        end, line = end_of(text, place), text.shown(place.line)
        first = text.shown_column(place.line, place.column)
        mark = (first, max(first + 1, text.shown_column(place.line, end)))
    if not fix_at.line:
        return Finding(problem, end, line, outside=_outside(problem, fix_at), mark=mark)
    edits = edits_for(problem.fix, fix_at, fix_document) if fix_document is not None else ()
    if fix_document is None or not edits:
        return Finding(problem, end, line, mark=mark)
    removed, added = changed_lines(fix_document, document(apply(fix_document, edits)))
    return Finding(problem, end, line, edits, removed, added, mark=mark)


def _outside(problem: Problem, place: Place) -> str:
    """Return the required change on the command line or in the environment."""
    match problem.fix:
        case Write(text):
            return assignment(place, text)
        case Move(path) if place.source.startswith("--"):
            return f"pass --set {dotted(path)} instead"
        case Move(path):
            return f"set {variable(tuple(map(str, path)))} instead"
        case _:
            return ""


Lines = tuple[tuple[int, str], ...]


def changed_lines(before: Document, after: Document) -> tuple[Lines, Lines]:
    """Return the lines that differ between two documents, with their numbers."""
    import difflib

    removed: list[tuple[int, str]] = []
    added: list[tuple[int, str]] = []
    matcher = difflib.SequenceMatcher(None, before.lines, after.lines, autojunk=False)
    for kind, first, last, start, stop in matcher.get_opcodes():
        if kind != "equal":
            removed += [(n + 1, before.shown(n + 1)) for n in range(first, last)]
            added += [(n + 1, after.shown(n + 1)) for n in range(start, stop)]
    return tuple(removed), tuple(added)
