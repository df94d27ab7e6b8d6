"""Manifests of slipway/v1: read as the present version, problems at their own lines; rewritten with their comments."""

import difflib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.cli.main import main
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.config.upgrade import NoUpgrade, upgrade
from appliance.config.versions import translate
from appliance.config.yaml_loader import read_yaml

OLD = "apiVersion: slipway/v1\nmodel: {path: /m, names: [a]}\n"


def upgraded(text: str) -> str:
    return upgrade(text.encode(), "m.yaml").decode()


def loaded(path: Path, text: str) -> Any:
    path.write_bytes(text.encode())
    return load(Given(path)).manifest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model: {path: /m, names: [a]}", "model: {source: {path: /m}, names: [a]}"),
        ("model:\n  path: /m  # here\n  names: [a]", "model:\n  source: {path: /m}  # here\n  names: [a]"),
        ("model:\n    # which\n    'path':   \"/m, x\"", "model:\n    # which\n    'source': {'path':   \"/m, x\"}"),
        ("model:\n  path: /m,x{y}", "model:\n  source:\n    path: /m,x{y}"),
        ("model:\n  path: |\n    /m\n  names: [a]", "model:\n  source:\n    path: |\n      /m\n  names: [a]"),
        ("model:\n  path: >-\n    /m\n\n    /x\n", "model:\n  source:\n    path: >-\n      /m\n\n      /x\n"),
        ("model:\n  path: /m\n    /more\n", "model:\n  source:\n    path: /m\n      /more\n"),
        ('{"model": {"path": "/m"}}', '{"model": {"source": {"path": "/m"}}}'),
        ("model: {names: [a]}", "model: {names: [a]}"),
        (
            "model: {path: /m}\noverlays:\n  dev: {model: {path: /d}}\nhardware:\n  profiles:\n  - set:\n      model:\n"
            "        path: /p",
            "model: {source: {path: /m}}\noverlays:\n  dev: {model: {source: {path: /d}}}\nhardware:\n  profiles:\n"
            "  - set:\n      model:\n        source: {path: /p}",
        ),
    ],
)
def test_only_what_changed_is_rewritten(old: str, new: str) -> None:
    head = "apiVersion: 'slipway/v%d'  # the version\n"
    if old.startswith("{"):
        old, new = (text.replace("{", '{"apiVersion": "slipway/v%d", ', 1) % n for n, text in ((1, old), (2, new)))
    else:
        old, new = head % 1 + old, head % 2 + new
    assert upgraded(old) == new
    assert upgraded(new) == new
    for end in ("\r\n",):
        assert upgraded(old.replace("\n", end)) == new.replace("\n", end)
    assert upgraded("\ufeff" + old) == "\ufeff" + new


def manifest(rng: random.Random) -> tuple[str, list[str]]:
    """A manifest of version 1 in some style, and the comments in it."""
    comments: list[str] = []

    def comment() -> str:
        if rng.random() < 0.5:
            return ""
        comments.append(f"# {rng.choice(['path: /no', 'model: {path: x}', 'ä ß', 'slipway/v1', '}'])} {len(comments)}")
        return f"{' ' * rng.randint(1, 3)}{comments[-1]}"

    word = rng.choice(["/m", "'/m'", '"/m"', "/models/a b", "m,[x]", "'it''s'", '"a\\u00e4"', "../x", "a: b"[:1]])
    step = " " * rng.choice([1, 2, 3, 4])
    inner = [f"path:{' ' * rng.randint(1, 3)}{word}", "dtype: float32", f"names: [a,{' ' * rng.randint(0, 2)}b]"]
    rng.shuffle(inner)
    if rng.random() < 0.3 and not set(word) & set(",[]"):
        model = [f"model: {{{', '.join(inner)}}}{comment()}"]
    elif rng.random() < 0.2:
        model = [f"model: {{{inner[0]},{comment()}", f"  {inner[1]}, {inner[2]}}}"] if "[x]" not in word else []
    else:
        model = []
    if not model:
        lines = []
        for line in inner:
            lines += [f"{step}{comment().strip()}"] if rng.random() < 0.3 else []
            lines.append(f"{step}{line}{comment()}")
        model = [f"model:{comment()}", *lines]
    parts = [[f"apiVersion: {rng.choice(['slipway/v1', chr(34) + 'slipway/v1' + chr(34)])}{comment()}"], model]
    parts += [[f"limits:{comment()}", f"  max_stop: 3{comment()}"], ["endpoints: {port: 1}"]][: rng.randint(0, 2)]
    rng.shuffle(parts)
    lines = [line for part in parts for line in ([*part, ""] if rng.random() < 0.3 else part)]
    text = rng.choice(["\n", "\r\n"]).join([*lines, ""])
    return text, [comment for comment in comments if comment in text]


