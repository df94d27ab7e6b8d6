"""Tests of the kernel benchmark and the autotuner in the interpreter. Only the timing differs from a GPU."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import bench, timing, tune
from benchmarks.kernels.timing import Time, alternating, format_figure
from benchmarks.kernels.tune import candidates, close, tuned
from kernels import tuning
from kernels.jit import installed, interpreted, jit, launch, tl
from kernels.op import Case, Make, Op

pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]
CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="a GPU is here")


@jit(varying=("rows",))
def doubled_kernel(x, y, rows, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < rows, 0.0).to(tl.float32)
    tl.store(y + at, (value * (2.5 if WRONG else 2.0)).to(y.dtype.element_ty), at < rows)


def doubled(x, factor=1):
    asked = tuning.settings("doubled", {"block": 16, "wrong": False}, x.device, rows=x.shape[0], factor=factor)
    y = torch.empty_like(x)
    block = asked["block"]
    launch(doubled_kernel, (-(-x.shape[0] // block),), x, y, x.shape[0], WRONG=asked["wrong"], BLOCK=block)
    return y


DOUBLED = Op(
    name="doubled",
    reference=lambda x, factor=1: x * 2,
    triton=doubled,
    inputs=lambda make, rows: (make.normal(rows),),
    cases=(Case("small", {"rows": 100}), Case("large", {"rows": 1 << 20}, bench=True), Case("empty", {"rows": 0})),
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2},
    traffic=lambda x, factor=1: 2 * x.nbytes,
    flops=lambda x, factor=1: x.numel(),
    peer=lambda x, factor=1: x + x,
    tunable={"block": (16, 24, 64), "wrong": (False, True)},
    nearest=("rows",),
)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Replace the measured device limits with constants."""
    monkeypatch.setattr(bench, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(bench, "matmul_rate", lambda device: 1e9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._table.cache_clear()
    yield tmp_path
    tuning._table.cache_clear()


# -- times -------------------------------------------------------------------------------------------------------------


@needs_interpreter
def test_case_is_timed_with_torch():
    found = bench.measure(DOUBLED, DOUBLED.cases[0], torch.float32, CPU, rounds=3)
    assert not found.error and found.time is not None and found.peer is not None
    assert found.time.low <= found.time.us <= found.time.high
    assert (found.bytes, found.flops) == (800, 100)
    assert found.of_copy == pytest.approx(800 / (found.time.us / 1e6) / 1e9)
    assert found.of_matmul == pytest.approx(found.of_copy / 8)
    row = found.cells()
    assert row[:2] == ("doubled", "small") and float(row[7]) == pytest.approx(found.peer.us / found.time.us, abs=0.01)


@needs_interpreter
def test_failed_case_is_reported_and_does_not_affect_others():
    def fails(*args):
        raise RuntimeError("some\nreason")

    broken = replace(DOUBLED, triton=fails)
    found = bench.measure(broken, broken.cases[0], torch.float32, CPU, rounds=2)
    assert found.time is None and found.error == "RuntimeError: some reason"
    found = bench.measure(replace(DOUBLED, peer=fails), DOUBLED.cases[0], torch.float32, CPU, rounds=2)
    assert found.time is not None and found.peer is None and found.error == "torch: RuntimeError: some reason"


def test_both_implementations_alternate():
    order = []

    def side(name, values):
        left = iter(values)

        def sample():
            order.append(name)
            return next(left)

        return sample

    found = alternating([side("ours", [3.0, 1.0, 2.0]), side("torch", [9.0, 9.0, 8.0])], 3)
    assert order == ["ours", "torch"] * 3
    assert found == [Time(2.0, 1.0, 3.0), Time(9.0, 8.0, 9.0)]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.0123"), (1.234, "1.23"), (99.96, "100.0"), (1234.5, "1,234")]
)
def test_figures_have_three_digits(value, text):
    assert format_figure(value) == text


def test_inputs_rotate_until_they_exceed_the_cache(monkeypatch):
    """Six caches of 1000 bytes' worth of traffic, as far as memory goes."""

    class Properties:
        L2_cache_size = 1000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 10_000))

    def sets(traffic, elements=25):
        made, cold = timing.input_sets(
            lambda seed: (torch.full((elements,), float(seed)), 7), lambda x, other: traffic, torch.device("cuda")
        )
        assert [float(x[0]) for x, _ in made] == list(range(len(made)))
        return len(made), cold

    assert sets(500) == (6, True)
    assert sets(1_000_000) == (1, True)
    assert sets(1) == (30, False), "a third of 10,000 bytes holds 30 sets of 100"
    assert sets(500, elements=250) == (3, False)


