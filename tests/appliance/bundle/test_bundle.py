"""Bundles: contents, verification, signatures and the bill of materials."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from appliance.bundle.index import LOCK, MANIFEST, SBOM, BundleError, Index, decode, encode
from appliance.bundle.sbom import sbom, system_components
from appliance.checkpoints.digest import Digest
from appliance.cli.main import main
from appliance.config import exits
from tests.appliance.deployment.manifests import write_random_adapter

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "manifests" / "demo.yaml"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A signed bundle of the demo with its key next to it."""
    folder = tmp_path_factory.mktemp("bundle")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "sbom.json").write_text("{}")
    assert write(folder / "demo.bundle.tar", "--sign", str(folder / "key"), "--image", "registry/slipway:1") == 0
    return folder / "demo.bundle.tar"


def write(path, *options):
    sbom = ["--sbom", str(path.parent / "sbom.json")]
    return main(["bundle", str(DEMO), "-o", str(path), *sbom, *options])


def unpack(path, out, *options):
    return main(["unpack", str(path), "-o", str(out), *options])


def rewritten(path, target, change):
    """The archive with members changed by `change`: a function of name and data that returns both, or None."""
    with tarfile.open(path) as old, tarfile.open(target, "w") as new:
        for member in old.getmembers():
            changed = change(member.name, old.extractfile(member).read())
            if changed is not None:
                member.name, data = changed
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
    return target


def test_an_unpacked_bundle_is_a_manifest_with_a_lock_that_holds(bundle, tmp_path, capsys):
    assert unpack(bundle, tmp_path / "out", "--public-key", str(bundle.parent / "key.pub")) == 0
    said = capsys.readouterr().out
    assert "files verified" in said and "registry/slipway:1" in said
    manifest = yaml.safe_load((tmp_path / "out" / "manifest.yaml").read_text())
    assert manifest["model"] == {"source": {"path": "model"}, "names": ["demo"], "lock": "require"}
    assert main(["lock", "--check", str(tmp_path / "out" / "manifest.yaml")]) == 0
    index = json.loads((tmp_path / "out" / "slipway-bundle.json").read_text())
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {*index["files"], "slipway-bundle.json"}
    for name, digest in index["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert digest == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}, name


def test_equal_inputs_give_equal_archives(bundle, tmp_path):
    for name in ("a.tar", "b.tar"):
        (tmp_path / "sbom.json").write_text("{}")
        assert write(tmp_path / name) == 0
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES = {
    "a weight": (
        lambda name, data: (name, flipped(data) if name.endswith("safetensors") else data),
        "model.safetensors",
    ),
    "the manifest": (lambda name, data: (name, flipped(data) if name == "manifest.yaml" else data), "manifest.yaml"),
    "a longer file": (lambda name, data: (name, data + b" " if name == "manifest.lock" else data), "manifest.lock"),
    "a missing file": (lambda name, data: None if name == "model/config.json" else (name, data), "model/config.json"),
    "another name": (lambda name, data: (name.replace("config", "c0nfig"), data), "is not in the index"),
    "a path outside": (lambda name, data: (name.replace("manifest.lock", "../x"), data), "is not in the index"),
    "the index": (
        lambda name, data: (name, data.replace(b'"model/', b'"../m/') if "json" in name else data),
        "not a name",
    ),
    "no index": (lambda name, data: None if name == "slipway-bundle.json" else (name, data), "first file"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_bundle_is_refused_by_name_and_leaves_nothing(what, bundle, tmp_path, capsys):
    change, said = CHANGES[what]
    path = rewritten(bundle, tmp_path / "changed.tar", change)
    assert unpack(path, tmp_path / "out") == exits.INTEGRITY.number
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and [one.name for one in tmp_path.iterdir()] == ["changed.tar"]


def test_a_link_or_truncated_archive_is_refused(bundle, tmp_path, capsys):
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        link = tarfile.TarInfo("slipway-bundle.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert unpack(tmp_path / "link.tar", tmp_path / "out") == exits.INTEGRITY.number
    assert "only regular files" in capsys.readouterr().err
    (tmp_path / "cut.tar").write_bytes(bundle.read_bytes()[:3_000_000])
    assert unpack(tmp_path / "cut.tar", tmp_path / "out") == exits.INTEGRITY.number
    assert not (tmp_path / "out").exists()


def test_a_required_signature_must_be_of_the_key_and_of_this_index(bundle, tmp_path, capsys):
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    key = str(bundle.parent / "key.pub")
    assert unpack(bundle, tmp_path / "a", "--public-key", f"{other}.pub") == exits.INTEGRITY.number
    assert "signature is not valid" in capsys.readouterr().err
    unsigned = rewritten(bundle, tmp_path / "u.tar", lambda name, data: None if name.endswith("sig") else (name, data))
    assert unpack(unsigned, tmp_path / "b", "--public-key", key) == exits.INTEGRITY.number
    assert "is not signed" in capsys.readouterr().err
    # An index that was changed together with its file has valid digests, but not the signature.
    image = rewritten(bundle, tmp_path / "i.tar", lambda name, data: (name, data.replace(b"slipway:1", b"slipway:2")))
    assert unpack(image, tmp_path / "c", "--public-key", key) == exits.INTEGRITY.number
    assert unpack(image, tmp_path / "c") == 0, "without a key only digests are compared"


def test_a_key_of_another_kind_and_existing_folders_are_one_message(bundle, tmp_path, capsys):
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "ec"], check=True)
    (tmp_path / "sbom.json").write_text("{}")
    assert write(tmp_path / "x.tar", "--sign", str(tmp_path / "ec")) == exits.MANIFEST.number
    assert "Ed25519" in capsys.readouterr().err and not (tmp_path / "x.tar").exists()
    assert unpack(bundle, tmp_path) == exits.MANIFEST.number
    assert "exists" in capsys.readouterr().err
    assert unpack(tmp_path / "nothing.tar", tmp_path / "y") == exits.MANIFEST.number
    assert "no such file" in capsys.readouterr().err
    assert main(["sbom", "-o", str(tmp_path / "none" / "sbom.json")]) == exits.MANIFEST.number
    assert "no such file" in capsys.readouterr().err


def indexed(files):
    files = {**dict.fromkeys((MANIFEST, LOCK, SBOM), Digest(0, "0" * 64)), **dict.fromkeys(files, Digest(0, "0" * 64))}
    return encode(Index(files))


def test_names_of_checkpoints_are_kept_and_others_refused():
    good = ("model/_shard (1) of 2.safetensors", "model/1_Pooling/config.json", "model/Qwen 3 – Q4.gguf")
    assert decode(indexed(good)).files.keys() >= set(good)
    for name in ("/etc/x", "../x", "model/../x", "model/./x", "model//x", "model/", "", "model/.x", "a\\b", "a\nb"):
        with pytest.raises(BundleError, match="not a name"):
            decode(indexed([name]))


def test_a_name_that_could_not_be_unpacked_is_not_bundled(tmp_path, capsys):
    """The checkpoint's index of shards names a hidden file."""
    demo, model = ROOT / "manifests" / "demo", tmp_path / "model"
    shutil.copytree(demo, model)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").rename(model / ".hidden.safetensors")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    names = {name: ".hidden.safetensors" for name in header if name != "__metadata__"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "sbom.json").write_text("{}")
    words = ["bundle", str(model), "-o", str(tmp_path / "x.tar"), "--sbom", str(tmp_path / "sbom.json")]
    assert main(words) == exits.INTEGRITY.number
    assert "model/.hidden.safetensors" in capsys.readouterr().err and not (tmp_path / "x.tar").exists()


def blobs(path):
    """The blobs of an image layout, whose names are compared with their digests."""
    with tarfile.open(path) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive.getmembers()}
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files.pop("index.json"))
    found = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in files.values()}
    assert {f"blobs/{digest.replace(':', '/')}" for digest in found} == files.keys()
    return index, found


