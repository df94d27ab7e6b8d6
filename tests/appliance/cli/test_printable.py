"""Text of others never controls the terminal of who runs a command."""

import io
from pathlib import Path

import pytest

from appliance.checkpoints.download import on_stderr
from appliance.cli.chat import Piece, show
from appliance.cli.main import main
from appliance.cli.why import timeline_lines
from engine.api.printable import printable

HOSTILE = "a\x1b[2Jb\x7fc\x9bd\u202ee\u2028f"
ESCAPED = r"a\x1b[2Jb\x7fc\x9bd\u202ee\u2028f"


def test_printable_text_stays_and_everything_else_is_escaped() -> None:
    assert printable("täglich 中文 🎉") == "täglich 中文 🎉"
    assert printable(HOSTILE) == ESCAPED
    assert printable("a\nb\ud800", keep="\n") == "a\nb\\ud800"


def test_request_details_from_the_service_are_escaped() -> None:
    choice = {"id": HOSTILE, "spent_ms": {}, "events": [{"at_ms": 1, "text": HOSTILE}]}
    assert all(line.isprintable() for line in timeline_lines(choice))


def test_a_reply_is_shown_without_control_characters() -> None:
    out = io.StringIO()
    assert show(iter([Piece(f"{HOSTILE}\n\tx")]), out) == f"{HOSTILE}\n\tx"
    assert out.getvalue() == f"{ESCAPED}\n\tx\n"


@pytest.mark.parametrize("text", ['"a\\e[2J": 1\n', 'model: {source: {path: "/m\\e[2J\\x7f"}}\n'])
def test_problems_of_a_manifest_are_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    manifest = tmp_path / "m.yaml"
    manifest.write_text(f"apiVersion: slipway/v2\n{text}")
    assert main(["check", str(manifest)])
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.err + said.out or "\\e[2J" in said.err
    assert all(line.isprintable() for line in (said.out + said.err).splitlines())


def test_progress_of_a_download_names_files_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with on_stderr() as say:
        say(HOSTILE)
    assert capsys.readouterr().err == f"{ESCAPED}\n"
