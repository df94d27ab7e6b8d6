"""`slipway convert` and `slipway quantize` on a tiny checkpoint, from measurement to a served mix."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from appliance.cli.arguments import _bytes
from appliance.cli.main import main
from engine.models.checkpoint import read_checkpoint
from tests.appliance.conftest import until
from tests.engine.quantized_writers import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    random_model("Qwen3").save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "text.txt").write_text("w5 w9 w77 w30 w4 w66 w120 w8")
    return path


def test_a_mix_is_measured_proposed_and_written(folder, tmp_path, capfd):
    mix, made = tmp_path / "mix.json", tmp_path / "made"
    words = ["quantize", str(folder), "--evaluate", str(folder / "text.txt"), "--budget", "420K", "--mix", str(mix)]
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "model.layers.1" in shown.out and "all in int4:" in shown.out and "proposed mix:" in shown.out
    assert f"slipway convert {folder} FOLDER --mix {mix}" in shown.err and "1 of 2 layers measured, " in shown.err
    assert "not included: " in shown.out and "as stored: " in shown.out
    assert {"int4", "int8"} >= set(json.loads(mix.read_text())["layers"].values())
    assert main(["convert", str(folder), str(made), "--mix", str(mix), "--shard-size", "200K"]) == 0
    files = sorted(made.glob("*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 250_000
    shown = capfd.readouterr().out
    assert "% of the source" in shown and "sha256sum -c SHA256SUMS" in shown
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=made, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    assert read_checkpoint(made).quantization.method == "compressed-tensors"


def test_errors_name_the_cause(folder, tmp_path, capfd):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "made")]) == 10
    assert "none: no such directory" in capfd.readouterr().err
    (tmp_path / "wrong.json").write_text('{"layers": {"a": "int3"}}')
    assert main(["convert", str(folder), str(tmp_path / "made"), "--mix", str(tmp_path / "wrong.json")]) == 2
    assert "wrong.json: is not a file of `slipway quantize --mix`" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["quantize", str(folder), "--evaluate", "x", "--budget", "many"])
    assert "'many' is not a number of bytes, such as 4GiB or 600MB" in capfd.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "made"), "--mix", str(tmp_path / "none.json")]) == 2
    assert capfd.readouterr().err.endswith("none.json: no such file or directory\n")
    assert not (tmp_path / "made").exists()


def test_quantize_finds_wrong_files_before_it_measures(folder, tmp_path, capfd):
    text, mix = str(folder / "text.txt"), str(tmp_path / "mix.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for words, said in (
        (["--evaluate", str(tmp_path / "none.txt")], "none.txt: no such file or directory"),
        (["--evaluate", str(tmp_path / "binary")], "binary: is not a text in UTF-8"),
        (["--evaluate", text, "--budget", "1M", "--mix", str(tmp_path / "no" / "m")], "no: no such directory"),
        (["--evaluate", text, "--mix", mix], "--mix: has no effect without --budget"),
    ):
        assert main(["quantize", str(folder), *words]) == 2
        shown = capfd.readouterr().err
        assert said in shown and "measured" not in shown


@pytest.mark.parametrize(
    ("text", "count"),
    [("600", 600), ("4G", 4 << 30), ("1.5k", 1536), ("4GiB", 4 << 30), ("600MB", 600_000_000), ("12B", 12)],
)
def test_sizes_have_units(text, count):
    assert _bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1T", "4 GiB", "G", "1e9", "9" * 20])
def test_other_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        _bytes(text)


def test_the_program_of_a_command_ends_with_it(tmp_path):
    """`sleeping` stands for a long conversion."""
    (tmp_path / "sleeping.py").write_text("import os, time\nos.write(2, b'%d\\n' % os.getpid())\ntime.sleep(100)\n")
    code = "from appliance.cli.convert import _run; _run('sleeping', {})"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environ) as command:
        assert command.stderr is not None
        program = int(command.stderr.readline())
        command.kill()
    until("the program ends", lambda: not Path(f"/proc/{program}").exists())