def test_an_oci_image_has_the_bundle_as_its_layer(bundle, tmp_path, capsys):
    image = tmp_path / "demo.oci.tar"
    (tmp_path / "sbom.json").write_text("{}")
    assert write(image, "--oci") == 0 and [one.name for one in tmp_path.glob("demo*")] == [image.name]
    index, found = blobs(image)
    (descriptor,) = index["manifests"]
    manifest = json.loads(found[descriptor["digest"]])
    (layer,) = manifest["layers"]
    for one in (descriptor, manifest["config"], layer):
        assert one["size"] == len(found[one["digest"]])
    kinds = [one["mediaType"].removeprefix("application/vnd.oci.image.") for one in (manifest["config"], layer)]
    assert kinds == ["config.v1+json", "layer.v1.tar"] and descriptor["mediaType"] == manifest["mediaType"]
    config = json.loads(found[manifest["config"]["digest"]])
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"]]} and config["os"] == "linux"
    with tarfile.open(fileobj=io.BytesIO(found[layer["digest"]])) as archive:
        assert {"manifest.yaml", "model/config.json"} <= set(archive.getnames())
    assert unpack(image, tmp_path / "out") == 0
    assert main(["lock", "--check", str(tmp_path / "out" / "manifest.yaml")]) == 0
    capsys.readouterr()
    # Other programs write the members in another order.
    with tarfile.open(image) as old, tarfile.open(tmp_path / "sorted.oci.tar", "w") as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            new.addfile(member, old.extractfile(member))
    assert unpack(tmp_path / "sorted.oci.tar", tmp_path / "again") == 0
    cut = rewritten(image, tmp_path / "cut.oci.tar", lambda name, data: None if len(data) > 10**6 else (name, data))
    assert unpack(cut, tmp_path / "none") == exits.INTEGRITY.number
    assert "is not in the archive" in capsys.readouterr().err
    loop = tarfile.TarInfo("index.json")
    loop.type, loop.linkname = tarfile.SYMTYPE, "index.json"
    with tarfile.open(tmp_path / "loop.oci.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("oci-layout"))
        archive.addfile(loop)
    assert unpack(tmp_path / "loop.oci.tar", tmp_path / "none") == exits.INTEGRITY.number
    assert "index.json: is not a file" in capsys.readouterr().err


def test_an_image_archive_is_a_part_with_its_digest(tmp_path, capsys):
    (tmp_path / "image").write_bytes(b"layers" * 1000)
    (tmp_path / "sbom.json").write_text("{}")
    assert write(tmp_path / "x.tar", "--image-archive", str(tmp_path / "image")) == 0
    assert unpack(tmp_path / "x.tar", tmp_path / "y") == 0
    assert (tmp_path / "y" / "image.tar").read_bytes() == b"layers" * 1000
    assert "docker load -i" in capsys.readouterr().out


def test_the_bill_of_materials_lists_every_distribution_with_its_version():
    document = json.loads(sbom({"SOURCE_DATE_EPOCH": "0"}))
    assert document["creationInfo"]["created"] == "1970-01-01T00:00:00Z"
    assert document == json.loads(sbom({"SOURCE_DATE_EPOCH": "0"}))
    packages = {one["externalRefs"][0]["referenceLocator"]: one for one in document["packages"]}
    for name in ("torch", "numpy", "msgspec", "fastapi"):
        assert packages[f"pkg:pypi/{name}@{version(name).replace('+', '%2B')}"]["versionInfo"] == version(name)
    ids = [one["SPDXID"] for one in document["packages"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one) for one in ids)
    linked = {one["relatedSpdxElement"] for one in document["relationships"]}
    assert linked == set(ids)


def test_spdx_tools_accept_the_bill_of_materials(tmp_path):
    (tmp_path / "sbom.spdx.json").write_text(sbom({"SOURCE_DATE_EPOCH": "0"}))
    assert validate_full_spdx_document(parse_file(str(tmp_path / "sbom.spdx.json")), "SPDX-2.3") == []


def test_packages_of_debian_are_components(tmp_path):
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    status = "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u1\n\n"
    status += "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    (tmp_path / "var/lib/dpkg/status").write_text(status)
    (one,) = system_components(tmp_path)
    assert one.url == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert list(system_components(tmp_path / "nothing")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--public-key", "key.pub"], "--public-key: has no effect without --bundle"),
        ([str(DEMO), "--public-key", "key.pub"], "--public-key: has no effect without --bundle"),
        (["--bundle", "none.tar"], "none.tar: no such file or directory\nnone.tar: 1 problem\n"),
        ([str(DEMO), "--bundle", "none.tar"], "--bundle: has a manifest of its own"),
    ],
)
def test_serve_refuses_options_of_bundles_that_cannot_be_used(words, said, capsys):
    assert main(["serve", *words]) == exits.MANIFEST.number
    found = capsys.readouterr().err
    assert found.startswith(said) and "A model is" not in found