@pytest.mark.parametrize("seed", range(200))
def test_any_manifest_means_the_same_after_it_and_keeps_every_comment(seed: int, tmp_path: Path) -> None:
    text, comments = manifest(random.Random(seed))
    assert yaml.safe_load(text)["apiVersion"] == "slipway/v1", text
    new = upgraded(text)
    assert loaded(tmp_path / "new.yaml", new) == loaded(tmp_path / "old.yaml", text)
    for comment in comments:
        assert comment in new, (seed, comment, new)
    changed = [line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line.startswith("- ")]
    assert len(changed) == 2 or "model: {" in text, "the version and the path, nothing else"
    assert upgraded(new) == new


def test_a_problem_of_an_older_file_is_reported_at_its_line_with_its_key_names(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v1\nmodel:\n  path: [x]\nlimits: {max_stop: 0}\n")
    with pytest.raises(Refused) as caught:
        load(Given(path))
    first, second = (str(problem) for problem in caught.value.problems)
    assert first.startswith(f"{path}:3:9: model.path: a list of 1; must be text")
    assert second.startswith(f"{path}:4:20: limits.max_stop: 0; ")
    path.write_text("apiVersion: slipway/v1\nmodel: {path: no}\n")
    with pytest.raises(Refused, match=r"m.yaml:2:15: model.path: no: YAML 1.1 reads"):
        load(Given(path))
    path.write_text("apiVersion: slipway/v1\nmodel: {names: [a]}\n")
    with pytest.raises(Refused, match=r"m.yaml:2:1: model.source: missing; .*; in slipway/v1 it is written model.path"):
        load(Given(path))


def test_a_key_of_the_present_version_in_an_older_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v1\nmodel: {source: {path: /m}}\n")
    with pytest.raises(Refused, match=r"m.yaml:2:9: model.source: belongs to slipway/v2, but the file is of sl"):
        load(Given(path))


def test_options_have_the_present_names_whatever_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(OLD)
    found = load(Given(path, (Option("--set model.source", "model.source", "{huggingface: {repo: a/b}}"),)))
    assert found.manifest.model.source.kind == "huggingface" and found.manifest.model.source.path is None
    assert load(Given(path)).origin(("model", "source", "path")) == f"{path}:2:15"
    with pytest.raises(Refused, match=r"--set model.path: unknown key; .*it belongs to model.source: path"):
        load(Given(path, (Option("--set model.path", "model.path", "/x"),)))


def test_places_in_an_upgraded_file_refer_to_its_text() -> None:
    tree = read_yaml(OLD.encode(), "m")
    before = dict(tree.values)
    version = translate(tree)
    assert version is not None and version.name == "slipway/v1"
    assert tree.values[("model", "source", "path")] == before[("model", "path")]
    assert translate(tree) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: /m}\n", "m.yaml:1:1: apiVersion is missing; known: slipway/v1, slipway/v2"),
        ("apiVersion: slipway/v9\n", "m.yaml:1:13: apiVersion is slipway/v9; known"),
        ("apiVersion: slipway/v1\nmodel: {path: [\n", "m.yaml:3:1: not valid YAML"),
        ("apiVersion: slipway/v1\nmodel: {path: [x]}\n", "model.path is a mapping or list; it must be text"),
    ],
)
def test_files_that_cannot_be_upgraded_are_reported(text: str, words: str) -> None:
    with pytest.raises(NoUpgrade, match=re.escape(words)):
        upgraded(text)


def test_the_command_shows_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, link = tmp_path / "m.yaml", tmp_path / "link.yaml"
    path.write_text(OLD)
    path.chmod(0o640)
    link.symlink_to(path)
    assert main(["upgrade", str(path)]) == 3
    out = capsys.readouterr().out
    assert "-model: {path: /m, names: [a]}\n" in out and "+model: {source: {path: /m}, names: [a]}\n" in out
    assert main(["upgrade", "--check", str(path)]) == 3 and path.read_text() == OLD
    assert "would be rewritten as slipway/v2" in capsys.readouterr().out
    assert main(["upgrade", "--write", str(link)]) == 0
    assert path.read_text() == OLD.replace("v1", "v2").replace("{path: /m,", "{source: {path: /m},")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and len(list(tmp_path.iterdir())) == 2
    assert main(["upgrade", "--check", str(path)]) == 0 and main(["upgrade", str(path)]) == 0
    assert main(["upgrade", str(tmp_path / "no.yaml"), str(path)]) == 2
    assert "no.yaml: no such file or directory" in capsys.readouterr().err


def test_a_start_warns_once_and_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[3] / "manifests" / "demo"
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v1\nmodel: {{path: {folder}}}\n")
    assert main(["check", str(path)]) == 0
    warning = capsys.readouterr().err.splitlines()
    assert warning[0] == (
        f"{path}:1:13: apiVersion: slipway/v1 is read as slipway/v2 until Slipway 0.3; "
        f"rewrite it with: slipway upgrade --write {path}"
    )
    assert main(["upgrade", "--write", str(path)]) == 0
    capsys.readouterr()
    assert main(["check", str(path)]) == 0 and not capsys.readouterr().err
