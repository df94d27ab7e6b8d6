"""Tests of ahead-of-time compilation without a GPU: resources per architecture, and cache hits at first launch.

Other processes compile, because this one runs kernels in the interpreter."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.jit import installed, interpreted
from kernels.op import Case, Op
from kernels.ops import OPS
from kernels.report import main as report_main
from kernels.tools.aot import TARGETS, Target, has_spills, products
from kernels.tools.launchers import build_stub
from kernels.tools.process_pool import ProcessLost, run_in_processes
from tests.kernels.pretend_gpu import BODY
from tests.kernels.process_pool_work import doubling
from tests.kernels.representatives import FEW, bench_cases, case_launches, compiled_cases, representatives
from tests.kernels.room import EXTREME_OPS
from tests.tiers import NIGHTLY, thinned

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]


def run(*arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"PYTHONPATH": paths} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def report(*arguments, processes=1, **environment):
    return run("-m", "kernels.report", "--processes", str(processes), *arguments, **environment)


@dataclass(frozen=True)
class Compilation:
    """Kernels that a run of `kernels.report` compiles."""

    options: tuple[str, ...]
    targets: tuple[str, ...]
    cases: Callable[[Target], list[tuple[Op, Case]]]


SOME = Compilation(
    (
        *("--target", "sm_90", "gfx942", "sm_80", "sm_86", "sm_89"),
        *("--launches", "tests.kernels.representatives:launches"),
    ),
    ("sm_90", "gfx942"),
    compiled_cases,
)
ALL = Compilation((), tuple(TARGETS), bench_cases)
COMPILATIONS = [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=NIGHTLY)]


KEPT_ENTRIES = 3000
"""Entries of Triton's cache, above which it is emptied. A run of `make test` makes about 200."""


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory):
    """Folder for Triton's cache that later runs use too, so that unchanged kernels are compiled once. The names of its
    entries are hashes of the kernel with its options and of the compiler."""
    kept = getattr(request.config, "cache", None)
    if kept is None:  # pytest runs without its own cache
        return tmp_path_factory.mktemp("kernels")
    folder = Path(kept.mkdir("triton"))
    if sum(1 for _ in folder.iterdir()) > KEPT_ENTRIES:
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


@pytest.fixture(scope="session", params=COMPILATIONS)
def reported(request, compiled, tmp_path_factory):
    """Compile kernels and return the finished process, the report, the compilation and the folder of Triton's cache.

    `some`: one or more cases of each operation, which launch all kernels, for sm_90; a few for other targets.
    `all`: all launches for the main architectures, one per kernel for the others, which takes minutes."""
    written = tmp_path_factory.mktemp("report") / "report.json"
    folder = compiled if request.param is SOME else tmp_path_factory.mktemp("kernels")
    files = () if request.param is SOME else ("--brief", "--cache", str(folder))
    options = ("--json", str(written), *files, *request.param.options)
    done = report("--check", *options, processes=2, **cache(folder))
    assert written.exists(), done.stderr
    return done, json.loads(written.read_text()), request.param, folder