def test_a_bundle_has_adapters_and_the_draft_model(tmp_path, capsys):
    """Their files are verified by the lock of the unpacked manifest."""
    shutil.copytree(DEMO.parent / "demo", tmp_path / "demo")
    shutil.copytree(tmp_path / "demo", tmp_path / "small")
    write_random_adapter(tmp_path / "demo", tmp_path / "support")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: demo}, max_context: 64}\nhardware: {kv_cache_memory: 4MiB}\n"
        "adapters: [{name: org/support, path: support}]\nspeculation: {method: draft, model: small}\n"
    )
    (tmp_path / "sbom.json").write_text("{}")
    path, out = tmp_path / "m.bundle.tar", tmp_path / "out"
    assert main(["bundle", str(manifest), "-o", str(path), "--sbom", str(tmp_path / "sbom.json")]) == 0
    assert unpack(path, out) == 0
    tree = yaml.safe_load((out / "manifest.yaml").read_text())
    assert tree["adapters"] == [{"name": "org/support", "path": "adapters/org-support"}]
    assert tree["speculation"]["model"] == "draft/small"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / "adapters/org-support" / name).read_bytes() == (tmp_path / "support" / name).read_bytes()
    shutil.rmtree(tmp_path / "support")
    assert main(["lock", "--check", str(out / "manifest.yaml")]) == 0
    assert main(["check", str(out / "manifest.yaml")]) == 0
    adapter = out / "adapters/org-support/adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"\1")
    assert main(["lock", "--check", str(out / "manifest.yaml")]) != 0
    assert "adapter_model.safetensors" in capsys.readouterr().err
