"""Report hard-to-read phrases in docstrings, comments and Markdown, as a rate per 1,000 words of each folder.

    python tools/prose.py                  rates of the whole tree, and the worst passages
    python tools/prose.py engine docs      rates of some folders or files
    python tools/prose.py --diff main      only passages with lines that were added since the commit `main`
    python tools/prose.py --table          rates rounded up, as the table in tests/tools/test_prose.py

A rule matches wording that edited technical documentation rarely uses; its advice names the usual replacement. A match
is a reason to read the passage again, not proof of a mistake.
"""

import argparse
import ast
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Rule(NamedTuple):
    """One kind of wording to avoid. pattern: a regular expression without anchors, matched at word boundaries."""

    name: str
    pattern: str
    advice: str


RULES = (
    Rule("speech", r"told|tells|is said", "reports, prints, returns; name who does it"),
    Rule("posture", r"stands?|standing|stood|lies?|lay|laid", "is in, is stored in, is set"),
    Rule("location", r"besides?|behind (?:it|them|the|an?|its)|before (?:it|them)", "next to, with, after, follows"),
    Rule(
        "quantity",
        r"so many|none of (?:it|them)|no more often|any more|not at all",
        "give the number or negate the verb",
    ),
    Rule("person", r"nobody|somebody|who(?:so)?ever|whyever|wherever", "name the component or the user"),
    Rule("life", r"dies?|died|dead|death|lives?|born", "exits, crashes, is removed, is created"),
    Rule("court", r"suspects?|convicted|culprit", "candidate, isolated request"),
    Rule("wish", r"wants? (?:an?|the|no|more|to)", "requires, requests, needs"),
    Rule(
        "motion",
        r"goes on|went on|comes? to|came to|come of|becomes of|sees? to|seen to",
        "continues, equals, results in",
    ),
    Rule("custody", r"(?:is|are) held|holds? it to|held to", "is stored, is verified against"),
    Rule("making", r"makes? of|made of it|in the making", "builds, derives"),
    Rule(
        "relative",
        r"that which|those which|of which|that of|those of|the one that|ones? that|as it is|as they are",
        "repeat the noun",
    ),
    Rule("archaic", r"anew|alike|whole(?:ly)?(?= of)|at rest|of late|hitherto|thereof", "again, both, complete, idle"),
    Rule(
        "clause",
        r"what (?:it|they|an?|the|is|was|has|runs|came|comes|goes|gives|makes|needs|takes|follows|stands)",
        "use a noun: the value, the result, the cost",
    ),
)
FRAGMENT = Rule(
    "fragment",
    "Of|What|Whether|That of|Those of|Who|Whose|Whatever|Where one|The same|So that|As|Such|None|Nothing|Or|And|But"
    "|Else|Not",
    "start with the subject or an imperative",
)
ADVICE = {rule.name: rule.advice for rule in (*RULES, FRAGMENT)}
WORDING = re.compile(
    rf"\b(?:{'|'.join(f'(?P<{rule.name}>{rule.pattern})' for rule in RULES)})\b", re.IGNORECASE
)  # the boundary comes first, so that most positions are rejected without trying a rule
OPENING = re.compile(rf"(?:^|(?<=[.;:] ))(?P<{FRAGMENT.name}>{FRAGMENT.pattern})\b[^.]{{12,}}")

