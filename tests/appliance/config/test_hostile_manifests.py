"""Manifests designed to hang, exhaust memory or read other files: each is refused with a message, in bounded time."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli.main import main

DEMO = Path(__file__).resolve().parents[3] / "manifests/demo"
HEAD = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}}}\nhardware: {{device: cpu}}\n"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the output of a `slipway check` that refuses; any exception but a refusal fails the test."""
    assert main(["check", *words]) in (2, 3, 10, 11, 12, 13)
    return capsys.readouterr().err


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Names in the file system that are no regular files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop").symlink_to("loop2")
    (tmp_path / "loop2").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "socket"))
        yield {
            "is a named pipe": tmp_path / "pipe",
            "is a directory": tmp_path / "folder.yaml",
            "symbolic links": tmp_path / "loop",
            "is a socket": tmp_path / "socket",
            "is a device": Path("/dev/zero"),
        }


USES = {
    "extends": "extends: {}\n",
    "chat template": "engine: {{}}\n",
    "secret": "secrets: {{k: {{file: {}}}}}\nendpoints: {{api_keys: k}}\n",
    "certificate": "endpoints: {{tls: {{certificate: {0}, key: {0}}}}}\n",
}


def test_a_manifest_that_is_no_regular_file_is_refused(
    odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    del odd["is a directory"]  # which names a model
    for words, path in odd.items():
        assert words in refused(capsys, str(path))


@pytest.mark.parametrize("use", USES)
def test_keys_with_paths_read_only_regular_files(
    use: str, odd: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.yaml"
    for words, path in odd.items():
        head = HEAD.replace(f"{DEMO}}}", f"{DEMO}}}, chat_template: {path}") if use == "chat template" else HEAD
        file.write_text(head + USES[use].format(path))
        said = refused(capsys, str(file))
        assert words in said.lower() and f"{file}:" in said


def test_an_overlay_that_is_no_regular_file_is_refused(
    odd: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.yaml").write_text(HEAD)
    for words, path in odd.items():
        link = tmp_path / "link.yaml"
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        assert words in refused(capsys, str(tmp_path / "m.yaml"), "--overlay", str(link))


CONTENTS = {
    "passwd": "root:x:0:0:secretline:/root\n",
    "settings": "secretline: 12\nother: [1, 2]\n",
    "broken": "a: b: secretline\n",
    "ini": "[secretline]\nkey = value\n",
    "list": "- secretline\n",
    "binary": "\udc80secretline\n",
    "json": '{"secretline": {"token": "x"}}\n',
}


@pytest.mark.parametrize("content", CONTENTS)
def test_messages_repeat_nothing_of_a_file_that_is_no_manifest(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, file = tmp_path / "other", tmp_path / "m.yaml"
    other.write_bytes(CONTENTS[content].encode("utf-8", "surrogateescape"))
    file.write_text(f"{HEAD}extends: other\n")
    said = refused(capsys, str(file))
    assert "is not a manifest" in said and f"{file}:4:10" in said and "secretline" not in said
    (tmp_path / "o.yaml").symlink_to("other")
    file.write_text(HEAD)
    said = refused(capsys, str(file), "--overlay", str(tmp_path / "o.yaml"))
    assert "is not a manifest" in said and "secretline" not in said


def test_a_mistake_in_an_extended_manifest_is_shown_at_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text("endpoints: {prot: 1}\n")
    (tmp_path / "broken.yaml").write_text("endpoints:\n  port: 1\n host: x\n")
    for name, line in (("base.yaml", 1), ("broken.yaml", 3)):
        (tmp_path / "m.yaml").write_text(f"{HEAD}extends: {name}\n")
        assert f"{name}:{line}:" in refused(capsys, str(tmp_path / "m.yaml"))


def doubling(levels: int, times: int = 10) -> str:
    lines = [f'  v{n}: "{f"${{var.v{n - 1}}}" * times}"' for n in range(1, levels)]
    return "\n".join(["variables:", "  v0: aaaaaaaaaa", *lines]) + "\n"


DEEP = 1200  # deeper than Python's stack

HOSTILE = {
    "variables that contain one another": (doubling(30) + 'endpoints: {host: "${var.v29}"}\n', "more than 65,536"),
    "variables that are long together": (
        doubling(4) + "".join(f'  w{n}: "{"${var.v3}" * 5}"\n' for n in range(40)) + "limits: {max_stop: 4}\n",
        "all variables together",
    ),
    "texts that are long together": (
        f"{doubling(4)}endpoints: {{cors_origins: [{', '.join([chr(34) + '${var.v3}' * 5 + chr(34)] * 40)}]}}\n",
        "all interpolated texts together",
    ),
    "a chain of variables": (
        "variables:\n" + "".join(f'  v{n}: "${{var.v{n + 1}}}"\n' for n in range(DEEP)) + f"  v{DEEP}: a\n",
        "more than 50 nested variables",
    ),
    "defaults within defaults": (f'endpoints: {{host: "{"${A:-" * 2000}{"}" * 2000}"}}\n', "defaults within defaults"),
    "a long text with dollars": (f'endpoints: {{host: "{"$$" * 90_000}"}}\n', "characters"),
    "5,000 digits": (f"endpoints: {{port: {'9' * 5000}}}\n", "a number of 5,000 characters"),
    "5,000 digits behind a point": (f"hardware: {{memory_share: 0.{'9' * 5000}}}\n", "a number of 5,002 characters"),
    "an exponent of 5,000 digits": (f"endpoints: {{port: 1e{'9' * 5000}}}\n", "a number of 5,002 characters"),
    "many digits in base 16": (f"endpoints: {{port: 0x{'f' * 50_000}}}\n", "a number of 50,002 characters"),
    "nested lists": (f"x-a: {'[' * DEEP}{']' * DEEP}\n", "nested deeper than 20 levels"),
    "nested mappings": (f"x-a: {'{a: ' * DEEP}{'}' * DEEP}\n", "nested deeper than 20 levels"),
    "many values": (f"x-a: [{'1,' * 4_200}]\n", "more than 4,000 values"),
    "a large file": (f"# {'a' * 300_000}\n", "larger than the 256 KiB"),
    "a name too long for a file": (f"engine: {{record: /{'a' * 300}/x}}\n", "engine.record: a path of 303 characters"),
    "a path too long for the system": (f"engine: {{record: {'/a' * 3000}}}\n", "a path of 6,000 characters"),
    "extends with a long name": (f"extends: {'a' * 5000}\n", "name too long"),
    "a null character": ('engine: {record: "a\\0b"}\n', "U+0000 is not allowed"),
    "a lone surrogate": ('engine: {record: "a\\ud800b"}\n', "U+D800 is not allowed"),
    "a null character in a key": ('"a\\0b": 1\n', "U+0000 is not allowed"),
    "a null character in extends": ('extends: "a\\0b"\n', "U+0000 is not allowed"),
    "aliases that repeat one another": (
        "x-a: &a [1]\nendpoints:\n  cors_origins: &b [*a, *a]\n",
        "anchors and aliases are not allowed",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_with_a_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = HOSTILE[name]
    head = HEAD.replace("hardware: {device: cpu}\n", "") if "hardware:" in text else HEAD
    (tmp_path / "m.yaml").write_text(head + text)
    said = refused(capsys, str(tmp_path / "m.yaml"))
    assert words.lower() in said.lower() and "m.yaml" in said.split("\n")[0]
    first, *others = said.split("\n")
    assert len(first) < 700 or name == "extends with a long name"
    assert all(len(line) < 300 for line in others if "|" in line[:12])


def test_a_long_line_is_shown_around_the_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ", ".join(f"name-{n}" for n in range(200))
    (tmp_path / "m.yaml").write_text(HEAD + f"endpoints: {{cors_origins: [{names}], prot: 1, host: x{'y' * 300}}}\n")
    lines = refused(capsys, str(tmp_path / "m.yaml")).split("\n")
    marked = next(number for number, line in enumerate(lines) if "prot: 1" in line)
    at = lines[marked + 1].index("^")
    assert lines[marked][at : at + 4] == "prot" and lines[marked + 1].count("^") == 4
    assert lines[marked].count("…") == 2 and len(lines[marked]) < 230


def test_a_variable_that_is_used_often_is_no_attack(tmp_path: Path) -> None:
    text = 'variables: {origin: "https://example.org"}\nendpoints: {cors_origins: ['
    (tmp_path / "m.yaml").write_text(HEAD + text + ", ".join(['"${var.origin}"'] * 300) + "]}\n")
    assert main(["check", str(tmp_path / "m.yaml")]) == 0


@pytest.mark.parametrize("indented", ["endpoints:\n  some_key", "engine:\n  scheduling:\n    max_runing", "some_key"])
def test_500_unknown_keys_cost_little_work(
    indented: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    parsed = 0
    parse = yaml.parse

    def counted(text: str, **options: object) -> Iterator[object]:
        nonlocal parsed
        parsed += text.count("\n")
        yield from parse(text, **options)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(yaml, "parse", counted)
    above, _, key = indented.rpartition("\n")
    name = key.strip()
    lines = "".join(f"{key.replace(name, f'{name}_{n}')}: {n}\n" for n in range(500))
    (tmp_path / "m.yaml").write_text(HEAD + (f"{above}\n" if above else "") + lines)
    said = refused(capsys, str(tmp_path / "m.yaml"))
    assert said.count(": unknown key") >= 500
    assert parsed < 20_000, "the file was read as often as it has mistakes"
