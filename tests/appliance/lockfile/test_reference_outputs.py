"""Reference outputs in a lock: when they are kept, the plan's report of them, and the engine's configuration.
tests/e2e/test_drift.py computes and compares them with real engines."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from appliance import __version__
from appliance.checkpoints.lockfile import Lock, as_yaml, lock_path, read_lock
from appliance.cli.main import main
from appliance.config import exits
from engine.api.golden import Arithmetic, Golden, LogitFingerprint, Prompt, Recorded

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"
MADE = Recorded(
    Arithmetic(
        device="A CPU: 3 GHz",
        kernels="avx2",
        dtype="float32",
        kv_dtype="float32",
        weights="stored",
        library="torch 2",
        release=__version__,
        exact=True,
    ),
    (
        Golden(
            Prompt("short", (1, 2)),
            (7, 8),
            (
                LogitFingerprint("00ff00ff00ff00ff", 12.5, 2.25, (7, 3), (9.5, -1e-7), (0.25, -3.0, 1e20, 4.0)),
                LogitFingerprint("0e10000000000000", 1.0, 1.0, (8, 1), (2.0, 1.0), (0.0, 0.5, 0.0, 0.0)),
            ),
        ),
    ),
)
OTHER = ("--hardware", "cpu:2:2GiB")  # a machine where no engine can run


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo with a lock that has golden prompts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(DEMO, tmp_path / "demo")
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: demo}}\nhardware: {device: cpu}\n")
    assert main(["lock", str(path)]) == 0
    monkeypatch.delenv("SLIPWAY__LIFECYCLE__SELF_TEST__PROMPTS")
    write(path, msgspec.structs.replace(read_lock(lock_path(path)), golden=MADE))
    return path


def write(manifest: Path, lock: Lock) -> None:
    lock_path(manifest).write_text(as_yaml(lock, manifest.name))


def engine(manifest: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["plan", str(manifest), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["engines"][0]["lifecycle"]["self_test"]


def line(manifest: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["plan", str(manifest), *arguments]) == 0
    return next(text for text in capsys.readouterr().out.splitlines() if text.startswith("self-test: "))


def test_lock_is_read_as_written_with_one_prompt_per_line(manifest: Path) -> None:
    assert read_lock(lock_path(manifest)).golden == MADE
    text = lock_path(manifest).read_text()
    assert sum("00ff00ff00ff00ff" in each for each in text.splitlines()) == 1


def test_outputs_of_the_same_files_are_kept_without_an_engine(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", str(manifest), *OTHER]) == 0
    assert "1 golden prompt for the self-test of engines: kept from the previous lock" in capsys.readouterr().out
    assert read_lock(lock_path(manifest)).golden == MADE
    (manifest.parent / "demo" / "chat_template.jinja").write_text("{{ 1 }}")
    assert main(["lock", str(manifest), *OTHER]) == 0
    told = capsys.readouterr().out
    assert (
        "0 golden prompts for the self-test of engines: none can be recorded here" in told
        and "not this machine" in told
    )
    assert read_lock(lock_path(manifest)).golden is None


def test_no_outputs_are_recorded_without_prompts(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock_path(manifest).unlink()
    assert main(["lock", str(manifest), "--set", "lifecycle.self_test.prompts=0"]) == 0
    assert "lifecycle.self_test.prompts is 0" in capsys.readouterr().out
    assert read_lock(lock_path(manifest)).golden is None


def test_an_engine_receives_the_contents_of_its_lock(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = engine(manifest, capsys)
    assert msgspec.convert(told["locked"], Recorded) == MADE
    assert (told["prompts"], told["at_start"], told["every"], told["budget"]) == (4, True, 300.0, 10.0)
    assert (told["tolerance"], told["refuses"], told["release"]) == (None, True, __version__)
    sets = ("prompts=2", "at_start=false", "every=1m", "budget=3s", "tolerance=0.5")
    told = engine(manifest, capsys, *(f"--set=lifecycle.self_test.{one}" for one in sets))
    assert [told[name] for name in ("prompts", "at_start", "every", "budget", "tolerance")] == [
        2,
        False,
        60,
        3,
        0.5,
    ]


@pytest.mark.parametrize(
    ("key", "locked", "refuses"),
    [("auto", True, True), ("require", True, True), ("warn", True, False), ("off", False, True)],
)
def test_model_lock_determines_the_use_of_golden_prompts(
    manifest: Path, capsys: pytest.CaptureFixture[str], key: str, locked: bool, refuses: bool
) -> None:
    told = engine(manifest, capsys, f"--model.lock={key}")
    assert ((told["locked"] is not None), told["refuses"]) == (locked, refuses)


def test_plan_describes_the_self_test(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = line(manifest, capsys)
    assert said.startswith(
        "self-test: 4 golden prompts, before it serves and one every 5m while idle; compared with m.lock"
    )
    assert "recorded with avx2 in float32 on A CPU: 3 GHz" in said
    assert "cannot be compared" in line(manifest, capsys, "--quantization.weights=int8")
    assert "the engine's own outputs" in line(manifest, capsys, "--model.lock=off")
    assert "none" in line(manifest, capsys, "--set", "lifecycle.self_test.prompts=0")
    said = line(manifest, capsys, "--set=lifecycle.self_test.at_start=false", "--set=lifecycle.self_test.every=0s")
    assert said.startswith("self-test: none (4 golden prompts, neither")


def test_lock_with_damaged_golden_prompts_is_refused(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lock_path(manifest)
    path.write_text(path.read_text().replace('"reply":[7,8]', '"reply":"7"'))
    assert main(["check", str(manifest)]) == exits.INTEGRITY.number
    assert "is not a lock file of this version of slipway" in capsys.readouterr().err


def test_selftest_without_golden_prompts_shows_how_to_record_them(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(manifest, msgspec.structs.replace(read_lock(lock_path(manifest)), golden=None))
    assert main(["selftest", str(manifest)]) == exits.INTEGRITY.number
    assert "has no golden prompts; `slipway lock" in capsys.readouterr().err
