"""`slipway render`: files as expected (golden/), objects against Kubernetes' schema, and values of the plan and of the
manifest in them."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from appliance.cli import arguments
from appliance.cli.main import main
from appliance.cli.render import TARGETS
from appliance.config import exits
from appliance.config.settings import Given, load
from appliance.deployment.compose import compose
from appliance.deployment.kserve import kserve
from appliance.deployment.kubernetes import kubernetes
from appliance.deployment.leaderworkerset import leaderworkerset
from appliance.deployment.ray import ray
from appliance.deployment.service import gibibytes
from appliance.deployment.systemd import layout as systemd_layout
from appliance.deployment.systemd import systemd
from appliance.server.admin.health import router as health
from tests.appliance.deployment.manifests import (
    CPU,
    GPU,
    PLATFORM,
    deployed,
    write_demo,
    write_manifest,
    write_random_adapter,
)
from tests.appliance.deployment.objects import check, check_schema, pods
from tests.manifests.shapes import make_checkpoint

GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = {"kubernetes": kubernetes, "kserve": kserve, "leaderworkerset": leaderworkerset}
ROLE = "arn:aws:iam::123456789012:role/slipway"
OPTIONS = {
    "sagemaker": ["--model-uri", "s3://models/demo", "--role", ROLE],
    "vertex": ["--model-uri", "gs://models/demo", "--parent", "projects/p/locations/europe-west4"],
}
PLATFORMS = ("sagemaker", "vertex", "azureml")


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUB_TOKEN", "hf-not-rendered")
    monkeypatch.setattr("appliance.deployment.systemd.python_folders", list)  # depends on the machine
    return write_demo(tmp_path, CPU)


def rendered(target: str, manifest: Path, folder: Path) -> dict[str, str]:
    """The files of a target by their paths, with stable paths of this machine."""
    image = ["--image", "slipway:1"] if "image" in TARGETS[target].options else []
    command = ["render", target, str(manifest), "--hardware", "cpu:4:16GiB", "-o", str(folder)]
    assert main([*command, *image, *OPTIONS.get(target, [])]) == 0
    names = {str(manifest.parent): "/work", str(Path(sys.executable).parent): "/opt/slipway/bin"}
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    # The bytes of a gzip file depend on the version of zlib; test_platforms.py reads them.
    texts = {name: re.sub(r"H4sI[\w+/=]+", "MANIFEST", text) for name, text in texts.items()}
    for old, new in names.items():
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return texts


# The dashboard repeats the table of metrics; tests/appliance/observability/test_alerts.py checks its content.
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "grafana"])
def test_files_are_the_expected_ones(target: str, on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if target in PLATFORMS:
        write_manifest(on_cpu.parent, PLATFORM)
    files = rendered(target, on_cpu, on_cpu.parent / "out")
    expected = GOLDEN / target
    assert files == {
        str(path.relative_to(expected)): path.read_text() for path in expected.rglob("*") if path.is_file()
    }
    printed = capsys.readouterr().out
    assert printed.split() == [str(on_cpu.parent / "out" / name) for name in _in_order(printed, files)]
    assert not any("not-rendered" in text for text in files.values())


def _in_order(printed: str, files: dict[str, str]) -> list[str]:
    return sorted(files, key=lambda name: printed.index(f"/{name}\n"))


def test_a_target_with_one_file_is_printed(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "kserve", str(on_cpu), "--hardware", "cpu:4:16GiB", "--image", "slipway:1"]) == 0
    assert capsys.readouterr().out == (GOLDEN / "kserve" / "kserve.yaml").read_text()


def test_alerts_have_the_limits_of_the_manifest_and_the_objectives(
    on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["render", "prometheus-rules", str(on_cpu), "--hardware", "cpu:4:16GiB", "--limits.max-waiting", "400"]
    assert main([*command, "--first-token", "5", "--objective", "0.999"]) == 0
    rules = {
        each.get("alert", each.get("record")): each["expr"]
        for group in yaml.safe_load(capsys.readouterr().out)["groups"]
        for each in group["rules"]
    }
    assert "[61s]" in rules["SlipwayNotReady"] and "> 100 and" in rules["SlipwayQueueGrowing"]
    assert "[600s]" in rules["SlipwayEngineCrashLoop"] and "> 0.0144 " in rules["SlipwayFirstTokenSlow"]
    assert 'le="5.0"' in rules["service:slipway_time_to_first_token_slow:ratio_rate1h"]


def test_the_dashboard_is_json(on_cpu: Path, tmp_path: Path) -> None:
    files = rendered("grafana", on_cpu, tmp_path / "out")
    assert json.loads(files["grafana.json"])["title"] == "Slipway: m"


def test_the_command_line_lists_all_targets() -> None:
    assert tuple(TARGETS) == arguments.TARGETS


@pytest.mark.parametrize("target", KUBERNETES)
def test_objects_follow_the_schemas_of_kubernetes(target: str, on_cpu: Path, tmp_path: Path) -> None:
    check(KUBERNETES[target](deployed(on_cpu, "cpu:4:16GiB")))
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(write_manifest(tmp_path, GPU), "h200x2")
    check(KUBERNETES[target](one))
    check(KUBERNETES[target](replace(one, tls=True, tls_files={"tls.crt": Path("/c.pem")}, cache=3 * 2**30, model="")))


def test_rendered_manifest_is_complete_and_valid(on_cpu: Path) -> None:
    text = deployed(on_cpu, "cpu:4:16GiB").files["manifest.yaml"]
    found = load(Given(Path("/etc/slipway/manifest.yaml"), (), {}, text=text)).manifest
    before = load(Given(on_cpu, (), {})).manifest
    assert (
        found.limits == before.limits and found.hardware == before.hardware and found.model.names == before.model.names
    )
    assert found.model.source.path == "/models/demo" and found.lifecycle.journal.folder == "/var/lib/slipway/journal"
    assert compose(deployed(on_cpu, "cpu:4:16GiB"))["configs"]["manifest"]["content"].count("a $$$${x} $$$$1") == 1


def test_gpus_ranks_and_defaults_are_in_the_objects(tmp_path: Path) -> None:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(write_manifest(tmp_path, GPU), "h200x2")
    for render in KUBERNETES.values():
        (pod,) = pods(render(one))
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
        assert pod["terminationGracePeriodSeconds"] == 60
    assert compose(one)["services"]["slipway"]["shm_size"] == "1g"
    encrypted = replace(one, tls=True, tls_files={"tls.crt": Path("/c.pem")}, cache=3 * 2**30, model="")
    text = yaml.safe_dump(kubernetes(encrypted))
    assert text.count("scheme: HTTPS") == 3 and f"secretName: {one.name}-tls" in text and "storage: 3Gi" in text
    assert compose(encrypted)["secrets"] == {"tls.crt": {"file": "/c.pem"}}


def test_amd_gpus_are_devices_and_groups_or_the_resource_of_their_plugin(tmp_path: Path) -> None:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(write_manifest(tmp_path, GPU), "mi300xx2")
    service = compose(one)["services"]["slipway"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"] and "deploy" not in service
    assert service["group_add"][0] == "video" and "stat -c %g /dev/kfd" in service["group_add"][1]
    assert service["environment"]["HIP_VISIBLE_DEVICES"] == "0,1"
    for render in KUBERNETES.values():
        (pod,) = pods(render(one))
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits["amd.com/gpu"] == 2 and "nvidia.com/gpu" not in limits
    unit = systemd(deployed(tmp_path / "m.yaml", "mi300xx2", systemd_layout("m")))["m.service"]
    assert "SupplementaryGroups=render video\n" in unit and "PrivateDevices" not in unit


def test_the_port_of_grpc_is_published(on_cpu: Path) -> None:
    one = replace(deployed(on_cpu, "cpu:4:16GiB"), grpc_port=8081)
    for render in (kubernetes, kserve, leaderworkerset):
        objects = render(one)
        check(objects)
        (pod,) = pods(objects)
        assert {"name": "grpc", "containerPort": 8081} in pod["containers"][0]["ports"]
        for each in objects:
            if each["kind"] == "Service":
                assert {"name": "grpc", "port": 8081, "targetPort": "grpc"} in each["spec"]["ports"]
    assert compose(one)["services"]["slipway"]["ports"] == ["8100:8100", "8081:8081"]


def test_probes_are_routes_of_the_service() -> None:
    paths = {route.path for route in health.routes}  # type: ignore[attr-defined]
    assert {"/ready", "/live"} <= paths
    text = (GOLDEN / "kubernetes" / "kubernetes.yaml").read_text()
    assert set(re.findall(r"path: (/[a-z]+)\n", text)) == {"/ready", "/live"}


def test_port_0_is_refused(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["render", "compose", str(on_cpu), "--hardware", "cpu:4:16GiB", "--endpoints.port", "0"]
    assert main(command) == exits.MANIFEST.number
    assert "a deployment needs a fixed one" in capsys.readouterr().err


WRONG = {
    ("helm",): "--output: helm has several files; name a folder for them",
    ("helm", "-o", "keys/x"): "--output: {folder}/keys/x/Chart.yaml cannot be written: Not a directory",
    ("compose", "--role", "x"): "--role: has no effect on compose",
    ("systemd", "-o", "out", "--image", "x"): "--image: has no effect on systemd",
    ("grafana", "--image", "x"): "--image: has no effect on grafana",
    ("grafana", "--first-token", "2"): "--first-token: 2 is not a bound of the histogram's buckets; use 0.75, 1, 2.5",
    ("prometheus-rules", "--objective", "99"): "--objective: 99 is not a share between 0 and 1, such as 0.99",
    ("compose", "--token", "0.1"): "--token: has no effect on compose",
    ("kserve", "--name", "A b"): "--name: A b is not a name of at most 53 lower-case letters, digits and dashes",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_option_is_refused(
    words: tuple[str, ...], on_cpu: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(on_cpu.parent)
    target, *options = words
    options = [str(on_cpu.parent / word) if word == "keys/x" else word for word in options]
    assert main(["render", target, str(on_cpu), "--hardware", "cpu:4:16GiB", *options]) == exits.MANIFEST.number
    assert WRONG[words].format(folder=on_cpu.parent) in capsys.readouterr().err


def test_no_more_cores_are_requested_than_the_machine_has(on_cpu: Path) -> None:
    assert [deployed(on_cpu, words).cpus for words in ("cpu:2:16GiB", "cpu:8:16GiB")] == [2, 3]


def test_a_ray_service_has_the_devices_of_the_plan_and_an_application(tmp_path: Path) -> None:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(write_manifest(tmp_path, GPU), "h200x2")
    objects = ray(replace(one, tls=True, tls_files={"tls.crt": Path("/c.pem")}))
    for each in objects:
        check_schema(each)
    service = objects[-1]["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    (deployment,) = application["deployments"]
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert deployment["ray_actor_options"]["num_gpus"] == container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert str(deployment["ray_actor_options"]["num_cpus"]) == container["resources"]["limits"]["cpu"]
    memory = {kind: each["memory"] for kind, each in container["resources"].items()}
    assert memory == dict.fromkeys(("requests", "limits"), f"{gibibytes(one.memory) + 2}Gi"), "2 GiB are Ray's"
    source = objects[0]["data"]["slipway_ray.py"]
    compile(source, "slipway_ray.py", "exec")
    assert (
        "SCHEME = 'https'" in source and '"/etc/slipway/manifest.yaml"' in source and application["route_prefix"] == "/"
    )
    assert "class Slipway" in source and deployment["name"] == "Slipway"


def with_adapters(manifest: Path) -> Path:
    """Add two adapters with equal labels and two folders of adapters to the manifest."""
    checkpoint = manifest.parent / "demo"
    for name in ("first", "second"):
        write_random_adapter(checkpoint, manifest.parent / name)
    text = manifest.read_text()
    adapters = "{name: a.b, path: first}, {name: a/b, path: second}"
    manifest.write_text(
        f"{text}adapters: [{adapters}]\nadapter_loading: {{max_active: 1, folders: [more, /models/own]}}\n"
    )
    (manifest.parent / "more").mkdir()
    return manifest


def test_adapters_are_mounted_below_models(on_cpu: Path) -> None:
    one, folder = deployed(with_adapters(on_cpu), "cpu:4:16GiB"), on_cpu.parent
    tree = yaml.safe_load(one.files["manifest.yaml"])
    assert [each["path"] for each in tree["adapters"]] == ["/models/adapters/a-b", "/models/adapters/a-b-1"]
    assert tree["adapter_loading"]["folders"] == ["/models/adapter-folders/0", "/models/own"]
    volumes = compose(one)["services"]["slipway"]["volumes"]
    assert f"{folder}/second:/models/adapters/a-b-1:ro" in volumes and f"{folder}/demo:/models/demo:ro" in volumes
    assert f"{folder}/more:/models/adapter-folders/0:ro" in volumes
    for render in KUBERNETES.values():
        (pod,) = pods(render(replace(one, model="")))
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    local = deployed(on_cpu, "cpu:4:16GiB", systemd_layout("m"))
    tree = yaml.safe_load(local.files["manifest.yaml"])
    assert [each["path"] for each in tree["adapters"]] == [str(folder / "first"), str(folder / "second")]
    unit = systemd(local)["m.service"]
    assert all(f"BindReadOnlyPaths={folder / name}" in unit.replace('"', "") for name in ("first", "second", "more"))


def test_a_draft_model_is_mounted_below_models(on_cpu: Path) -> None:
    shutil.copytree(on_cpu.parent / "demo", on_cpu.parent / "small")
    on_cpu.write_text(on_cpu.read_text() + "speculation: {method: draft, model: small}\n")
    one = deployed(on_cpu, "cpu:4:16GiB")
    assert yaml.safe_load(one.files["manifest.yaml"])["speculation"]["model"] == "/models/draft/small"
    assert f"{on_cpu.parent}/small:/models/draft/small:ro" in compose(one)["services"]["slipway"]["volumes"]


@pytest.mark.parametrize("target", PLATFORMS)
def test_platforms_refuse_local_adapters(target: str, on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = with_adapters(write_manifest(on_cpu.parent, PLATFORM))
    command = ["render", target, str(manifest), "--hardware", "cpu:4:16GiB", "-o", str(on_cpu.parent / "out")]
    image = ["--image", "slipway:1"] if "image" in TARGETS[target].options else []
    assert main([*command, *image, *OPTIONS.get(target, [])]) == exits.MANIFEST.number
    assert "give the adapters a uri in place of path" in capsys.readouterr().err
