"""Where `slipway serve` without MANIFEST finds a manifest: variables, folders of SageMaker, serving.properties."""

import base64
import gzip
import hashlib
import textwrap

import pytest

from appliance.config.problems import Refused
from appliance.config.settings import load
from tests.appliance.cli.test_default_manifest import find, found, port

TEXT = "apiVersion: slipway/v2\nmodel: {source: {path: x}, names: [named]}\n"


def chunks(content: bytes, size: int = 40) -> dict[str, str]:
    text = base64.b64encode(content).decode()
    return {f"SLIPWAY_MANIFEST_B64_{index:02}": part for index, part in enumerate(textwrap.wrap(text, size))}


@pytest.mark.parametrize("content", [TEXT.encode(), gzip.compress(TEXT.encode())], ids=["plain", "gzip"])
def test_chunks_in_variables_are_a_manifest(tmp_path, content):
    given = chunks(content)
    assert len(given) > 1
    one = found(tmp_path, SAGEMAKER_BIND_TO_PORT="8081", **given)
    assert load(one.given).manifest.model.names == ("named",) and port(one) == 8081
    given.pop("SLIPWAY_MANIFEST_B64_00")
    with pytest.raises(Refused, match="SLIPWAY_MANIFEST_B64_00: is not set"):
        found(tmp_path, **given)


@pytest.mark.parametrize(
    "content", [b"\xff\xff", gzip.compress(TEXT.encode())[:-9], gzip.compress(bytes(2**21))], ids=["text", "cut", "big"]
)
def test_damaged_chunks_are_refused(tmp_path, content):
    with pytest.raises(Refused, match="SLIPWAY_MANIFEST_B64_00: "):
        found(tmp_path, **chunks(content, 10**6))


def test_a_named_manifest_precedes_mounted_ones_and_its_checksum_is_verified(tmp_path):
    file = tmp_path / "other" / "m.yaml"
    file.parent.mkdir()
    file.write_text(TEXT)
    (tmp_path / "manifest.yaml").write_text(TEXT.replace("named", "mounted"))
    right = hashlib.sha256(TEXT.encode()).hexdigest()
    for more in ({}, {"SLIPWAY_MANIFEST_SHA256": right}):
        one = found(tmp_path, SLIPWAY_MANIFEST=str(file), **more)
        assert load(one.given).manifest.model.names == ("named",)
        assert load(one.given).file(("model", "source", "path")) == file.parent / "x"
    with pytest.raises(Refused, match=f"SHA-256 {right}, not 00"):
        found(tmp_path, SLIPWAY_MANIFEST=str(file), SLIPWAY_MANIFEST_SHA256="00")
    with pytest.raises(Refused, match="requires the SHA-256"):
        found(tmp_path, SLIPWAY_MANIFEST="http://127.0.0.1:1/m.yaml")
    with pytest.raises(Refused, match="use a path, or https"):
        found(tmp_path, SLIPWAY_MANIFEST="ftp://127.0.0.1:1/m.yaml")
    with pytest.raises(Refused, match="both name a manifest"):
        found(tmp_path, SLIPWAY_MANIFEST=str(file), **chunks(TEXT.encode()))


@pytest.mark.parametrize("folder", ["opt/ml/model", "opt/ml/additional-model-data-sources/config"])
def test_a_manifest_in_a_folder_of_sagemaker_is_served(tmp_path, folder):
    """Relative paths start at the folder."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "manifest.yaml").write_text(TEXT)
    (tmp_path / "opt/ml/model").mkdir(parents=True, exist_ok=True)
    one = found(tmp_path)
    assert one.given.manifest == tmp_path / folder / "manifest.yaml" and port(one) == 8080
    assert load(one.given).file(("model", "source", "path")) == tmp_path / folder / "x"


def test_serving_properties_precede_option_variables(tmp_path):
    folder = tmp_path / "opt/ml/model"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text(
        "engine=Python\n# option.max_model_len=1\noption.max_model_len = 512\noption.model_id=org/x\n"
    )
    one = find({"OPTION_MAX_MODEL_LEN": "64", "SAGEMAKER_REGION": "x"}, (), (), tmp_path)
    settings = load(one.given)
    assert settings.manifest.model.max_context == 512 and settings.origin(("model", "max_context")).startswith("OPTION")
    assert one.given.environ["OPTION_MODEL_ID"] == "org/x" and settings.manifest.model.source.kind == "sagemaker"


def test_variables_of_other_servers_name_the_model_without_a_manifest(tmp_path):
    one = found(tmp_path, SM_VLLM_MODEL="org/x")
    assert load(one.given).manifest.model.source.huggingface.repo == "org/x" and port(one) == 8080
    one = found(tmp_path, NIM_MODEL_NAME="/models/x", NIM_SERVER_PORT="9000")
    assert load(one.given).manifest.model.source.path == "/models/x" and port(one) == 9000
    assert any("NVIDIA NIM detected by NIM_MODEL_NAME" in note for note in one.notes)