class FakeCuda:
    """The border to a device on which whatever runs between two events takes half a millisecond."""

    def __init__(self, monkeypatch):
        self.captured = self.replays = 0
        self.capturing, self.strict = False, False
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                assert not fake.capturing

            def elapsed_time(self, end):
                return 0.5

        class CUDAGraph:
            def replay(self):
                fake.replays += 1

        @contextmanager
        def graph(which):
            fake.capturing = True
            yield
            fake.capturing = False

        for name, value in {"Event": Event, "CUDAGraph": CUDAGraph, "graph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)
        monkeypatch.setattr(timing, "WARM_S", 0.0)

    def set_mode(self, mode):
        self.strict = mode == "error"

    def call(self, waits):
        def function(x):
            if waits and self.strict:
                raise RuntimeError("called a synchronizing CUDA operation")
            assert not (waits and self.capturing)
            self.captured += self.capturing
            return x

        return function


def test_a_sample_is_a_graph_of_many_calls(monkeypatch):
    """A turn of three calls takes 500 us, so four turns make a sample of at least 2 ms."""
    fake = FakeCuda(monkeypatch)
    sample = timing.sampler(fake.call(waits=False), [(torch.ones(1),)] * 3, torch.device("cuda"))
    assert fake.captured == 3 + 4 * 3, "one turn to learn how long it takes, then the sample"
    before = fake.replays
    assert sample() == pytest.approx(500 / 12)
    assert fake.replays == before + 1 and not fake.strict


def test_operation_that_waits_for_the_device_is_timed_per_call(monkeypatch):
    fake = FakeCuda(monkeypatch)
    sample = timing.sampler(fake.call(waits=True), [(torch.ones(1),)] * 3, torch.device("cuda"))
    assert sample() == pytest.approx(500 / 12)
    assert fake.captured == fake.replays == 0 and not fake.strict
    assert not timing.capturable(fake.call(waits=True), (torch.ones(1),))


def test_cases_are_selected_by_parts_of_their_names():
    def found(names=(), ids=(), small=False, fp8=True, ops=(DOUBLED,)):
        return [(op.name, case.id) for op, case in bench.selected_cases(names, ids, small=small, fp8=fp8, ops=ops)]

    assert found() == [("doubled", "large")]
    assert found(small=True) == [("doubled", "small")], "nothing is timed without rows"
    assert found(names=["oub"], ids=["arg"]) == [("doubled", "large")]
    assert found(names=["other"]) == found(ids=["small"]) == []
    narrow = replace(DOUBLED, cases=(Case("eight", {}, bench=True, needs="fp8"),))
    assert found(fp8=False, ops=(narrow,)) == [] and len(found(ops=(narrow,))) == 1


# -- the command -------------------------------------------------------------------------------------------------------


@needs_interpreter
def test_run_writes_its_measurements(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "OPS", (DOUBLED,))
    out = tmp_path / "bench.json"
    arguments = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--json", str(out)]
    assert bench.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [(row["op"], row["case"], row["dtype"]) for row in found["rows"]] == [("doubled", "small", "float32")]
    assert found["facts"]["torch"] == torch.__version__
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("CPU, torch") and lines[1].split()[:3] == ["op", "case", "us"]
    assert bench.main([*arguments, "--case", "none"]) == 2


def test_without_gpu_the_references_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(bench, "best", lambda: "torch")
    monkeypatch.setattr(bench, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["rms_norm", "--case", "odd"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("benchmarks.kernels: no GPU here;")
    assert [row.split()[:2] for row in rows] == [["rms_norm", "odd"], ["rms_norm_quantized", "odd"]]


# -- settings ----------------------------------------------------------------------------------------------------------


def ask(**sizes):
    return tuning.settings("some", {"block": 1, "warps": 4}, CPU, **sizes)


def tables(folder, entries, devices=("cpu",)):
    (folder / "some.json").write_text(
        json.dumps({"devices": devices, "architecture": "sm_90", "ops": {"some": entries}})
    )
    tuning._table.cache_clear()


def test_nearest_entry_provides_the_settings(folder):
    tables(
        folder,
        [
            {"sizes": {"=dim": 64, "rows": 8}, "settings": {"block": 2}},
            {"sizes": {"=dim": 64, "rows": 512}, "settings": {"block": 3}},
            {"sizes": {"=dim": 128, "rows": 8}, "settings": {"warps": 8}},
            {"sizes": {}, "settings": {"block": 7}},
        ],
    )
    assert ask(dim=64, rows=1) == {"block": 2, "warps": 4}
    assert ask(dim=64, rows=300) == {"block": 3, "warps": 4}
    assert ask(dim=128, rows=4000) == {"block": 1, "warps": 8}
    assert ask(dim=96, rows=8) == {"block": 7, "warps": 4}, "another head size is another kernel"
    assert ask(dim=64) == {"block": 7, "warps": 4}, "the others are for sizes that nobody has"
    assert tuning.devices("sm_90") == ("cpu",) and tuning.devices("sm_80") == ()


def test_a_table_is_for_its_devices_only(folder):
    tables(folder, [{"sizes": {}, "settings": {"block": 9}}], devices=["NVIDIA H200"])
    assert ask()["block"] == 1
    with tuning.assumed("NVIDIA H200 NVL"):
        assert ask()["block"] == 9
        with tuning.forced("some", {"block": 5}):
            assert ask()["block"] == 5
        with tuning.forced("other", {"block": 5}):
            assert ask()["block"] == 9


def test_every_combination_is_a_candidate():
    found = candidates({"block": (16, 64), "warps": (4, 8)})
    assert found == [{"block": block, "warps": warps} for block in (16, 64) for warps in (4, 8)]


def fake_clock(monkeypatch, us):
    """A call takes what its settings and rows say."""

    def sampler(function, sets, device):
        with tuning.recorded_queries() as questions:
            function(*sets[0])
        (question,) = questions
        settings = dict(question.default) | dict((tuning._forced.get() or {}).get("doubled", {}))
        return lambda: us(settings, sets[0][0].shape[0])

    monkeypatch.setattr(tune, "sampler", sampler)


def try_settings(op=DOUBLED, cases=DOUBLED.cases[:1]):
    return tuned(op, cases, torch.float32, CPU, rounds=3)


@needs_interpreter
def test_fastest_correct_candidate_is_kept(monkeypatch):
    fake_clock(monkeypatch, lambda settings, rows: 1.0 if settings["wrong"] else 100 / settings["block"])
    entry = try_settings()
    assert entry["settings"] == {"block": 64, "wrong": False}, "not 24, and not what is wrong"
    assert entry["sizes"] == {"rows": 100, "=factor": 1}
    assert entry["us"] == {"small": [6.25, 1.562]}
    assert (entry["tried"], entry["right"]) == (6, 2)


@needs_interpreter
@pytest.mark.parametrize(("gain", "kept"), [(0.029, {}), (0.031, {"block": 64, "wrong": False})])
def test_default_is_kept_unless_a_candidate_is_clearly_faster(monkeypatch, gain, kept):
    fake_clock(monkeypatch, lambda settings, rows: 100.0 * (1 - gain) if settings["block"] == 64 else 100.0)
    assert try_settings()["settings"] == kept


@needs_interpreter
@pytest.mark.parametrize(("slower", "kept"), [(1.02, {"block": 64, "wrong": False}), (1.04, {})])
def test_candidate_that_is_slower_in_one_case_is_not_kept(monkeypatch, slower, kept):
    """In the mean of two cases it is faster."""
    fake_clock(
        monkeypatch, lambda settings, rows: 10.0 if settings["block"] == 16 else 5.0 if rows == 100 else 10 * slower
    )
    entry = try_settings(cases=(Case("small", {"rows": 100}), Case("smaller", {"rows": 70})))
    assert entry["settings"] == kept
    assert entry["us"] == {"small": [10.0, 5.0 if kept else 10.0], "smaller": [10.0, 10.2 if kept else 10.0]}


def test_cases_with_equal_queries_share_an_entry():
    doubled = replace(DOUBLED, triton=lambda x, factor=1: doubled_by(x, x.shape[0] // 100))

    def doubled_by(x, factor):
        return launchless(x, factor)

    def launchless(x, factor):
        tuning.settings("doubled", {"block": 16}, x.device, factor=factor)
        return x

    cases = [Case(str(rows), {"rows": rows}) for rows in (100, 150, 250)]
    found = tune.groups([(doubled, case) for case in cases], torch.float32)
    assert [[case.id for case in group] for _, group in found] == [["100", "150"], ["250"]]
    assert tune.groups([(replace(doubled, tunable={}), cases[0])], torch.float32) == []


@needs_interpreter
def test_operation_with_a_wrong_default_is_not_tuned():
    with pytest.raises(ValueError, match="the result with the default settings is wrong"):
        try_settings(replace(DOUBLED, reference=lambda x, factor=1: x * 2.1))
    with pytest.raises(ValueError, match="queried its settings 0 times"):
        try_settings(replace(DOUBLED, triton=lambda x: x * 2))


@needs_interpreter
def test_kernel_uses_the_tuned_settings(folder, monkeypatch, capsys):
    fake_clock(monkeypatch, lambda settings, rows: 1.0 if settings["wrong"] else 100 / settings["block"])
    for _ in range(2):  # the second time replaces the first
        assert tune.tune([(DOUBLED, DOUBLED.cases[0])], torch.float32, CPU, 2, None) == 0
    table = json.loads((folder / "cpu.json").read_text())
    assert table["devices"] == ["cpu"] and len(table["ops"]["doubled"]) == 1
    tuning._table.cache_clear()
    assert tuning.settings("doubled", {"block": 16, "wrong": False}, CPU, rows=90, factor=1)["block"] == 64
    assert tuning.settings("doubled", {"block": 16, "wrong": False}, CPU, rows=90, factor=2)["block"] == 16
    shown = capsys.readouterr().out
    assert "2 of 6 are correct" in shown and "small: 6.25 → 1.56 us" in shown


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.0])
def test_results_are_compared_with_the_reference(wrong):
    want = torch.tensor([0.0, 100.0, math.inf])
    near, far = want.clone(), want.clone()
    near[0], far[0] = 1e-5, wrong
    assert close(DOUBLED, torch.float32, [want], [near])
    assert not close(DOUBLED, torch.float32, [want], [far])
    ids = torch.tensor([1, 2])
    assert close(DOUBLED, torch.float32, [ids], [ids.clone()]) and not close(DOUBLED, torch.float32, [ids], [ids + 1])
    assert not close(DOUBLED, torch.float32, [want], [near.double()])


def test_candidates_are_launched_from_tensors_without_memory(monkeypatch):
    monkeypatch.setattr(tune, "OPS", (DOUBLED,))
    found = tune.candidate_launches(
        None, op="doubled", cases=["large"], dtype=torch.bfloat16, tried=[{"block": 64}, {"wrong": True}]
    )
    assert [one.case for one in found] == ["0", "1"]
    assert [one.launch.constants for one in found] == [
        {"WRONG": False, "BLOCK": 64},
        {"WRONG": True, "BLOCK": 16},
    ]
    assert Make(torch.device("meta"), torch.bfloat16).meta