only_some = pytest.mark.parametrize("reported", COMPILATIONS[:1], indirect=True)
only_all = pytest.mark.parametrize("reported", COMPILATIONS[1:], indirect=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # all kernels, with a cold cache, on a busy machine
def test_every_kernel_compiles_for_every_architecture_and_keeps_its_registers(reported):
    done, found, compilation, _ = reported
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert found["faults"] == []
    made = {(row["op"], row["target"]) for row in found["kernels"]}
    for target in map(TARGETS.__getitem__, compilation.targets):
        for op, _ in compilation.cases(target):
            assert (op.name, target.name) in made
    spills = {row["op"] for row in found["kernels"] if row["compiled"]["spilled"] and TARGETS[row["target"]].gated}
    assert spills <= {op.name for op in OPS if op.may_spill}


@pytest.mark.parametrize("name", thinned(TARGETS, SOME.targets))
def test_representatives_launch_every_kernel_of_the_bench_cases(name):
    target = TARGETS[name]
    chosen, every = representatives(target), bench_cases(target)
    assert {op.name for op, _ in chosen} == {op.name for op, _ in every}
    kernels = [{one.launch.kernel for op, case in some for one in case_launches(op, case)} for some in (chosen, every)]
    assert kernels[0] == kernels[1] and len(chosen) < len(every)


OTHER_TRITONS = sorted((ROOT / ".venv").glob("triton-*"))  # `make kernels` installs them


@pytest.mark.nightly(
    "tests/kernels/test_aot.py::test_every_kernel_compiles_for_every_architecture_and_keeps_its_registers"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER_TRITONS, reason="no other release of Triton: make kernels installs one")
@pytest.mark.parametrize("folder", OTHER_TRITONS, ids=lambda folder: folder.name)
def test_kernels_that_spilled_with_another_triton_compile(folder, compiled):
    """`make kernels` compiles all of them."""
    ops = ("--op", "rope_angles", "sample", "--case", "decode-256x64", "greedy-256x", "top_p-256x")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    done = report("--check", *ops, "--target", "sm_90", PYTHONPATH=paths, TRITON_CACHE_DIR=str(compiled))
    assert done.returncode == 0 and "0 faults" in done.stdout, done.stdout[-4000:] + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@only_some
def test_matrix_instructions_of_a_kernel_are_reported(reported):
    _, found, *_ = reported
    rows = {row["target"]: row["compiled"]["matrix"] for row in found["kernels"] if row["op"] == "fp8_matmul"}
    assert rows["sm_80"] == ["HMMA"]
    assert rows["sm_89"] == ["QMMA"]


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;", "HGMMA"),
        ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2;", "QGMMA"),
        ("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%r1}, %rd1, %rd2;", "IGMMA"),
        ("@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p4;", "UTCHMMA"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 + 0 ], %rd1, %rd2, %r2, %p4;", "UTCQMMA"),
        ("tcgen05.mma.cta_group::1.kind::i8 [ %r1 + 0 ], %rd1, %rd2, %r2, %p4;", "UTCIMMA"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};", "HMMA"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f2};", "HMMA"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1}, {%r1}, {%r2}, {%f2};", "QMMA"),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};", "IMMA"),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd1}, {%fd2}, {%fd3}, {%fd4};", "DMMA"),
    ],
)
def test_matrix_instructions_have_the_names_of_the_device_code(instruction, name):
    ptx = f"\t{instruction}\n\tmma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {{%fd1}};\n\t{instruction}\n"
    assert products(f"\tadd.f32 %f1, %f2, %f3; // mma.sync.f16\n{ptx}") == tuple(dict.fromkeys((name, "DMMA")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@only_some
def test_tiles_fit_devices_with_less_shared_memory(reported):
    """99 KiB, where a Hopper has 227."""
    _, found, *_ = reported
    made = {row["op"]: row["compiled"]["shared"] for row in found["kernels"] if row["target"] == "sm_86"}
    assert made.keys() == {op.name for op in EXTREME_OPS}
    assert max(made.values()) <= 99 << 10


@pytest.mark.nightly("tests/kernels/test_aot.py::test_tiles_fit_devices_with_less_shared_memory")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiles_of_every_size_fit_devices_with_less_shared_memory(compiled):
    targets = ("--target", "sm_86", "sm_120", "--launches", "tests.kernels.room:largest")
    done = report("--check", *targets, **cache(compiled))
    assert done.returncode == 0 and "0 faults" in done.stdout, done.stdout[-4000:] + done.stderr


def first_launches(folder, tmp_path, name, *, program_file):
    """Launch kernels as in a container, where the cache folder links to the filled one, and there is no compiler.
    Return the numbers of launches and of compiled kernels."""
    linked = tmp_path / "cache"
    linked.mkdir()
    for entry in folder.iterdir():
        (linked / entry.name).symlink_to(entry)
    build_stub(tmp_path, BODY)
    there = {"TRITON_CACHE_DIR": str(linked), "LD_LIBRARY_PATH": str(tmp_path), "CC": "/bin/false", "CXX": "/bin/false"}
    tools = tmp_path / "tools"
    tools.mkdir()
    if program_file:
        if shutil.which("file") is None:
            pytest.skip("there is no program `file` here")
        (tools / "file").symlink_to(shutil.which("file"))
    there |= {"PATH": str(tools), "TRITON_LIBCUDA_PATH": str(folder / "libcuda")}
    done = run("tests/kernels/pretend_gpu.py", "sm_90", name, **there)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_first_launch_compiles_nothing(compiled, tmp_path):
    options = ("--cache", str(compiled), "--target", "sm_90", "--launches", "tests.kernels.representatives:few")
    done = report("--check", *options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    seen = first_launches(compiled, tmp_path, "few", program_file=shutil.which("file") is not None)
    assert seen["compiled"] == 0 and seen["launches"] >= len(FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program_file", [True, False], ids=["with file", "without file"])
@only_all
def test_first_launch_of_every_operation_compiles_nothing(reported, tmp_path, program_file):
    *_, folder = reported
    seen = first_launches(folder, tmp_path, "all", program_file=program_file)
    assert seen["compiled"] == 0 and seen["launches"] >= len(OPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (
            "several",  # one run, because each imports torch and Triton
            ["spilling_kernel spills", "CompilationError", "the compiler exited with code 9", "3 faults"],
        ),
        pytest.param("spilling", ["spilling_kernel spills", "1 faults"], marks=NIGHTLY),
        pytest.param(
            "large", ["needs 294,912 bytes of shared memory; the target has 232,448", "1 faults"], marks=NIGHTLY
        ),
        pytest.param("broken", ["CompilationError", "the compiler exited with code 9", "2 faults"], marks=NIGHTLY),
    ],
)
def test_faulty_kernel_is_reported(planted, words, compiled):
    done = report("--check", "--target", "sm_90", "--launches", f"tests.kernels.planted:{planted}", **cache(compiled))
    assert done.returncode == 1, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


@pytest.mark.parametrize(
    ("code", "spills"),
    [
        ("STL [R1], R5 ;\n LDL.LU R46, [R1] ;", True),
        ("STL [R1+0x18], R0 ;\n @P0 LDL R2, [R1+0x18] ;", True),
        ("STL [R2], R4 ;\n STL [R1+0x18], R0 ;\n LDL R3, [R8+0x14] ;", False),  # the array of sin, Triton 3.6
        ("LDL R3, [R10] ;", False),
        ("LDG.E R3, [R1] ;", False),
    ],
)
def test_reads_at_the_stack_pointer_are_spills(code, spills):
    assert has_spills(code) == spills


@pytest.mark.nightly("tests/kernels/test_aot.py::test_faulty_kernel_is_reported")
@pytest.mark.slow
def test_kernel_with_may_spill_may_spill(compiled):
    done = report("--check", "--target", "sm_90", "--launches", "tests.kernels.planted:allowed", **cache(compiled))
    assert done.returncode == 0 and "0 faults" in done.stdout, done.stdout + done.stderr


def cache(folder):
    return {"TRITON_CACHE_DIR": str(folder)}


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled here")
def test_kernels_that_are_interpreted_are_not_compiled(capsys):
    assert report_main([]) == 2
    assert capsys.readouterr().err == (
        "nothing can be compiled: TRITON_INTERPRET is set: kernels run in the interpreter\n"
    )


# Two launches have different signatures exactly if Triton compiles them separately. Runs without the interpreter.
SIGNATURES = """
import torch
from kernels.tools.aot import TARGETS, compile_for, signature
from kernels.jit import jit, launch, recorded, tl

@jit(varying=("rows",))
def some_kernel(x, rows, size, scale, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < size, 0.0) * scale, at < rows)

def made(x, rows, size, scale, block=64, warps=4):
    with recorded() as launches:
        launch(some_kernel, (1,), x, rows, size, scale, BLOCK=block, warps=warps)
    return launches[0]

x = torch.empty(256, device="meta", dtype=torch.bfloat16)
launches = [
    made(x, 1, 32, 1.0), made(x, 16, 48, 2.0), made(x, 17, 64, 3.0), made(x, 2**31, 32, 1.0),
    made(x, 1, 33, 1.0), made(x, 5, 35, 1.0), made(x, 1, 1, 1.0), made(x, 1, 2**40, 1.0), made(x, 1, 2**40 + 1, 1.0),
    made(x[1:], 1, 32, 1.0), made(x[8:], 1, 32, 1.0), made(x.float(), 1, 32, 1.0),
    made(x, 1, 32, 1.0, block=128), made(x, 1, 32, 1.0, warps=8), made(x, True, 32, 1.0), made(x, 1, 32, 1),
]
hashes = {}
for one in launches:
    compile_for(TARGETS["sm_90"], [one], lambda kernel: hashes.setdefault(signature(one), set()).add(kernel.hash))
print(len(hashes), len(set.union(*hashes.values())), max(map(len, hashes.values())))
"""


@pytest.mark.slow
def test_launches_share_a_signature_if_they_share_a_kernel(tmp_path):
    (tmp_path / "script.py").write_text(SIGNATURES)
    done = run(str(tmp_path / "script.py"), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    signatures, kernels, of_each = map(int, done.stdout.split())
    assert of_each == 1, "a signature stands for two kernels: one of them would not be compiled ahead of time"
    assert signatures == kernels == 12


# -- processes that may be lost ----------------------------------------------------------------------------------------


def test_lost_item_does_not_affect_others():
    found = list(run_in_processes(doubling, [1, "end", 2, "end", 3, 4], 2, 60.0))
    assert found == [2, ProcessLost("exited with code 3"), 4, ProcessLost("exited with code 3"), 6, 8]


def test_processes_that_start_and_end_together_keep_their_exit_codes():
    """One thread reads exit codes while another starts a process. Without a lock 1 in 7 codes was lost."""
    found = list(run_in_processes(doubling, ["end"] * 60, 8, 60.0))
    assert found == [ProcessLost("exited with code 3")] * 60


def test_item_that_exceeds_the_time_limit_is_lost():
    assert list(run_in_processes(doubling, ["sleep"], 1, 2.0)) == [ProcessLost("took longer than 2 s")]


def test_exceptions_of_the_work_are_raised():
    with pytest.raises(ValueError, match="a fault of the work itself"):
        list(run_in_processes(doubling, [1, "raise"], 1, 60.0))


def test_empty_work_starts_no_process():
    assert list(run_in_processes(doubling, [], 2, 1.0)) == []


def test_bench_cases_need_no_memory():
    """Bench cases are compiled from meta tensors, at sizes that exceed the host's memory."""
    from kernels.op import Make

    for op in OPS:
        for case in op.cases:
            if case.bench:
                args = op.inputs(Make(torch.device("meta"), torch.bfloat16), **case.sizes)
                assert all(arg.device.type == "meta" for arg in args if isinstance(arg, torch.Tensor)), op.name
