"""`slipway serve` without MANIFEST: the mounted manifest, the hosting platform's model and port, or the demo."""

from pathlib import Path

import pytest

from appliance.cli.default_manifest import Found, demo, find
from appliance.cli.main import COMMANDS, main, with_command
from appliance.config.hosting_platform import detect
from appliance.config.problems import Refused
from appliance.config.settings import Option, load


def mount(root: Path, folder: str) -> Path:
    """A folder that the platform fills, with something that is recognised as a checkpoint."""
    path = root / folder.lstrip("/")
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def found(root: Path, *options: Option, **environ: str) -> Found:
    return find(environ, options, (), root)


def port(one: Found) -> int:
    return load(one.given).manifest.endpoints.port


def test_serve_without_arguments_serves_the_demo_and_prints_the_reason(tmp_path):
    one = found(tmp_path)
    assert one.given.manifest == demo() and demo().is_file() and port(one) == 8000
    assert any("serving the demo" in note and "no MANIFEST argument" in note for note in one.notes)


def test_the_mounted_manifest_has_precedence_over_a_platform(tmp_path):
    mount(tmp_path, "/opt/ml/model")
    (tmp_path / "manifest.yaml").write_text("apiVersion: slipway/v2\nmodel: {source: {path: /models/x}}\n")
    one = found(tmp_path, SAGEMAKER_BIND_TO_PORT="8443")
    assert one.given.manifest == tmp_path / "manifest.yaml" and not one.given.text
    assert port(one) == 8443 and load(one.given).origin(("endpoints", "port")) == "SAGEMAKER_BIND_TO_PORT"
    assert any("SageMaker detected" in note and "port 8443" in note for note in one.notes)


def test_a_configured_port_has_precedence_over_the_platform_port(tmp_path):
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text("apiVersion: slipway/v2\nmodel: {source: {path: /models/x}}\nendpoints: {port: 9001}\n")
    assert port(found(tmp_path, PORT="7000")) == 9001
    manifest.unlink()
    assert port(found(tmp_path, PORT="7000", SLIPWAY__ENDPOINTS__PORT="9002")) == 9002
    assert port(found(tmp_path, Option("--port", "endpoints.port", "9003"), PORT="7000")) == 9003
    mount(tmp_path, "/mnt/models")
    assert port(found(tmp_path, Option("--port", "endpoints.port", "9004"), PORT="7000")) == 9004


@pytest.mark.parametrize(
    ("name", "mounted", "environ", "kind", "number"),
    [
        ("SageMaker", "/opt/ml/model", {}, "sagemaker", 8080),
        ("SageMaker", None, {"SAGEMAKER_BIND_TO_PORT": "8443"}, "sagemaker", 8443),
        ("SageMaker", "/opt/ml/model", {"PORT": "1"}, "sagemaker", 8080),
        ("Vertex AI", None, {"AIP_STORAGE_URI": "gs://b/m", "AIP_HTTP_PORT": "8081"}, "vertex", 8081),
        ("Vertex AI", None, {"AIP_STORAGE_URI": "gs://b/m", "AIP_MODE": "PREDICTION"}, "vertex", 8080),
        ("KServe", "/mnt/models", {}, "path", 8080),
        ("KServe", "/mnt/models", {"PORT": "7001"}, "path", 7001),
        ("Azure ML", "/var/azureml-app/m", {"AZUREML_MODEL_DIR": "/var/azureml-app/m"}, "path", 8000),
    ],
)
def test_a_platforms_model_is_served_on_its_port(tmp_path, name, mounted, environ, kind, number):
    if mounted:
        mount(tmp_path, mounted)
    one = found(tmp_path, **environ)
    manifest = load(one.given).manifest
    assert manifest.model.source.kind == kind and manifest.endpoints.port == number
    if kind == "path":
        assert manifest.model.source.path == str(tmp_path / mounted.lstrip("/"))
    text = "\n".join(one.notes)
    assert f"{name} detected" in text and f"port {number}" in text and f"{kind}:" in text


def test_a_checkpoint_in_the_only_subfolder_is_found(tmp_path):
    """Azure ML and KServe keep the folder that was registered or downloaded."""
    inner = mount(tmp_path, "/mnt/models/qwen3")
    (tmp_path / "mnt/models/logs").mkdir()
    assert load(found(tmp_path).given).manifest.model.source.path == str(inner)


def test_a_platform_without_a_model_only_sets_the_port(tmp_path):
    for environ in ({"PORT": "8085"}, {"AIP_HTTP_PORT": "8085"}):
        one = found(tmp_path, **environ)
        assert one.given.manifest == demo() and port(one) == 8085


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:80", "0", "65536", "-1", "8080 ", "٨"])
def test_a_wrong_port_is_refused_with_its_variable(tmp_path, text):
    with pytest.raises(Refused, match=r"^PORT: .*must be a whole number from 1 to 65535"):
        detect({"PORT": text}, tmp_path)


def test_nothing_is_detected_on_an_ordinary_machine(tmp_path):
    assert detect({"HOME": "/root", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) is None


def test_a_manifest_in_place_of_a_command_is_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    for word in ("m.yaml", "dir/m", "/m y.yaml", "x.json", "there"):
        assert with_command([word, "--port", "9"]) == ["serve", word, "--port", "9"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_remains_itself_though_a_file_has_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    assert with_command([name, "x"]) == [name, "x"]


def test_a_misspelt_command_is_not_read_as_a_manifest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["chekc", "m.yaml"])
    assert ended.value.code == 2 and "did you mean check?" in capsys.readouterr().err
    assert with_command([]) == [] and with_command(["--version"]) == ["--version"]
