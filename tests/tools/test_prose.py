"""tools/prose.py: which wording each rule flags, what counts as a passage, and the highest rate of every folder."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from tools.prose import ROOT, RULES, added_lines, files_below, find_matches, main, passages, rates_by_folder

GOAL = 4.0
"""Highest rate of a folder that the table does not name, in flagged phrases per 1,000 words."""

CEILINGS: dict[str, int] = {}
"""Highest rates of folders that are not rewritten yet. Lower or remove an entry when its folder improves; never
raise or add one. `python tools/prose.py --table` prints the present rates, rounded up."""


def rules_of(text: str) -> list[str]:
    return [match.rule for match in find_matches(text)]


@pytest.mark.parametrize(
    ("rule", "flagged", "accepted"),
    [
        ("speech", "The client is told the number.", "The client receives the number."),
        ("posture", "The name stands in the log.", "The name is in the log."),
        ("location", "An engine beside others.", "An engine next to others, besieged by requests."),
        ("quantity", "Return so many rows.", "Return `count` rows, as many as requested."),
        ("person", "A page that nobody reads.", "A page without readers."),
        ("life", "Restart an engine that dies.", "Restart an engine that exits, with its lifetime and deadline."),
        ("court", "The request is a suspect.", "The request is a candidate."),
        ("wish", "A tenant wants the same rows.", "A tenant requests the same rows."),
        ("motion", "The reply goes on at token 5.", "The reply continues at token 5."),
        ("custody", "Outputs are held to the reference.", "Outputs are compared with the reference."),
        ("making", "The text that a route makes of tokens.", "The text that a route builds from tokens."),
        ("relative", "The sum is that of all ranks.", "The sum covers all ranks."),
        ("archaic", "Compute the prompt anew.", "Compute the prompt again."),
        ("clause", "Print what it takes.", "Print the memory usage."),
        ("fragment", "What fits into one page.", "Return the rows that fit into one page."),
    ],
)
def test_a_rule_flags_its_wording_and_accepts_the_replacement(rule: str, flagged: str, accepted: str) -> None:
    assert rule in rules_of(flagged)
    assert rules_of(accepted) == []


def test_every_rule_has_an_example() -> None:
    examples = next(mark for mark in test_a_rule_flags_its_wording_and_accepts_the_replacement.pytestmark)
    assert {row[0] for row in examples.args[1]} == {*(rule.name for rule in RULES), "fragment"}


def test_a_fragment_is_flagged_only_at_the_start_of_a_sentence_and_if_it_is_long() -> None:
    assert rules_of("Rows are sorted. Of two equal rows the first is kept.") == ["fragment"]
    assert rules_of("Rows are sorted; Of two equal rows the first is kept.") == ["fragment"]
    assert rules_of("Rows are sorted, Of two equal rows the first is kept.") == []
    assert rules_of("None if empty") == []


SPACES = re.compile(r"\S {2,}\S|\n ")


def test_error_messages_have_no_runs_of_spaces() -> None:
    """CFG-05 texts that were joined wrongly"""
    found = []
    for package in ("appliance", "engine", "kernels", "slipway"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"""["'][^"'\n]*\S {2,}\S""", text):
                continue
            errors = (node.exc for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise) and node.exc)
            texts = (one for error in errors for one in ast.walk(error) if isinstance(one, ast.Constant))
            found += [
                f"{path}:{one.lineno}" for one in texts if isinstance(one.value, str) and SPACES.search(one.value)
            ]
    assert found == []


def test_words_inside_of_longer_words_are_not_flagged() -> None:
    assert rules_of("The baseline, the layout, a lifetime, an understanding and a deadlock.") == []


def test_phrases_are_found_in_any_case_and_counted_each() -> None:
    assert rules_of("Nobody knows; the engine DIES and the engine dies.") == ["person", "life", "life"]


def written(path: Path, text: str) -> list[tuple[int, int, str]]:
    path.write_text(text)
    return [(one.first, one.last, one.text) for one in passages(path)]


def test_python_has_docstrings_of_attributes_too_and_comments_by_block(tmp_path: Path) -> None:
    text = '#!/usr/bin/env python3\n"""Module."""\nx = 1\n"""Text\nof x."""\ny = "value"  # trailing\n\n# one\n# two\n'
    assert sorted(written(tmp_path / "a.py", text)) == [
        (2, 2, "Module."),
        (4, 5, "Text of x."),
        (6, 6, "trailing"),
        (8, 9, "one two"),
    ]


