import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _instructions() -> list[tuple[str, str]]:
    """Instructions of the last stage: name and the rest, continuation lines joined, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    pairs = [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]
    last = max(index for index, (name, _) in enumerate(pairs) if name == "FROM")
    return pairs[last:]


def _of(name: str) -> list[str]:
    return [rest for each, rest in _instructions() if each == name]


def test_the_entry_point_and_the_health_check_are_in_exec_form():
    assert json.loads(_of("ENTRYPOINT")[0]) == ["/opt/slipway/entrypoint.sh"]
    command = json.loads(_of("HEALTHCHECK")[0].partition("CMD")[2])
    assert command[1:] == ["healthcheck"]


def test_the_image_stops_by_sigterm_and_runs_as_a_number_that_is_not_root():
    assert _of("STOPSIGNAL") == ["SIGTERM"]
    (user,) = _of("USER")
    assert re.fullmatch(r"[1-9]\d*:0", user)


def test_everything_that_libraries_write_goes_below_tmp():
    environment = dict(re.findall(r"(\w+)=(\S+)", _of("ENV")[0]))
    places = {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert all(environment[name].startswith("/tmp") for name in places)


def test_the_entry_point_can_be_executed():
    assert (ROOT / "entrypoint.sh").stat().st_mode & 0o111 == 0o111


def test_kernels_are_compiled_where_the_image_has_them_and_the_entry_point_looks():
    """The cache is in the folder `compiled` next to the entry point, where the entry point looks for it."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    (cache,) = re.findall(r"engine\.worker\.precompile .*--cache (\S+);", text)
    entry = re.findall(r"^COPY entrypoint\.sh (\S+)$", text, re.MULTILINE)[0]
    assert f"COPY --from=build {cache} {cache}\n" in text
    assert cache == f"{Path(entry).parent}/compiled"
    assert "compiled=${0%/*}/compiled\n" in (ROOT / "entrypoint.sh").read_text()


def test_kernels_are_compiled_by_default_if_torch_requires_triton():
    text = (ROOT / "Dockerfile").read_text()
    start = text.index('    if [ "$KERNELS" = auto ]')
    script = text[start : text.index("fi && \\\n", start)].replace("\\\n", "\n") + 'fi; echo "$KERNELS"'
    assert "ARG KERNELS=auto\n" in text
    imported = "case $2 in *hip*) [ $hip = yes ];; *) [ $triton = yes ];; esac"
    builds = {"triton=yes hip=no": "sm_90 sm_100", "triton=yes hip=yes": "gfx942", "triton=no hip=no": "none"}
    for modules, wanted in builds.items():
        own = f"{modules}; python() {{ {imported}; }}\n{script.replace('/opt/slipway/venv/bin/python', 'python')}"
        for given, found in (("auto", wanted), ("sm_80", "sm_80"), ("none", "none")):
            done = subprocess.run(["sh", "-c", own], env={"KERNELS": given}, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == found


def test_kernels_for_rocm_need_torch_for_rocm():
    """An image for AMD GPUs without TORCH_INDEX would get the build for CUDA."""
    text = (ROOT / "Dockerfile").read_text()
    start = text.index('    case "$KERNELS" in')
    script = (
        text[start : text.index(" && \\\n", start)]
        .replace("\\\n", "\n")
        .replace("/opt/slipway/venv/bin/python", "$PYTHON")
    )
    for kernels, python, code in (
        ("gfx942", "false", 1),
        ("gfx942", "true", 0),
        ("sm_90", "false", 0),
        ("", "false", 0),
    ):
        done = subprocess.run(["sh", "-c", script], env={"KERNELS": kernels, "PYTHON": python}, check=False)
        assert done.returncode == code


def test_the_build_file_has_an_image_for_each_device_with_arguments_of_the_dockerfile():
    from kernels.tools.aot import TARGETS

    bake = json.loads((ROOT / "docker" / "bake.json").read_text())
    arguments = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert bake["target"].keys() == {"cpu", "cuda", "rocm"}
    for name, target in bake["target"].items():
        assert target["args"].keys() <= arguments and (ROOT / target["dockerfile"]).is_file()
        assert set(re.findall(r"\$\{(\w+)\}", json.dumps(target))) <= bake["variable"].keys()
        assert set(target["args"]["KERNELS"].split()) - {"none"} <= TARGETS.keys()
        assert name == "rocm" or target["platforms"] == ["linux/amd64", "linux/arm64"]
    assert set(bake["group"]["default"]["targets"]) <= bake["target"].keys()


def test_shapes_whose_kernels_are_compiled_exist():
    from benchmarks.shapes import SHAPES

    (named,) = re.findall(r'^ARG SHAPES="(.*)"$', (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(named.split()) <= set(SHAPES)


def test_the_image_test_finds_files_of_the_driver(tmp_path):
    line = next(one for one in (ROOT / "docker" / "test_image.sh").read_text().splitlines() if "libcuda.so*" in one)
    code = line.split("'")[1].replace('"/usr"', repr(str(tmp_path)))

    def run():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (run().returncode, run().stderr) == (0, "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcuda.so.1").touch()
    assert run().returncode == 1 and "lib/libcuda.so.1" in run().stderr


SYSTEM_BYTES = 150e6
"""Python, the system's libraries and Slipway (97 MB in the image for CPUs) without kernels for GPUs."""
KERNEL_BYTES = 300e6
"""Room for the compiled kernels of two architectures and three shapes."""


def test_the_image_for_cuda_is_below_its_limit():
    """Sizes that were measured after pruning, of the versions in the lock files."""
    sizes = json.loads((ROOT / "docker" / "cuda-sizes.json").read_text())
    locks = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("torch", "torch-cuda"))
    locked = set(re.findall(r"^([a-z0-9-]+==[\w.]+)", locks, re.MULTILINE))
    assert sizes.keys() == locked | {"others"}, "the versions changed: measure again (docker/sizes.py)"
    (limit,) = re.findall(r"else most=(\d+);", (ROOT / "docker" / "test_image.sh").read_text())
    assert sum(sizes.values()) + SYSTEM_BYTES + KERNEL_BYTES < int(limit) * 1e6


def test_sizes_of_packages_are_those_of_their_files(tmp_path, capsys):
    for name, version, count in (("torch", "2.1+cu130", 500), ("nvidia-nccl-cu13", "2", 70), ("click", "8", 9)):
        about = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(count))
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "RECORD").write_text(f"{name}/file,,\n{name}/pruned,,\n")
    runpy.run_path(str(ROOT / "docker" / "sizes.py"))["main"]([str(tmp_path)])
    assert json.loads(capsys.readouterr().out) == {"nvidia-nccl-cu13==2": 70, "torch==2.1": 500, "others": 9}
