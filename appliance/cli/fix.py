"""`slipway check --fix`: apply the unambiguous fixes, report each, and leave other problems unchanged."""

import os
import tempfile
from pathlib import Path

from appliance.config.document import Document, read_document
from appliance.config.findings import Finding
from appliance.config.fix_edits import Edit, apply, overlap
from engine.api.files import MANIFEST_BYTES, read_file, real_path

MOST_ROUNDS = 10  # problems after a YAML error are found only when that error is fixed


def fix(found: list[Finding]) -> list[str]:
    """Apply fixes to the files. Return one line for each fix."""
    taken: list[Finding] = []
    for finding in found:
        if finding.fixable and not any(overlap(finding.edits, other.edits) for other in taken):
            taken.append(finding)
    said = []
    for file in dict.fromkeys(edit.file for finding in taken for edit in finding.edits):
        text = read_document(Path(file))
        if text is not None:
            _write(Path(file), text, [edit for finding in taken for edit in finding.edits if edit.file == file])
    for finding in taken:
        edit, place = finding.edits[0], finding.problem.place
        elsewhere = f"{edit.file}:{edit.line}: " if (edit.file, edit.line) != (place.source, place.line) else ""
        said.append(f"{_where(finding)}: fixed: {elsewhere}{_change(finding)}")
    return said


def left(found: list[Finding]) -> list[str]:
    """Return messages for problems that would be fixable in a file, with what to do instead."""
    return [
        f"{_where(finding)}: not fixed, because the value is not in a file: {finding.outside}"
        for finding in found
        if finding.outside and finding.problem.certain
    ]


def _where(finding: Finding) -> str:
    problem = finding.problem
    return f"{problem.place}: {problem.key}" if problem.key else f"{problem.place}"


def _change(finding: Finding) -> str:
    old = " ⏎ ".join(line.strip() for _, line in finding.removed)
    new = " ⏎ ".join(line.strip() for _, line in finding.added)
    return f"{old} → {new}" if old and new else f"removed {old}" if old else f"added {new}"


def _write(file: Path, text: Document, edits: list[Edit]) -> None:
    """Replace the file atomically. A link remains a link, and the mode is kept."""
    file = real_path(file)
    mark = "\ufeff" if read_file(file, MANIFEST_BYTES).startswith(b"\xef\xbb\xbf") else ""
    with tempfile.NamedTemporaryFile("wb", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
        new.write((mark + apply(text, edits)).encode())
    os.chmod(new.name, file.stat().st_mode & 0o7777)
    os.replace(new.name, file)
