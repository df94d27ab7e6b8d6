"""The command line: exit codes, one message, suggestions; checkpoints with a fault of each kind, written by hand."""

import argparse
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from appliance.cli.main import COMMANDS, main, parser
from appliance.config import exits
from appliance.config.keys import leaves
from appliance.config.manifest import Manifest
from appliance.config.sections.docstrings import field_docstrings
from appliance.config.sections.engine import Scheduling
from appliance.config.settings import Given, Option, load

HIDDEN, INNER, VOCAB = 8, 16, 11
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.q_proj.bias": (HIDDEN,),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.k_proj.bias": (HIDDEN // 2,),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.v_proj.bias": (HIDDEN // 2,),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
}


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Zeros in float32, by the format's specification."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Write a manifest next to a small complete checkpoint in the folder `tiny`."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    write_safetensors(folder / "model.safetensors", SHAPES)
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel:\n  source: {path: tiny}\nhardware: {device: cpu}\n")
    return path


Output = pytest.CaptureFixture[str]


FOLDER = "lifecycle:\n  journal: {folder: /var/lib/slipway}\n"


def test_a_good_manifest_is_ok_in_one_line(manifest: Path, capsys: Output) -> None:
    manifest.write_text(manifest.read_text() + FOLDER)
    assert main(["check", str(manifest)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{manifest}: ok, tiny (Qwen2ForCausalLM, float32, cpu") and out.count("\n") == 1 and not err


def test_check_and_plan_report_that_a_restart_deletes_the_run_directory(manifest: Path, capsys: Output) -> None:
    expected = (
        "storage: stored responses for 24h and replies with an Idempotency-Key for 15m, in the run directory: a "
        "restart of the service deletes them; set lifecycle.journal.folder to a folder on a volume to keep them\n"
    )
    for command in ("check", "plan"):
        assert main([command, str(manifest)]) == 0
        assert expected in capsys.readouterr().out


def test_check_says_nothing_about_disks_if_a_restart_keeps_replies(manifest: Path, capsys: Output) -> None:
    text = manifest.read_text()
    manifest.write_text(text + FOLDER)
    assert main(["check", str(manifest)]) == 0 and "storage" not in capsys.readouterr().out
    assert main(["plan", str(manifest)]) == 0
    assert "15m, in /var/lib/slipway: a restart of the service keeps them\n" in capsys.readouterr().out
    manifest.write_text(text + "lifecycle:\n  journal: {keep: 0s}\nendpoints:\n  responses: {keep: 0s}\n")
    for command in ("check", "plan"):
        assert main([command, str(manifest)]) == 0 and "storage" not in capsys.readouterr().out


def test_a_wrong_manifest_ends_with_2_and_one_message(manifest: Path, capsys: Output) -> None:
    manifest.write_text(manifest.read_text() + "endpoints:\n  prot: 1\nlimits: {max_stop: no}\n")
    for command in ("check", "plan", "serve"):
        assert main([command, str(manifest)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.endswith(f"{manifest}: 2 problems; slipway check --fix corrects 1\n")
        assert err.startswith(f"{manifest}:6:3: endpoints.prot: unknown key")


def faults(folder: Path) -> dict[str, Any]:
    weights = folder / "model.safetensors"
    return {
        "no such directory": lambda: folder.rename(folder.parent / "gone"),
        "config.json": lambda: (folder / "config.json").unlink(),
        "is damaged": lambda: (folder / "config.json").write_text("{"),
        "NoSuchForCausalLM": lambda: change(folder, architectures=["NoSuchForCausalLM"]),
        "no safetensors files": lambda: weights.rename(folder / "pytorch_model.bin"),
        "truncated": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "truncated within its header": lambda: weights.write_bytes(weights.read_bytes()[:20]),
        "lacks model.norm.weight": lambda: write_safetensors(weights, without("model.norm.weight")),
        "has model.extra": lambda: write_safetensors(weights, SHAPES | {"model.extra": (3,)}),
        "has shape [3]": lambda: write_safetensors(weights, SHAPES | {"model.norm.weight": (3,)}),
        "tokenizer.json: missing": lambda: (folder / "tokenizer.json").unlink(),
        "tokenizer.json: cannot be read": lambda: (folder / "tokenizer.json").write_text('{"model": '),
    }


def change(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | values))


def without(name: str) -> dict[str, tuple[int, ...]]:
    return {known: shape for known, shape in SHAPES.items() if known != name}


@pytest.mark.parametrize("words", faults(Path()))
def test_a_faulty_checkpoint_is_refused_at_model_path(manifest: Path, capsys: Output, words: str) -> None:
    faults(manifest.parent / "tiny")[words]()
    assert main(["check", str(manifest)]) == exits.CHECKPOINT.number
    err = capsys.readouterr().err
    assert err.startswith(f"{manifest}:3:18: model.source.path: ") and words in err, err


def test_a_checkpoint_with_mistrals_tokenizer_file_alone_is_served(manifest: Path, capsys: Output) -> None:
    (manifest.parent / "tiny" / "tokenizer.json").unlink()
    tekken = manifest.parent / "tiny" / "tekken.json"
    tekken.write_text('{"config": {}, "vocab": []}')
    assert main(["check", str(manifest)]) == 0
    tekken.write_text('{"config": {}}')
    assert main(["check", str(manifest)]) == exits.CHECKPOINT.number
    assert "tekken.json: cannot be read: Object missing required field `vocab`" in capsys.readouterr().err


def test_files_that_the_manifest_names_must_be_there(
    manifest: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    text = (
        "apiVersion: slipway/v2\nmodel: {source: {path: tiny}, chat_template: chat.jinja}\n"
        "engine: {record: no/run.log}\n"
        "secrets: {a: {file: a.txt}, b: {env: NO_SUCH_KEY}, c: {file: c.txt}}\n"
    )
    manifest.write_text(text)
    (manifest.parent / "c.txt").write_text(" \n")
    assert main(["check", str(manifest)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for value in ("chat.jinja", "no/run.log", "a.txt", "NO_SUCH_KEY", "c.txt"):
        before = text[: text.index(value)]
        place = f"{manifest}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}: "
        assert any(line.startswith(place) for line in lines), (place, lines)
    for words in ("chat.jinja: no such file", "no: no such directory", "NO_SUCH_KEY is not set", "c.txt: is empty"):
        assert any(words in line for line in lines), words


def test_options_of_the_command_line_count(manifest: Path, capsys: Output) -> None:
    arguments = ["plan", str(manifest), "--port", "9000", "-H", "127.0.0.1", "--set", "endpoints.port=9001", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    endpoints = found["gateway"]["endpoints"]
    assert (endpoints["port"], endpoints["host"]) == (9001, "127.0.0.1")
    origins = {one["key"]: one["origin"] for one in found["effective"]}
    assert (origins["endpoints.port"], origins["endpoints.host"]) == ("--set endpoints.port", "--host")


def test_a_plan_shows_every_key_and_no_secret(manifest: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "hunter2")
    arguments = [str(manifest), "--set", "secrets={k: {env: CANARY}}", "--set", "endpoints.api_keys=k"]
    for flag in ([], ["--json"]):
        assert main(["plan", *arguments, *flag]) == 0
        out = capsys.readouterr().out
        assert "secrets.k" in out and "hunter2" not in out
    assert "auto → 64" not in out and main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    for words in ("auto → 64", "maximum of the checkpoint", "KV cache", f"{manifest}:3:18", "weights", "default"):
        assert words in text


def test_the_environment_counts_and_a_wrong_name_in_it_is_refused(
    manifest: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY__ENDPOINTS__PROT", "1")
    assert main(["check", str(manifest)]) == 2
    assert "did you mean SLIPWAY__ENDPOINTS__PORT?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chekc", "m.yaml"], "did you mean check?"),
        (["serv", "m.yaml"], "did you mean serve?"),
        (["check", "m.yaml", "--sett", "a=b"], "did you mean --set?"),
        (["serve", "m.yaml", "--prot", "1"], "did you mean --port?"),
        (["check", "m.yaml", "--set", "a"], "a has no '='. Use --set KEY=VALUE"),
        (["serve", "m.yaml", "--engine.scheduling.max-runing", "1"], "did you mean --engine.scheduling.max-running?"),
        (["plan", "m.yaml", "--engine-scheduling-max-running=1"], "did you mean --engine.scheduling.max-running?"),
        (["plan", "m.yaml", "--max_running=1"], "did you mean --engine.scheduling.max-running?"),
        (["plan", "m.yaml", "--max-num-seqs", "1"], "did you mean --engine.scheduling.max-running?"),
        (["check", "m.yaml", "--engine", "{}"], "it is a section. Use flags such as --engine.scheduling.max-running"),
        (["check", "m.yaml", "--xyzzy", "1"], "--help-all lists the flags of all keys"),
        (["check", "m.yaml", "--limits.max-stop"], "--limits.max-stop: expected one argument\nSee"),
        (["schema", "--limits.max-stop", "1"], "unrecognized arguments: --limits.max-stop"),
        (["check"], "MANIFEST"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_suggestion(arguments: list[str], words: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_hyphens_and_underscores_are_one_in_options_but_not_in_values(capsys: Output) -> None:
    for spelling in ("--api-key-env", "--api_key_env"):
        options = parser().parse_args(["chat", "--api-key-env=MY_KEY"])
        assert options.api_key_env == "MY_KEY", spelling
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--api_key_env=MY_KEY", "--help"])
    assert ended.value.code == 0 and "--api-key-env" in capsys.readouterr().out


def actions(command: str) -> list[argparse.Action]:
    """All options of a command, as it runs."""
    return parser(command, every=True)._subparsers._group_actions[0].choices[command]._actions  # type: ignore


def test_every_option_has_help_and_a_unique_short_form() -> None:
    shorts: dict[str, str] = {}
    for name in COMMANDS:
        for action in actions(name):
            assert action.help and action.help != argparse.SUPPRESS, (name, action.dest)
            long = next((flag for flag in action.option_strings if flag.startswith("--")), "")
            for flag in action.option_strings:
                if not flag.startswith("--"):
                    assert shorts.setdefault(flag, long) == long, (name, flag)
    assert {"-p", "-H", "-c", "-dp", "-s"} <= set(shorts)


def fields(model: type[BaseModel], above: str = "--") -> list[str]:
    """A flag for each field of a pydantic model that holds a value, by pydantic's own table."""
    found = []
    for name, field in model.model_fields.items():
        kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
        if get_origin(field.annotation) is dict:  # the operator chooses its names: one flag for the whole mapping
            kinds = ()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        word = above + name.replace("_", "-")
        inner = None if get_origin(field.annotation) is tuple else inner  # a list is one value
        found += [word] if inner is None else fields(inner, f"{word}.")
    return found


@pytest.mark.parametrize("command", ["serve", "plan", "check"])
def test_every_key_of_the_manifest_has_a_flag_with_its_meaning(command: str) -> None:
    flags = {flag: action for action in actions(command) for flag in action.option_strings}
    assert set(fields(Manifest)) <= set(flags)
    text = field_docstrings(Scheduling)["max_running"]
    assert (flags["--engine.scheduling.max-running"].help or "").startswith(text)


def test_the_help_is_short_and_help_all_lists_every_key_by_section(capsys: Output) -> None:
    pages = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main(["serve", flag])
        assert ended.value.code == 0
        pages[flag] = capsys.readouterr().out
    assert len(pages["--help"].splitlines()) < 44 and "--limits.max-stop" not in pages["--help"]
    for words in ("--port PORT", "-c MAX_CONTEXT", "-dp DATA", "--help-all"):
        assert words in pages["--help"]
    for flag in fields(Manifest):
        assert f"{flag} " in pages["--help-all"], flag
    assert "\nengine.cache:\n" in pages["--help-all"]


def options(*words: str) -> tuple[Option, ...]:
    """The options as `slipway plan` gets them, after what `main` does to the words."""
    found: list[argparse.Namespace] = []
    command = COMMANDS["plan"]
    run = lambda options: found.append(options) or 0  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMANDS, "plan", (run, *command[1:]))
        assert main(["plan", "m.yaml", *words]) == 0
    given: tuple[Option, ...] = found[0].options
    return given


def test_short_and_long_flags_dashes_and_underscores_are_equivalent() -> None:
    for words in (["-dp", "3"], ["-dp=3"], ["--parallelism.data", "3"], ["--parallelism.data=3"]):
        assert options(*words) == (Option("--parallelism.data", "parallelism.data", "3"),), words
    for words in (["--limits.max-stop", "a_b"], ["--limits.max_stop", "a_b"], ["--limits.max_stop=a_b"]):
        assert options(*words) == (Option("--limits.max-stop", "limits.max_stop", "a_b"),), words
    assert options("-p9000") == options("--port=9000") == (Option("--port", "endpoints.port", "9000"),)
    assert options("--limits.max-logprobs", "-1")[0].text == "-1"


def test_a_flag_has_the_precedence_of_set_and_a_plan_names_it(
    manifest: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY__LIMITS__MAX_STOP", "2")
    for words, value, origin in (
        (["--limits.max-stop=3"], 3, "--limits.max-stop"),
        (["--set", "limits.max_stop=4", "--limits.max-stop=3"], 3, "--limits.max-stop"),
        (["--limits.max-stop=3", "--set", "limits.max_stop=4"], 4, "--set limits.max_stop"),
    ):
        assert main(["plan", str(manifest), "--json", *words]) == 0
        found = {one["key"]: one for one in json.loads(capsys.readouterr().out)["effective"]}
        assert (found["limits.max_stop"]["value"], found["limits.max_stop"]["origin"]) == (value, origin)
    assert main(["check", str(manifest), "--limits.max-stop", "0"]) == 2
    assert capsys.readouterr().err.startswith("--limits.max-stop: 0; must be a whole number of at least 1\n")


# A value of each key that is not its default.
PARTICULAR: dict[str, Any] = {
    "adapters": [{"name": "support", "path": "b/c"}],
    "endpoints.routes.health": ["/a", "/b/c"],
    "endpoints.routes.predict": ["/d"],
    "hardware.executor": "toy",
    "limits.media.folders": ["/a", "/b"],
    "limits.media.hosts": ["a.example.com", "*.example.org"],
    "model.format": "qwen3_coder",
    "model.pooling.dimensions": [64, 32],
    "observability.traces.attributes": ["a=b", "c=d: e"],
    "observability.traces.endpoint": "http://collector:4318",
    "model.pooling.score_tokens": ["ja", "nein"],
}
NAMES_OF_SECRETS = ("endpoints.api_keys", "model.credentials", "observability.traces.headers")
OTHERS: dict[str, Any] = {
    "boolean": lambda default: not default,
    "integer": lambda default: 2 if default != 2 else 3,
    "number": lambda default: 0.5 if default != 0.5 else 0.25,
    "array": lambda default: ["a", "b: c"],
    "string": lambda default: "x: {y",
}


def test_a_manifest_survives_the_way_to_flags_and_back_to_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("{}")
    want: dict[str, Any] = {"apiVersion": "slipway/v2", "secrets": {"k": {"env": "KEY"}}}
    want["evaluation"] = {"sums": {"file": "sums.jsonl", "kind": "gsm8k", "minimum": 0.5}}
    for key in leaves():
        if "*" in key.path or key.name == "apiVersion":
            continue
        if key.path[:2] == ("model", "source") and key.path != ("model", "source", "path"):
            continue  # one kind alone is given
        value = (
            PARTICULAR.get(key.name)
            or next((word for word in key.choices if word != key.default), None)
            or next(make(key.default) for kind, make in OTHERS.items() if kind in key.types)
        )
        within = want
        for part in key.path[:-1]:
            within = within.setdefault(part, {})
        within[key.path[-1]] = "k" if key.name in NAMES_OF_SECRETS else value
    given = [flag for flag in fields(Manifest) if ".source." not in flag or flag.endswith(".path")]
    words = [word for flag in given for word in (flag, json.dumps(at(want, flag)))]
    manifest = load(Given(path, options(*words))).manifest
    assert manifest == Manifest.model_validate(want)
    assert Manifest.model_validate(manifest.model_dump(mode="json")) == manifest
    names = [flag.removeprefix("--").replace("-", "_") for flag in given if flag not in ("--secrets", "--evaluation")]
    unset = [key.name for key in leaves() if key.name in names and at(manifest.model_dump(), key.name) == key.default]
    assert not unset


def at(value: dict[str, Any], name: str) -> Any:
    for part in name.removeprefix("--").replace("-", "_").split("."):
        value = value[part]
    return value


def test_the_schema_and_the_version_are_printed(capsys: Output) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["apiVersion"]
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("slipway ")


@pytest.mark.slow
def test_the_environment_report_contains_torch_python_and_platform(capsys: Output) -> None:
    import platform

    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version() and facts["platform"] == platform.platform()
    assert facts["torch"].split(",")[0].startswith(facts["packages"]["torch"].split("+")[0])


@pytest.mark.slow
def test_no_command_but_env_imports_torch(manifest: Path) -> None:
    code = f"import sys; from appliance.cli.main import main; main(['plan', {str(manifest)!r}])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    light = "import sys, appliance.cli.main; heavy = ('pydantic', 'yaml', 'httpx', 'torch')"
    light += "; print([name for name in heavy if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
