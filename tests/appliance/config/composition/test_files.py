"""Files that extend others: lookup, messages for missing files, and the folder that relative paths start from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.composition.files import MAX_FILES
from appliance.config.problems import Refused
from appliance.config.settings import Given, Settings, load
from appliance.planning.validate import validate

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]
HEAD = "apiVersion: slipway/v2\n"
MODEL = "model: {source: {path: /m}}\n"


def test_a_value_of_a_base_keeps_its_place_there(loaded: Load) -> None:
    found = loaded(
        HEAD + "extends: base.yaml\nlimits: {max_stop: 2}\n", files={"base.yaml": MODEL + "limits: {max_choices: 3}\n"}
    )
    assert found.manifest.limits.max_choices == 3 and found.manifest.model.source.path == "/m"
    assert found.origin(("limits", "max_choices")) == "base.yaml:2:23"
    assert found.origin(("limits", "max_stop")) == "m.yaml:3:20"
    assert found.files == (Path("m.yaml"), Path("base.yaml")) and found.layers == ("extends base.yaml",)


def test_a_problem_in_a_base_shows_the_extends_chain(refused: Refuse) -> None:
    files = {"a/base.yaml": "extends:\n  - ../b/root.yaml\n" + MODEL, "b/root.yaml": "endpoints:\n  port: abc\n"}
    assert refused(HEAD + "extends: [a/base.yaml]\n", files=files) == [
        'b/root.yaml:2:9: endpoints.port: "abc"; must be a whole number from 0 to 65535; '
        "extended by a/base.yaml:2:5, m.yaml:2:11"
    ]


def test_problems_of_the_manifest_are_listed_before_problems_of_its_bases(refused: Refuse) -> None:
    problems = refused(HEAD + "extends: a.yaml\nzzz: 1\n", "limits.max_stop=0", files={"a.yaml": MODEL + "yyy: 1\n"})
    assert [problem.split(" ")[0] for problem in problems] == ["m.yaml:3:1:", "a.yaml:2:1:", "--set"]


def test_a_wrong_value_of_a_base_that_is_replaced_is_no_problem(loaded: Load) -> None:
    found = loaded(
        HEAD + MODEL + "extends: a.yaml\nlimits: {max_stop: 2}\n", files={"a.yaml": "limits: {max_stop: x}\n"}
    )
    assert found.manifest.limits.max_stop == 2


@pytest.mark.parametrize(
    ("extends", "files", "problem"),
    [
        ("bse.yaml", {"base.yaml": ""}, "m.yaml:2:10: extends: bse.yaml: no such file; did you mean base.yaml?"),
        ("[a.yaml, zzzz]", {"a.yaml": MODEL}, "has a.yaml, m.yaml"),
        ("s/bse.yaml", {"s/base.yaml": ""}, "extends: s/bse.yaml: no such file; did you mean s/base.yaml?"),
        ("sub/base.yaml", {}, "m.yaml:2:10: extends: sub/base.yaml: no such file, nor the folder sub"),
        ("sub", {"sub/x": ""}, "m.yaml:2:10: extends: sub: is a directory"),
        ("3", {}, "m.yaml:2:10: extends: must be the path of a manifest, or a list of them"),
        ("", {}, "m.yaml:2:9: extends: must be the path of a manifest, or a list of them"),
        ("{a: b}", {}, "m.yaml:2:10: extends: must be the path of a manifest, or a list of them"),
        ("[a.yaml, [b]]", {"a.yaml": ""}, "m.yaml:2:19: extends[1]: must be the path of a manifest, or a list of them"),
        ("m.yaml", {}, "m.yaml:2:10: extends: m.yaml: a file cannot extend itself: m.yaml → m.yaml"),
        ("${WHERE}/x.yaml", {}, "m.yaml:2:10: extends: ${WHERE} is not set; set it, or write ${WHERE:-default}"),
        (
            "${var.x}.yaml",
            {},
            "m.yaml:2:10: extends: ${var.x}.yaml: variables cannot be used in extends; "
            "use an environment variable: ${NAME}",
        ),
    ],
)  # fmt: skip
def test_an_invalid_base_is_reported_at_extends(
    refused: Refuse, extends: str, files: dict[str, str], problem: str
) -> None:
    """There are no follow-up messages: values of the missing file are not reported as missing."""
    problems = refused(HEAD + f"extends: {extends}\n", files=files)
    assert any(one.endswith(problem) for one in problems), problems
    assert not [one for one in problems if "missing" in one]


def test_a_missing_manifest_is_reported_with_a_similar_file(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(HEAD)
    with pytest.raises(Refused, match=r"servce.yaml: no such file; did you mean .*/service.yaml\?$"):
        load(Given(tmp_path / "servce.yaml"))


def test_a_circle_is_refused_with_its_files_in_order(refused: Refuse) -> None:
    files = {"a.yaml": "extends: s/b.yaml\n", "s/b.yaml": "extends: [../c.yaml]\n", "c.yaml": "extends: s/../a.yaml\n"}
    assert refused(HEAD + "extends: a.yaml\n", files=files) == [
        "c.yaml:1:10: extends: s/../a.yaml: a file cannot extend itself: a.yaml → s/b.yaml → c.yaml → a.yaml; "
        "extended by s/b.yaml:1:11, a.yaml:1:10, m.yaml:2:10"
    ]


def test_two_files_may_extend_the_same_one(loaded: Load) -> None:
    files = {"root.yaml": MODEL + "limits: {max_stop: 1, max_choices: 1}\n"}
    files |= {"a.yaml": "extends: root.yaml\nlimits: {max_stop: 2}\n", "b.yaml": "extends: root.yaml\n"}
    limits = loaded(HEAD + "extends: [a.yaml, b.yaml]\n", files=files).manifest.limits
    assert (limits.max_stop, limits.max_choices) == (1, 1), "b.yaml is later, and brings the root once more"


def test_files_that_double_at_each_step_end_with_a_refusal(refused: Refuse) -> None:
    files = {f"{n}.yaml": f"extends: [{n + 1}.yaml, {n + 1}.yaml]\n" for n in range(30)} | {"30.yaml": MODEL}
    problems = refused(HEAD + "extends: 0.yaml\n", files=files)
    assert f"more than {MAX_FILES} files" in problems[0] and len(problems) < 2 * MAX_FILES


def test_a_base_that_is_not_yaml_is_the_only_reported_problem(refused: Refuse) -> None:
    problems = refused("extends: a.yaml\n", files={"a.yaml": "model: {path: '/m}\n"})
    assert len(problems) == 1
    assert problems[0].startswith("a.yaml:1:15: not valid YAML") and problems[0].endswith("; extended by m.yaml:1:10")


def test_a_base_in_another_version_is_refused(refused: Refuse) -> None:
    problems = refused(HEAD + "extends: a.yaml\n", files={"a.yaml": "apiVersion: slipway/v0\n" + MODEL})
    assert problems == [
        "a.yaml:1:13: apiVersion: slipway/v0, but the file that extends this one has slipway/v2; "
        "write slipway/v2 in both; extended by m.yaml:2:10"
    ]


def test_the_environment_is_known_in_extends(loaded: Load) -> None:
    text = HEAD + "extends: ['${SITE}/a.yaml', \"${OTHER:-b}.yaml\"]\n"
    found = loaded(text, files={"x/a.yaml": MODEL, "b.yaml": "limits: {max_stop: 7}\n"}, SITE="x")
    assert (found.manifest.model.source.path, found.manifest.limits.max_stop) == ("/m", 7)


def test_a_path_starts_at_the_folder_of_the_file_that_has_it(loaded: Load, tmp_path: Path) -> None:
    text = HEAD + "extends: shared/base.yaml\nendpoints: {api_keys: k}\nengine: {record: r}\n"
    base = "model: {source: {path: ../models/x}, chat_template: t.jinja}\nsecrets: {k: {file: keys}, mine: {file: other}}\n"  # noqa: E501
    profile = "hardware: {profiles: [{name: p, match: {}, set: {engine: {record: sub/r}}}]}\n"
    found = loaded(text, files={"shared/base.yaml": base + profile}, choose=lambda *_: ("",))
    shared = tmp_path / "shared"
    assert found.file(("model", "source", "path")).resolve() == tmp_path / "models/x"
    assert found.file(("model", "chat_template")) == shared / "t.jinja"
    assert found.file(("secrets", "k", "file")) == shared / "keys"
    assert found.file(("engine", "record")) == tmp_path / "r"
    again = loaded(HEAD + "extends: shared/base.yaml\n", "model.chat_template=u.jinja", choose=lambda *_: ("",))
    assert again.file(("model", "chat_template")) == tmp_path / "u.jinja", "an option means the manifest's folder"
    assert again.file(("engine", "record")) == shared / "sub/r", "a profile means the folder of its file"


def test_a_link_to_a_manifest_means_the_folder_of_the_manifest(loaded: Load, tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap like this: each name links into a folder that is replaced as one unit."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/m.yaml").write_text(HEAD + "extends: base.yaml\n")
    (tmp_path / "data/base.yaml").write_text("model: {source: {path: demo}}\n")
    (tmp_path / "m.yaml").symlink_to("data/m.yaml")
    found = loaded((tmp_path / "data/m.yaml").read_text())
    assert found.file(("model", "source", "path")) == tmp_path / "data/demo"


def test_relative_paths_in_a_base_start_at_its_folder(loaded: Load, tmp_path: Path) -> None:
    """With the real demo model: checkpoint, template, secret and recording resolve to the paths that the base
    intends."""
    demo = Path(__file__).resolve().parents[4] / "manifests/demo"
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/demo").symlink_to(demo)
    (tmp_path / "shared/t.jinja").write_text("{{ messages }}")
    (tmp_path / "shared/keys").write_text("key\n")
    base = (
        "model: {source: {path: demo}, chat_template: t.jinja}\nendpoints: {api_keys: k}\nsecrets: {k: {file: keys}}\n"
    )
    loaded(HEAD + "extends: shared/base.yaml\n", files={"shared/base.yaml": base + "engine: {record: r.log}\n"})
    found = validate(Given(tmp_path / "m.yaml"))
    assert found.engines[0].model.path == str(demo) and found.engines[0].record == str(tmp_path / "shared/r.log")
    assert found.gateway.chat_template == str(tmp_path / "shared/t.jinja")
    assert found.gateway.api_keys is not None and found.gateway.api_keys.file == str(tmp_path / "shared/keys")


def test_a_mistake_of_a_base_that_two_files_extend_is_reported_once(refused: Refuse) -> None:
    files = {"a.yaml": "extends: base.yaml\n", "b.yaml": "extends: base.yaml\n"}
    for base, place in (("endpoints: {docs: no}\n", "1:19"), ("endpoints: {port:80}\nlimits:\n\tx: 1\n", "3:1")):
        problems = refused(HEAD + MODEL + "extends: [a.yaml, b.yaml]\n", files={**files, "base.yaml": base})
        assert [one.partition(": ")[0] for one in problems] == [f"base.yaml:{place}"]
