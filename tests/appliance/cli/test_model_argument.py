"""A model in the place of a manifest: a folder, a .gguf file, a repository of the hub."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from appliance.cli.main import main, with_command
from appliance.cli.model_argument import named_model, notes

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "manifests" / "demo"
sys.path.insert(0, str(ROOT / "tests" / "appliance" / "checkpoints"))
from source_servers import Files, publish, serving  # noqa: E402

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in a folder of its own, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    with serving() as server:
        publish(server, "org/demo", {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def gguf_model(tmp_path: Path) -> Path:
    from tests.engine.layers.test_lone_gguf import complete  # imports torch and transformers

    file, _ = complete(tmp_path / "made")
    return Path(shutil.move(file, tmp_path / "Small Model.Q8_0.gguf"))


def test_words_that_are_models_and_words_that_are_manifests(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "file").write_text("")
    assert named_model("folder").source == {"path": str(tmp_path / "folder")}
    assert named_model("missing.gguf").source == {"path": str(tmp_path / "missing.gguf")}
    assert named_model("Qwen/Qwen3-0.6B").source == {"huggingface": {"repo": "Qwen/Qwen3-0.6B"}}
    assert named_model("Qwen/Qwen3-0.6B").name == "Qwen3-0.6B"
    for word in (
        "m.yaml",
        "dir/m.yml",
        "m.json",
        "org/file",
        "/a/b",
        "./a/b",
        "a/b/c",
        "missing",
        "../a",
        "org/missing",
    ):
        assert named_model(word) is None, word


@pytest.mark.parametrize("word", ["model.gguf", "Qwen/Qwen3-0.6B", "./folder", "m.yaml"])
def test_a_model_alone_is_served(word: str) -> None:
    assert with_command([word, "--port", "1"]) == ["serve", word, "--port", "1"]


def test_the_manifest_is_shown_with_how_to_save_it() -> None:
    lines = notes(named_model("Qwen/Qwen3-0.6B"))
    assert "slipway init Qwen/Qwen3-0.6B -o my.yaml" in lines[0]
    assert yaml.safe_load("\n".join(lines[1:])) == {
        "apiVersion": "slipway/v2",
        "model": {"source": {"huggingface": {"repo": "Qwen/Qwen3-0.6B"}}, "names": ["Qwen3-0.6B"]},
    }


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_folder_is_checked_and_planned(command: str, capsys: Out) -> None:
    assert main([command, str(DEMO)]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert main([command, str(DEMO), "--model.max-context=1000000000"]) != 0


def test_a_gguf_file_is_checked_and_named_after_itself(gguf_model: Path, capsys: Out) -> None:
    assert main(["plan", gguf_model.name]) == 0
    said = capsys.readouterr().out
    assert "[Small-Model.Q8_0]" in said and "tokenizer Small Model.Q8_0.gguf" in said


def test_a_repository_of_the_hub_is_checked(hub: Files, capsys: Out) -> None:
    assert main(["check", "org/demo"]) == 0
    assert "org/demo: ok" in capsys.readouterr().out


def test_a_missing_model_is_an_error(hub: Files, capsys: Out) -> None:
    assert main(["check", "org/nothing"]) == 20
    assert "huggingface org/nothing at" in capsys.readouterr().err
    assert main(["check", "missing.gguf"]) != 0
    assert "missing.gguf: no such" in capsys.readouterr().err


MODELS: dict[str, Callable[[Path], str]] = {
    "folder": lambda gguf: str(DEMO),
    "hub": lambda gguf: "org/demo",
    "gguf": lambda gguf: str(gguf),
}


@pytest.mark.parametrize("kind", MODELS)
def test_init_writes_a_manifest_that_passes_check(kind: str, hub: Files, gguf_model: Path, capsys: Out) -> None:
    word = MODELS[kind](gguf_model)
    assert main(["init", word, "-o", "my.yaml"]) == 0
    capsys.readouterr()
    assert main(["check", "my.yaml"]) == 0
    assert "my.yaml: ok" in capsys.readouterr().out
    written = yaml.safe_load(Path("my.yaml").read_text())["model"]
    wanted = {
        "folder": {"path": str(DEMO)},
        "hub": {"huggingface": {"repo": "org/demo"}},
        "gguf": {"path": gguf_model.name},
    }
    assert written["source"] == wanted[kind]
    assert not list(Path().glob(".slipway-init*"))


def test_init_of_a_repository_that_is_not_there_writes_nothing(hub: Files, capsys: Out) -> None:
    assert main(["init", "org/nothing"]) == 20
    assert "huggingface org/nothing at" in capsys.readouterr().err and not Path("nothing.yaml").exists()


def test_a_path_that_is_a_hub_id_gets_the_hub_source(hub: Files, capsys: Out) -> None:
    Path("m.yaml").write_text("apiVersion: slipway/v2\nmodel:\n  source: {path: org/demo}  # mine\n")
    assert main(["check", "m.yaml"]) != 0
    said = capsys.readouterr().err
    assert "write source: {huggingface: {repo: org/demo}}" in said and "check --fix" in said
    assert main(["check", "m.yaml", "--fix"]) == 0
    assert Path("m.yaml").read_text().splitlines()[2] == "  source: {huggingface: {repo: org/demo}}  # mine"


def test_a_path_below_an_existing_folder_is_not_a_hub_id(capsys: Out) -> None:
    Path("models/demo").mkdir(parents=True)
    Path("m.yaml").write_text("apiVersion: slipway/v2\nmodel: {source: {path: models/demoo}}\n")
    assert main(["check", "m.yaml"]) != 0
    assert "huggingface" not in capsys.readouterr().err


def test_an_unknown_model_argument_gets_a_hint(capsys: Out) -> None:
    assert main(["serve", "Qwen3"]) == 2
    said = capsys.readouterr().err
    assert (
        "Qwen3: no such file" in said
        and "A model is a folder, a .gguf file or a hub ID such as Qwen/Qwen3-0.6B" in said
    )
    assert main(["serve", "missing.yaml"]) == 2
    assert "A model is" not in capsys.readouterr().err