# Fields of Python's syntax tree with statements, or with parts that have statements.
STATEMENT_LISTS = ("body", "orelse", "handlers", "finalbody", "cases")
# Python's tokenizer finds the same comments and takes ten times as long.
LITERAL_OR_COMMENT = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*''',
    re.DOTALL,
)
HASH_COMMENTS = {".yaml", ".yml", ".toml", ".sh", ".ci", "Makefile", "Dockerfile"}
SLASH_COMMENTS = {".h", ".cpp"}
MARKDOWN_UNIT = re.compile(r"\s*(?:[-*+] |\d+\. |\||>)")


class Passage(NamedTuple):
    """A docstring, a block of comments, or a paragraph, list item or table row of Markdown."""

    path: Path
    first: int  # line, counted from 1
    last: int
    text: str


class Match(NamedTuple):
    """One flagged phrase."""

    rule: str
    phrase: str


@dataclass
class Rate:
    """Flagged phrases and words of a folder."""

    flagged: int = 0
    words: int = 0

    @property
    def per_thousand(self) -> float:
        return 1000 * self.flagged / self.words if self.words else 0.0


def find_matches(text: str) -> list[Match]:
    """Return the flagged phrases of a passage."""
    wording = [Match(found.lastgroup or "", found[0]) for found in WORDING.finditer(text)]
    return wording + [Match(FRAGMENT.name, found[FRAGMENT.name]) for found in OPENING.finditer(text)]


def passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a file. Files of other types, and Python that does not parse, have none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a template, or Python of another version
            return
        yield from _docstrings(path, tree)
        yield from _blocks(path, _python_comments(text))
    elif path.suffix == ".md":
        yield from _paragraphs(path, text)
    elif {path.suffix, path.name} & HASH_COMMENTS:
        yield from _blocks(path, _line_comments(text, "#"))
    elif path.suffix in SLASH_COMMENTS:
        yield from _blocks(path, _line_comments(text, "//"))


def _docstrings(path: Path, tree: ast.AST) -> Iterator[Passage]:
    """Yield every string that is a statement, which includes the documentation of attributes."""
    for name in STATEMENT_LISTS:
        for node in getattr(tree, name, ()):
            if not isinstance(node, ast.Expr):
                yield from _docstrings(path, node)
            elif isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield Passage(path, node.lineno, node.end_lineno or node.lineno, " ".join(node.value.value.split()))


def _python_comments(text: str) -> Iterator[tuple[int, str]]:
    line, end = 1, 0
    for found in LITERAL_OR_COMMENT.finditer(text):
        line += text.count("\n", end, found.start())
        end = found.start()
        if found[0].startswith("#") and not found[0].startswith("#!"):
            yield line, found[0].lstrip("# ")


def _line_comments(text: str, marker: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(marker) and not line.startswith("#!"):
            yield number, line.strip().lstrip(f"{marker[0]} ")


def _blocks(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    """Join the comments of consecutive lines."""
    block: list[str] = []
    first = last = 0
    for number, text in lines:
        if block and number != last + 1:
            yield Passage(path, first, last, " ".join(block))
            block = []
        if not block:
            first = number
        block.append(text)
        last = number
    if block:
        yield Passage(path, first, last, " ".join(block))


def _paragraphs(path: Path, text: str) -> Iterator[Passage]:
    """Yield paragraphs, list items and table rows, without headings, rules of tables and code in fences."""
    in_fence = False
    unit: list[str] = []
    first = 0
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines, 1):
        fence = line.lstrip().startswith("```")
        skipped = fence or in_fence or not line.strip() or line.startswith(("#", "|--"))
        if unit and (skipped or MARKDOWN_UNIT.match(line)):
            yield Passage(path, first, number - 1, " ".join(unit))
            unit = []
        if fence:
            in_fence = not in_fence
        if not skipped:
            first = first if unit else number
            unit.append(line.strip())


def files_below(paths: Sequence[Path]) -> list[Path]:
    """Return the files of `paths`, sorted, without hidden folders, caches and installed packages."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if _is_source_folder(name))
            found.extend(Path(folder, name) for name in sorted(names))
    return found


def _is_source_folder(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".egg-info") and name not in ("site-packages", "build")


def rates_by_folder(found: Iterable[Passage]) -> dict[Path, Rate]:
    """Return the rate of each folder, without its subfolders."""
    rates: dict[Path, Rate] = {}
    for passage in found:
        rate = rates.setdefault(passage.path.parent, Rate())
        rate.flagged += len(find_matches(passage.text))
        rate.words += len(passage.text.split())
    return rates


def added_lines(base: str, root: Path = ROOT) -> dict[Path, set[int]]:
    """Return the numbers of the lines that the working tree has and the commit `base` lacks, by file."""
    command = ["git", "diff", "--unified=0", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", base]
    diff = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    added: dict[Path, set[int]] = {}
    lines: set[int] = set()
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            lines = added.setdefault(root / line[6:], set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.update(range(first, first + count))
    return added


def _report(found: list[Passage], top: int) -> str:
    """Return the total, the rates of folders and the worst passages as text."""
    rates = rates_by_folder(found)
    total = Rate(sum(rate.flagged for rate in rates.values()), sum(rate.words for rate in rates.values()))
    lines = [f"{total.per_thousand:.1f} flagged per 1,000 words ({total.flagged} in {total.words:,} words)"]
    for folder, rate in sorted(rates.items(), key=lambda item: -item[1].flagged):
        if rate.flagged:
            lines.append(f"  {rate.per_thousand:6.1f} {rate.flagged:5d}  {_name(folder)}")
    worst = sorted(((find_matches(passage.text), passage) for passage in found), key=_severity, reverse=True)
    for matches, passage in [entry for entry in worst if entry[0]][:top]:
        phrases = ", ".join(f"{match.phrase!r} ({match.rule})" for match in matches)
        lines += [f"{_name(passage.path)}:{passage.first}: {phrases}", f"    {passage.text[:200]}"]
    used = sorted({match.rule for matches, _ in [entry for entry in worst if entry[0]][:top] for match in matches})
    return "\n".join([*lines, *(f"{rule}: {ADVICE[rule]}" for rule in used)])


def _severity(entry: tuple[list[Match], Passage]) -> float:
    """Weigh the number of matches and their density. A passage of few words counts as one of eight words."""
    matches, passage = entry
    return len(matches) + 20 * len(matches) / max(8, len(passage.text.split()))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files (default: the whole tree)")
    parser.add_argument("--diff", metavar="BASE", help="only passages with lines added since this commit")
    parser.add_argument("--top", type=int, default=25, help="number of passages to print (default: 25)")
    parser.add_argument("--table", action="store_true", help="print only the rates, rounded up")
    options = parser.parse_args(arguments)
    roots = [path.resolve() for path in options.paths] or [ROOT]
    for path in roots:
        if not path.exists():
            parser.error(f"{path} does not exist")
    found = [passage for path in files_below(roots) for passage in passages(path)]
    if options.diff is not None:
        added = added_lines(options.diff)
        found = [one for one in found if added.get(one.path, set()) & set(range(one.first, one.last + 1))]
    if options.table:
        for folder, rate in sorted(rates_by_folder(found).items()):
            print(f'    "{_name(folder)}": {max(4, math.ceil(rate.per_thousand))},')
        return
    print(_report(found, options.top))


if __name__ == "__main__":
    main()