def test_a_hash_inside_of_a_string_is_no_comment(tmp_path: Path) -> None:
    quotes = 'a = "#x"  # one\nb = "\\"#"\nc = """\n"#\n"""  # two\n\nd = f"{1}#"  # three\n' + "e = '#\"'\n"
    comments = tokenize.generate_tokens(io.StringIO(quotes).readline)
    want = [(one.start[0], one.string[2:]) for one in comments if one.type == tokenize.COMMENT]
    found = [(first, text) for first, _, text in written(tmp_path / "a.py", quotes) if text in ("one", "two", "three")]
    assert found == want and len(want) == 3


def test_markdown_has_paragraphs_items_and_rows_without_headings_and_code(tmp_path: Path) -> None:
    text = "# Title\n\none\ntwo\n- item\n  more\n\n```sh\ncode\n```\n| a | b |\n|---|---|\n| c | d |"
    assert written(tmp_path / "README.md", text) == [
        (3, 4, "one two"),
        (5, 6, "- item more"),
        (11, 11, "| a | b |"),
        (13, 13, "| c | d |"),
    ]


@pytest.mark.parametrize("name", ["a.yaml", "a.toml", "a.sh", "Makefile", "Dockerfile"])
def test_comments_of_other_files_start_with_a_hash(name: str, tmp_path: Path) -> None:
    assert written(tmp_path / name, "#!/bin/sh\nkey: value\n# one\n  # two\nkey: value\n# three\n") == [
        (3, 4, "one two"),
        (6, 6, "three"),
    ]


def test_comments_of_c_plus_plus_start_with_slashes(tmp_path: Path) -> None:
    assert written(tmp_path / "a.h", "#include <x>\n// one\nint x;\n") == [(2, 2, "one")]


def test_files_of_other_types_and_python_that_does_not_parse_have_no_passages(tmp_path: Path) -> None:
    assert written(tmp_path / "a.py", "# nobody\nprint 1\n") == []
    assert written(tmp_path / "a.json", '{"text": "nobody"}') == []


def test_hidden_and_installed_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("kept", ".hidden", "site-packages", "x.egg-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").touch()
    assert files_below([tmp_path]) == [tmp_path / "kept" / "a.py"]


def test_a_rate_counts_the_files_of_a_folder_without_its_subfolders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("# nobody reads one of ten words in this short comment\n")
    (tmp_path / "b.py").write_text("# ten plain words that no rule of this tool flags\n")
    (tmp_path / "sub" / "c.py").write_text("# nobody\n")
    found = [passage for path in files_below([tmp_path]) for passage in passages(path)]
    rates = rates_by_folder(found)
    assert rates[tmp_path].per_thousand == 50
    assert rates[tmp_path / "sub"].per_thousand == 1000


def test_added_lines_are_those_of_the_working_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "README.md").write_text("one\ntwo\nthree\n")
    git("add", "README.md")
    git("commit", "-m", "Add a page")
    (tmp_path / "README.md").write_text("zero\none\nthree\nfour\nfive\n")
    assert added_lines("HEAD", tmp_path) == {tmp_path / "README.md": {1, 4, 5}}


def test_the_report_names_rate_passage_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("Plain text.\n\nNobody reads this page.\n")
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith("166.7 flagged per 1,000 words (1 in 6 words)\n")
    assert "README.md:3: 'Nobody' (person)" in out and "person: name the component or the user" in out


def test_the_table_has_rates_rounded_up_and_no_less_than_the_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("Plain text.\n\nNobody reads this page.\n")
    main(["--table", str(tmp_path)])
    assert capsys.readouterr().out == f'    "{tmp_path}": 167,\n'


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "none does not exist" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    """Rate of every folder of the tree."""
    found = [passage for path in files_below([ROOT]) for passage in passages(path)]
    return {str(folder.relative_to(ROOT)): rate.per_thousand for folder, rate in rates_by_folder(found).items()}


@pytest.mark.slow  # reads the whole tree
def test_no_folder_exceeds_its_ceiling(rates: dict[str, float]) -> None:
    assert len(rates) > 50, "the folders were not found"
    above = {name: rate for name, rate in rates.items() if rate > CEILINGS.get(name, GOAL)}
    assert not above, "run `make prose` and rewrite the passages that it lists"


@pytest.mark.slow
def test_every_ceiling_is_above_the_goal_and_of_a_folder_that_exists(rates: dict[str, float]) -> None:
    assert not set(CEILINGS) - set(rates), "remove the entries of these folders"
    assert all(ceiling > GOAL for ceiling in CEILINGS.values())
