"""An executor that another package registers replaces functions of torch, also attention over latents."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from appliance.config.settings import Given
from appliance.hardware.described import hardware
from appliance.planning.validate import Refused, validate
from engine.api.errors import ConfigError
from engine.llm import LLM, Params
from engine.lowering.executors import executor_names, load_functions
from tests.engine.layers.families import random_family, save_family

TOY = Path(__file__).resolve().parents[1] / "toy_executor.py"
SMALL = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1, "max_running": 4}
GREEDY = Params(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path with an installed distribution, whose executors are `toy` and some that are unusable."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "toy_executor", raising=False)
    info = tmp_path / "site" / "toy_executor-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-executor\nVersion: 1.0\n")
    values = {"toy": "EXECUTOR", "list": "CALLS", "gone": "NOTHING"}
    lines = [f"{name} = toy_executor:{value}\n" for name, value in values.items()]
    (info / "entry_points.txt").write_text(f"[slipway.executors]\n{''.join(lines)}")
    shutil.copy(TOY, tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize(("name", "op"), [("youtu-odd", "AttendLatent"), ("glm-odd", "Attend")])
def test_its_functions_replace_those_of_torch(name: str, op: str, site: Path, tmp_path: Path) -> None:
    path, prompts = tmp_path / name, [[1 + i for i in range(count)] for count in (5, 11)]
    save_family(name, random_family(name), path)
    toy = importlib.import_module("toy_executor")
    toy.CALLS.clear()
    torch_alone = LLM(path, **SMALL, kernels="torch")
    plain, other_prompt = torch_alone.generate(prompts, GREEDY), [[7] * 9]
    with_attention = torch_alone.generate(other_prompt, GREEDY)
    assert not toy.CALLS
    engine = LLM(path, **SMALL, kernels="torch", executor="toy")
    found = engine.generate(prompts, GREEDY)
    assert set(toy.CALLS) == {op}
    assert [one.ids for one in found] == [one.ids for one in plain]
    toy.ZEROS.append(True)
    without = engine.generate(other_prompt, GREEDY)
    toy.ZEROS.clear()
    assert [one.logprobs for one in without] != [one.logprobs for one in with_attention]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "no installed package has this executor; there are gone, list, toy"),
        ("gone", "toy_executor:NOTHING of the package toy-executor cannot be imported"),
        ("list", "is not a mapping from operations to functions"),
    ],
)
def test_an_unusable_executor_is_one_message(name: str, words: str, site: Path) -> None:
    assert executor_names() == ("gone", "list", "toy")
    with pytest.raises(ConfigError, match=words):
        load_functions(name)


def test_functions_of_other_things_are_refused(site: Path) -> None:
    (site / "toy_executor.py").write_text("EXECUTOR = {int: print}\n")
    with pytest.raises(ConfigError, match=r"has a function for <class .int.>, which is not an operation"):
        load_functions("toy")


@pytest.mark.parametrize(
    ("hardware_keys", "words"),
    [
        ("executor: none, kernels: torch", "hardware.executor: none: no installed package has this executor"),
        ("executor: toy, kernels: avx2", "hardware.executor: replaces functions of torch, and avx2 kernels are used"),
    ],
)
def test_the_plan_refuses_an_executor_without_effect(
    hardware_keys: str, words: str, site: Path, tmp_path: Path
) -> None:
    demo = Path(__file__).resolve().parents[3] / "manifests" / "demo"
    path = tmp_path / "m.yaml"
    text = "apiVersion: slipway/v2\nmodel: {source: {path: %s}}\nhardware: {%s}\n"
    path.write_text(text % (demo, hardware_keys))
    with pytest.raises(Refused) as caught:
        validate(Given(path), hardware("epyc:2:8GiB"))
    assert words in str(caught.value)
    path.write_text(text % (demo, "executor: toy, kernels: torch"))
    plan = validate(Given(path), hardware("epyc:2:8GiB"))
    assert plan.engines[0].hardware.executor == "toy"
