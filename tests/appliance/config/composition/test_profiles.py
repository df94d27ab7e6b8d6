"""Hardware profiles in manifests: their values, positions and mistakes."""

from collections.abc import Callable

import pytest

from appliance.config.composition.profiles import Profile
from appliance.config.settings import Settings

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: /m}}\n"
TEXT = (
    HEAD
    + """\
limits: {max_stop: 1}
hardware:
  memory_share: 0.5
  profiles:
    - name: big
      match: {gpu: H200}
      set: {limits: {max_stop: 2, max_choices: 2}, hardware: {memory_share: 0.9, threads: 3}}
    - name: small
      match: {}
      set:
        limits:
          max_choices: 3
"""
)


def choosing(*reasons: str) -> Callable[[str, tuple[Profile, ...]], tuple[str, ...]]:
    return lambda device, profiles: reasons


def test_the_matching_profile_sets_otherwise_unset_keys(loaded: Load) -> None:
    found = loaded(TEXT, choose=choosing(""))
    limits, hardware = found.manifest.limits, found.manifest.hardware
    assert (limits.max_stop, limits.max_choices, hardware.memory_share, hardware.threads) == (1, 2, 0.5, 3)
    assert found.origin(("limits", "max_choices")) == "m.yaml:9:48 (profile big)"
    assert found.origin(("limits", "max_stop")) == "m.yaml:3:20"
    assert found.origin(("limits", "max_prompts")) == "default"
    assert found.layers == ("profile big (m.yaml:7:7)",)


def test_skipped_profiles_are_reported_with_reasons(loaded: Load) -> None:
    found = loaded(TEXT, choose=choosing("gpu: none", ""))
    assert found.manifest.limits.max_choices == 3
    assert found.origin(("limits", "max_choices")) == "m.yaml:14:24 (profile small)"
    assert found.layers == ("profile small (m.yaml:10:7)", "not profile big (m.yaml:7:7): gpu: none")


@pytest.mark.parametrize("choose", [None, choosing("a: b", "c: d")])
def test_without_a_match_there_are_defaults(loaded: Load, choose: object) -> None:
    found = loaded(TEXT, choose=choose)
    assert (found.manifest.limits.max_choices, found.origin(("limits", "max_choices"))) == (128, "default")
    notes = ("not profile big (m.yaml:7:7): a: b", "not profile small (m.yaml:10:7): c: d")
    assert found.layers == (notes if choose else ())


def test_the_profile_is_lower_than_extended_files_and_can_be_in_one(loaded: Load) -> None:
    files = {"base.yaml": TEXT.replace(HEAD, ""), "other.yaml": "limits: {max_choices: 7}\n"}
    found = loaded(HEAD + "extends: [other.yaml, base.yaml]\n", files=files, choose=choosing(""))
    assert found.manifest.limits.max_choices == 7 and found.origin(("hardware", "threads")).startswith("base.yaml:7:")


