"""Grace period of each platform before SIGKILL, and the drain time derived from it."""

from pathlib import Path

import pytest

from appliance.config.platform import Platform, platform
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.planning.plan import Plan
from appliance.planning.validate import validate

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo.yaml"
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "grace_s", "balances", "source"),
    [
        ({}, 10.0, False, "docker stop"),
        (KUBERNETES, 30.0, True, "Kubernetes"),
        (KUBERNETES | {"SLIPWAY_GRACE": "90"}, 90.0, True, "SLIPWAY_GRACE"),
        ({"SLIPWAY_GRACE": "120s"}, 120.0, False, "SLIPWAY_GRACE"),
        ({"SAGEMAKER_BIND_TO_PORT": "8080"}, 30.0, True, "SageMaker"),
    ],
)
def test_the_grace_of_platforms(
    tmp_path: Path, environ: dict[str, str], grace_s: float, balances: bool, source: str
) -> None:
    """Docker, Kubernetes, SageMaker, and an override by a variable"""
    found = platform(environ, tmp_path / "no model")
    assert (found.grace_s, found.balances) == (grace_s, balances)
    assert source in found.source


def test_a_model_in_the_sagemaker_folder_detects_sagemaker(tmp_path: Path) -> None:
    assert platform({}, tmp_path).grace_s == 30.0
    assert platform({}, tmp_path / "absent") == Platform()


def planned(environ: dict[str, str], *sets: str) -> Plan:
    options = tuple(Option("--set", *one.split("=", 1)) for one in sets)
    return validate(Given(DEMO, options, environ))


@pytest.mark.parametrize(
    ("environ", "sets", "drain_s", "linger_s"),
    [
        ({}, (), 8.0, 0.0),
        (KUBERNETES, (), 28.0, 5.0),
        (KUBERNETES | {"SLIPWAY_GRACE": "10"}, (), 8.0, 2.0),
        ({"SLIPWAY_GRACE": "1"}, (), 0.0, 0.0),
        (KUBERNETES, ("lifecycle.drain=500ms", "lifecycle.linger=0s"), 0.5, 0.0),
        ({}, ("lifecycle.linger=3s",), 8.0, 3.0),
    ],
)
def test_the_drain_ends_two_seconds_before_the_kill(
    environ: dict[str, str], sets: tuple[str, ...], drain_s: float, linger_s: float
) -> None:
    found = planned(environ, *sets)
    assert (found.gateway.drain_s, found.gateway.drain_linger_s) == (drain_s, linger_s)
    shown = {one.key: one for one in found.effective}
    assert shown["lifecycle.drain"].resolved == drain_s
    given = any(one.startswith("lifecycle.drain") for one in sets)
    assert bool(shown["lifecycle.drain"].reason) == (not given)


def test_a_linger_longer_than_the_drain_is_refused() -> None:
    with pytest.raises(Refused, match=r"lifecycle.linger.*longer than lifecycle.drain, which is 8 s"):
        planned({}, "lifecycle.linger=9s")


def test_a_grace_that_is_no_time_is_refused() -> None:
    with pytest.raises(Refused, match="SLIPWAY_GRACE.*seconds, such as 60 or 60s"):
        planned({"SLIPWAY_GRACE": "a minute"})
