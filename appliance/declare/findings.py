"""Problems beside the text of their files: the columns they cover, the line to show, the edits that would do."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as File

from appliance.declare.document import Document, document, read_document
from appliance.declare.edits import Edit, apply, edits_for, end_of
from appliance.declare.problems import Problem


@dataclass(frozen=True)
class Finding:
    """`end` is the column behind what is wrong, 0 where unknown. `line` is the source line, `removed` and `added` what
    the edits make of the file, as lines with their numbers; all three without anything that may be a secret."""

    problem: Problem
    end: int = 0
    line: str = ""
    edits: tuple[Edit, ...] = ()
    removed: tuple[tuple[int, str], ...] = ()
    added: tuple[tuple[int, str], ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether the edits can be made without asking."""
        return bool(self.edits) and self.problem.certain


def findings(problems: Iterable[Problem]) -> list[Finding]:
    """In the order of the problems; each file is read once."""
    texts: dict[str, Document | None] = {}
    found = []
    for problem in problems:
        source = problem.place.source
        if problem.place.line and source not in texts:
            texts[source] = read_document(File(source))
        found.append(_finding(problem, texts.get(source)))
    return found


def _finding(problem: Problem, text: Document | None) -> Finding:
    place = problem.place
    if text is None or not place.line:
        return Finding(problem)
    end = end_of(text, place)
    edits = edits_for(problem.remedy, place, text)
    line = text.shown(place.line)
    if not edits:
        return Finding(problem, end, line)
    removed, added = changed_lines(text, document(apply(text, edits)))
    return Finding(problem, end, line, edits, removed, added)


Lines = tuple[tuple[int, str], ...]


def changed_lines(before: Document, after: Document) -> tuple[Lines, Lines]:
    """The lines that differ: between what both texts begin and end with, less what stands in both at a distance."""
    import difflib

    removed: list[tuple[int, str]] = []
    added: list[tuple[int, str]] = []
    matcher = difflib.SequenceMatcher(None, before.lines, after.lines, autojunk=False)
    for kind, first, last, start, stop in matcher.get_opcodes():
        if kind != "equal":
            removed += [(n + 1, before.shown(n + 1)) for n in range(first, last)]
            added += [(n + 1, after.shown(n + 1)) for n in range(start, stop)]
    return tuple(removed), tuple(added)