def test_profiles_are_a_list_so_a_higher_layer_replaces_all(loaded: Load) -> None:
    files = {"base.yaml": TEXT.replace(HEAD, "")}
    text = HEAD + "extends: base.yaml\nhardware: {profiles: [{name: x, match: {}, set: {limits: {max_stop: 9}}}]}\n"
    asked: list[str] = []

    def choose(device: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
        asked.extend(profile.name for profile in profiles)
        return ("",)

    loaded(text, files=files, choose=choose)
    assert asked == ["x"]


@pytest.mark.parametrize(
    ("text", "words", "environ", "device"),
    [
        ("", (), {}, "auto"),
        ("device: cpu", (), {}, "cpu"),
        ("device: ${D}", (), {"D": "cuda"}, "cuda"),
        ("device: cpu", ("hardware.device=cuda",), {}, "cuda"),
        ("", (), {"SLIPWAY__HARDWARE__DEVICE": "cpu"}, "cpu"),
    ],
)
def test_profile_selection_gets_the_device_of_higher_layers(
    loaded: Load, text: str, words: tuple[str, ...], environ: dict[str, str], device: str
) -> None:
    asked: list[str] = []

    def choose(device: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
        asked.append(device)
        return ("no",)

    profiles = "  profiles: [{name: p, match: {}, set: {}}]\n"
    loaded(HEAD + f"hardware:\n  {text or 'graphs: true'}\n{profiles}", *words, choose=choose, **environ)
    assert asked == [device]


def test_profile_selection_is_skipped_without_profiles(loaded: Load) -> None:
    def choose(device: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
        raise AssertionError("the machine is read only for a profile")

    loaded(HEAD, choose=choose)
    loaded(HEAD + "hardware: {profiles: []}\n", choose=choose)


def test_texts_of_a_profile_are_interpolated(loaded: Load) -> None:
    text = HEAD + "variables: {card: H200, most: 5}\nhardware:\n  profiles:\n  - name: p-${SITE:-x}\n"
    text += "    match: {gpu: '${var.card}', count: '${COUNT}'}\n    set: {limits: {max_stop: '${var.most}'}}\n"
    seen: list[Profile] = []

    def choose(device: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
        seen.extend(profiles)
        return ("",)

    found = loaded(text, choose=choose, COUNT="2")
    assert (seen[0].name, seen[0].match.gpu, seen[0].match.count) == ("p-x", "H200", 2)
    assert found.manifest.limits.max_stop == 5
    assert found.origin(("limits", "max_stop")) == "m.yaml:8:30 (profile p-x, ${var.most})"


# `⟪` marks where the message must point.
MISTAKES = [
    ("[{name: p, match: {}, set: {limits: {max_stop: ⟪0}}}]",
     "limits.max_stop: 0; must be a whole number of at least 1; in profile p"),
    ("[{name: p, match: {}, set: {⟪limit: {}}}]", "limit: unknown key"),
    ("[{name: p, match: {}, set: {endpoints: {docs: ⟪no}}}]", "endpoints.docs: no: YAML 1.1"),
    ("[{name: p, match: {}, set: {model: {source: {path: '⟪${var.no}'}}}}]", "model.source.path: ${var.no} is not set"),
    ("[{name: p, match: {}, set: {⟪extends: a}}]", "extends: a profile cannot set it; in profile p"),
    ("[{name: p, match: {}, set: {⟪variables: {}}}]", "variables: a profile cannot set it; in profile p"),
    ("[{name: p, match: {}, set: {⟪overlays: {}}}]", "overlays: a profile cannot set it; in profile p"),
    ("[{name: p, match: {}, set: {hardware: {⟪profiles: []}}}]",
     "hardware.profiles: a profile cannot set it; in profile p"),
    ("[{name: p, match: {}, set: ⟪5}]", "hardware.profiles[0].set: 5; must be a mapping with keys of the manifest"),
    ("[{name: p, match: {⟪gpus: H200}, set: {}}]",
     "hardware.profiles[0].match.gpus: unknown key; did you mean gpu?"),
    ("[{name: p, match: {count: ⟪0}, set: {}}]",
     'hardware.profiles[0].match.count: 0; must be any or a whole number or a range such as ">=2"'),
    ("[{name: p, match: {count: ⟪'2'}, set: {}}]", 'hardware.profiles[0].match.count: "2"; must be any or'),
    ("[{name: p, match: {memory: ⟪80GiB}, set: {}}]",
     'hardware.profiles[0].match.memory: "80GiB"; must be any or a range such as ">=80GB"; did you mean ">=80GiB"?'),
    ("[{name: p, match: {memory: ⟪'>=80'}, set: {}}]", 'hardware.profiles[0].match.memory: ">=80"; must be'),
    ("[{name: p, match: {cores: ⟪'8+'}, set: {}}]", "hardware.profiles[0].match.cores: "),
    ("[{name: p, match: {cores: ⟪'=8'}, set: {}}]", "hardware.profiles[0].match.cores: "),
    ("[{name: p, match: {device: ⟪gpu}, set: {}}]",
     'hardware.profiles[0].match.device: "gpu"; must be one of any, cpu, cuda; did you mean cuda?'),
    ("[{name: p, match: {kernels: ⟪avx}, set: {}}]", "did you mean avx2?"),
    ("[{name: p, match: {gpu: ⟪''}, set: {}}]", 'hardware.profiles[0].match.gpu: ""; must be text'),
    ("[{name: p, match: {gpu:⟪ }, set: {}}]", "hardware.profiles[0].match.gpu: empty; must be text"),
    ("[{name: p, match: {gpu: '⟪${NO}'}, set: {}}]", "hardware.profiles[0].match.gpu: ${NO} is not set"),
    ("[⟪{name: p, set: {}}]", "hardware.profiles[0].match: missing; must be a mapping with device, gpu"),
    ("[⟪{match: {}, set: {}}]", "hardware.profiles[0].name: missing; must be text such as h200"),
    ("[{name: ⟪P, match: {}, set: {}}]", 'hardware.profiles[0].name: "P"; must be text such as h200'),
    ("[{name: p, match: {}, set: {}}, {name: ⟪p, match: {}, set: {}}]",
     "hardware.profiles[1].name: duplicate profile name p"),
    ("[{name: p, match: {}, set: {}, ⟪when: 1}]", "hardware.profiles[0].when: unknown key"),
    ("[⟪p]", 'hardware.profiles[0]: "p"; must be a mapping with name, match, set'),
    ("⟪{p: {}}", "hardware.profiles: a mapping with p; must be a list of mappings"),
    ("⟪null", "hardware.profiles: empty; must be a list of mappings"),
]  # fmt: skip


@pytest.mark.parametrize(("profiles", "problem"), MISTAKES)
@pytest.mark.parametrize("choose", [None, choosing("")])
def test_an_invalid_profile_is_an_error_even_if_not_selected(
    refused: Refuse, profiles: str, problem: str, choose: object
) -> None:
    before, _, after = f"hardware: {{graphs: true, profiles: {profiles}}}\n".partition("⟪")
    problems = refused(HEAD + before + after, choose=choose)
    assert len(problems) == 1 and problem in problems[0], problems
    assert problems[0].startswith(f"m.yaml:3:{len(before) + 1}: "), problems


def test_mistakes_in_match_and_set_of_profiles_are_reported_together(refused: Refuse) -> None:
    text = HEAD + "hardware:\n  profiles:\n  - {name: a, match: {cores: x}, set: {limits: {max_stop: 0}}}\n"
    text += "  - {name: b, match: {}, set: {limits: {max_stop: 0}}}\n  threads: x\n"
    assert [problem.split(" ")[0] for problem in refused(text)] == [
        "m.yaml:5:30:",
        "m.yaml:5:59:",
        "m.yaml:6:51:",
        "m.yaml:7:12:",
    ]


def test_a_value_of_a_profile_is_judged_even_where_a_higher_layer_hides_it(refused: Refuse) -> None:
    text = HEAD + "limits: {max_stop: 1}\nhardware: {profiles: [{name: p, match: {}, set: {limits: {max_stop: 0}}}]}\n"
    (problem,) = refused(text, choose=choosing(""))
    assert problem.startswith("m.yaml:4:69: limits.max_stop: 0; ") and problem.endswith("in profile p")


def test_profiles_of_an_overlay_that_is_not_chosen_are_judged(refused: Refuse) -> None:
    text = HEAD + "overlays:\n  a:\n    hardware: {profiles: [{name: p, match: {cores: x}, set: {zzz: 1}}]}\n"
    assert [problem.split(": ")[1] for problem in refused(text)] == ["hardware.profiles[0].match.cores", "zzz"]


def test_variables_of_a_profile_are_required_only_if_it_is_selected(loaded: Load, refused: Refuse) -> None:
    text = HEAD + "hardware:\n  profiles:\n    - {name: p, match: {}, set: {endpoints: {host: '${HOST}'}}}\n"
    assert loaded(text, choose=lambda device, profiles: ("no",)).manifest.endpoints.host == "0.0.0.0"
    (problem,) = refused(text, choose=lambda device, profiles: ("",))
    assert "endpoints.host: ${HOST} is not set; " in problem and problem.endswith("in profile p")
