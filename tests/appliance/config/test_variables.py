"""Environment variables: declared once, checked, read in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.config.keys import leaves
from appliance.config.problems import Refused
from appliance.config.schema_file import manifest_page
from appliance.config.settings import Given, cache_folder, load, variable
from appliance.config.variables import OFF, ON, VARIABLES, Variable, is_on, value, wrong

ROOT = Path(__file__).resolve().parents[3]
READERS = {
    "appliance/hardware/rocm.py",  # ROCm's variables that select devices
    "appliance/runtime/limited_processes.py",  # passes some of it on to processes
    "appliance/config/environment.py",  # the one copy
    "appliance/security/headers.py",  # the variable that a secret names
    "appliance/security/keys.py",  # the variable that a secret names
    "appliance/server/process.py",  # OpenTelemetry's variables
    "appliance/supervisor/exec_program.py",  # passes it on to a program
    "engine/layers/torch_compile.py",  # sets the folder in which torch keeps programs
}
SWITCH = Variable("OFFLINE", "switch", "Fetch nothing.")
WORD = Variable("MODE", "word", "How.", "highest", ("highest", "high", "medium"))


def sources(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules that have one of the words. Parsing all of them takes five seconds."""
    for package in ("appliance", "engine", "kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if any(word in (text := path.read_text()) for word in words):
                yield str(path.relative_to(ROOT)), ast.parse(text)


def test_no_other_module_reads_the_environment() -> None:
    found = {
        name
        for name, tree in sources("environ", "getenv")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv", "getenvb")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        or isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in ("environ", "getenv") for alias in node.names)
    }
    assert found == READERS


def test_every_name_that_is_read_is_declared_and_every_declared_one_is_read() -> None:
    names = set()
    for _, tree in sources("environ", "is_on(", "value("):
        for node in ast.walk(tree):
            literal: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
                if called == "get" and of.split(".")[-1] in ("environ", "environment"):
                    literal = node.args[0]
                elif called in ("value", "is_on") and len(node.args) == 2:
                    literal = node.args[1]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in (
                "environ",
                "environment",
            ):
                literal = node.slice
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                names.add(literal.value)
    own = {name for name in names if not name.startswith("OTEL_")}  # those are a standard (docs/traces.md)
    assert own == {declared.name for declared in VARIABLES}


def test_a_name_that_is_not_declared_cannot_be_read() -> None:
    for read in (value, is_on):
        with pytest.raises(KeyError):
            read({"SLIPWAY_NO_SUCH": "1"}, "SLIPWAY_NO_SUCH")


@pytest.mark.parametrize("text", [*ON, *OFF, "TRUE", "Off"])
def test_a_switch_takes_the_usual_words(text: str) -> None:
    assert wrong({"OFFLINE": text}, [SWITCH]) == []


def test_a_value_that_is_no_choice_is_refused_with_variable_and_choices() -> None:
    (problem,) = wrong({"OFFLINE": "maybe", "MODE": "high"}, [SWITCH, WORD])
    assert str(problem) == 'OFFLINE: "maybe"; must be one of 1, true, yes, on, 0, false, no, off'
    (problem,) = wrong({"MODE": "hihg"}, [SWITCH, WORD])
    assert str(problem) == 'MODE: "hihg"; must be one of highest, high, medium; did you mean high?'
    assert wrong({}, [SWITCH, WORD]) == wrong({"MODE": ""}, [SWITCH, WORD]) == []


def test_a_wrong_variable_is_refused_with_the_manifests_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.config.variables.wrong.__defaults__", ([SWITCH],))
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: /m}}\nlimits: {max_stop: 0}\n")
    with pytest.raises(Refused) as refused:
        load(Given(path, environ={"OFFLINE": "2"}))
    assert [problem.place.source for problem in refused.value.problems] == [str(path), "OFFLINE"]


def test_reading_remembers_nothing() -> None:
    environ = {"XDG_CACHE_HOME": "/a"}
    assert cache_folder(environ) == cache_folder(environ) == Path("/a/slipway")
    environ["XDG_CACHE_HOME"] = "/b"
    assert cache_folder(environ) == Path("/b/slipway")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/slipway")


def test_the_page_lists_them() -> None:
    page = manifest_page()
    assert all(f"\n| `{declared.name}` | " in page for declared in VARIABLES)


def test_the_variable_of_every_key_with_choices_is_refused_with_its_name_and_all_of_them(tmp_path: Path) -> None:
    """SLIPWAY__… variables are as checked as the keys that they set."""
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n")
    keys = [
        key for key in leaves() if key.choices and "*" not in key.path and key.types == {"string"} and len(key.path) > 1
    ]
    assert keys
    for key in keys:
        if key.allowed.startswith("one of"):
            with pytest.raises(Refused) as refused:
                load(Given(path, environ={variable(key.path): "zzzz"}))
            said = str(refused.value)
            assert said.startswith(f"{variable(key.path)}: ") and all(word in said for word in key.choices), said
