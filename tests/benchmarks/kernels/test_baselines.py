"""Tests of the attention baselines: an optional library is called with the same attention as our kernels."""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels import baselines, bench
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.op import Make
from kernels.rms_norm import RMS_NORM

CPU = torch.device("cpu")
OPS = (DECODE_ATTENTION, PREFILL_ATTENTION, ENCODER_ATTENTION)


def attend(q, k, v, starts, counts, scale, causal, window, softcap):
    """Compute attention in float64, one query at a time. Each row has `counts` keys, up to its last query."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k[0].shape[1]
    for row, (first, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        keys, values = (x[row][: counts[row]].double().repeat_interleave(group, 1) for x in (k, v))
        for token in range(first, stop):
            at = counts[row] - (stop - token)
            low = 0 if window[0] < 0 else max(0, at - window[0])
            high = at + 1 if causal else counts[row] if window[1] < 0 else min(counts[row], at + window[1] + 1)
            scores = torch.einsum("hd,khd->hk", q[token].double(), keys[low:high]) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(1), values[low:high]).to(out.dtype)
    return out


def row_stride(x, starts, table, counts):
    if table is None:
        return [x[first:stop] for first, stop in zip(starts, starts[1:], strict=False)]
    return [x[line.long()].flatten(0, 1)[:count] for line, count in zip(table, counts, strict=True)]


def of_the_package(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Simulate the function with the signature of flash-attn."""
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    counts = [stop - first for first, stop in zip(ends, ends[1:], strict=False)]
    assert max_seqlen_q == max(b - a for a, b in zip(starts, starts[1:], strict=False)) and max_seqlen_k == max(counts)
    keys, values = (row_stride(x, ends, block_table, counts) for x in (k, v))
    return attend(q, keys, values, starts, counts, softmax_scale, causal, window_size, softcap)


def of_vllm(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
    q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, s_aux=None,
):  # fmt: skip
    """Simulate the function of vLLM's build: it takes lengths for paged keys and start offsets otherwise."""
    assert (seqused_k is None) == (block_table is None) != (cu_seqlens_k is None) and fa_version == 3
    ends = cu_seqlens_k
    if ends is None:
        ends = torch.tensor([0, *seqused_k.cumsum(0).tolist()])
    asked = (softmax_scale, causal, window_size, softcap)
    names = dict(zip(("softmax_scale", "causal", "window_size", "softcap"), asked, strict=True))
    return of_the_package(q, k, v, cu_seqlens_q, ends, max_seqlen_q, max_seqlen_k, block_table=block_table, **names)


@pytest.fixture(autouse=True)
def forgotten():
    baselines.flash.cache_clear()
    yield
    baselines.flash.cache_clear()


@pytest.fixture
def absent(monkeypatch):
    for name in ("vllm", *baselines.FOUND_IN):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=baselines.FOUND_IN)
def installed(request, absent, monkeypatch):
    module = ModuleType(request.param)
    vllm = request.param.startswith("vllm")
    module.flash_attn_varlen_func = of_vllm if vllm else of_the_package
    if vllm:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        module.is_fa_version_supported = lambda version: version < 4
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param


def small_cases():
    for op in OPS:
        for case in op.cases:
            if not case.bench and case.id != "empty":
                yield pytest.param(op, case, id=f"{op.name}-{case.id}")


@pytest.mark.parametrize(("op", "case"), [*small_cases()])
def test_arguments_of_the_library_match_the_operation(installed, op, case):
    args = op.inputs(Make(CPU, torch.float32), **case.sizes)
    if {"sinks", "spans", "kept", "key_starts", "alibi", "chunk", "reach"} & case.sizes.keys():
        with pytest.raises(ValueError, match="does not support (sinks|biases)"):
            baselines.flash_arguments(op.name, args)
        return
    theirs = baselines.flash_attention(*baselines.flash_arguments(op.name, args))
    (ours,) = op.reference(*args)
    rows = torch.ones(len(ours), dtype=torch.bool)
    if op is not ENCODER_ATTENTION:  # which computes only rows of one token, or only longer rows
        counts = args[5].diff().long()
        rows = ((counts == 1) == (op is DECODE_ATTENTION)).repeat_interleave(counts)
    torch.testing.assert_close(theirs[rows], ours[rows], atol=2e-5, rtol=0)


def test_missing_library_is_reported_and_not_timed(absent):
    assert baselines.flash() is None
    args = DECODE_ATTENTION.inputs(Make(CPU, torch.float32), **DECODE_ATTENTION.cases[0].sizes)
    with pytest.raises(baselines.MissingLibrary, match="no module vllm.vllm_flash_attn and no flash_attn"):
        baselines.flash_attention(*baselines.flash_arguments("decode_attention", args))


def test_library_with_a_failing_import_counts_as_missing(absent, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # without the required functions
    assert baselines.flash() is None


def test_shapes_are_traced_without_the_library(absent):
    args = DECODE_ATTENTION.inputs(Make(CPU, torch.bfloat16), **DECODE_ATTENTION.cases[0].sizes)
    asked = baselines.flash_arguments("decode_attention", args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in asked]
        out = baselines.flash_attention(*fakes)
    assert out.shape == args[0].shape and out.dtype == torch.bfloat16


def test_operations_without_a_baseline_have_no_column(installed, monkeypatch):
    assert baselines.flash_arguments("rms_norm", (torch.ones(2, 4),)) is None
    monkeypatch.setattr(bench, "copy_rate", lambda device: 1e9)
    found = bench.measure(RMS_NORM, RMS_NORM.cases[0], torch.float32, CPU, rounds=1)
    assert not found.error and found.flash is None


def test_case_is_timed_with_the_baseline(installed, monkeypatch):
    monkeypatch.setattr(bench, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(bench, "matmul_rate", lambda device: 1e9)
    found = bench.measure(DECODE_ATTENTION, DECODE_ATTENTION.cases[0], torch.float32, CPU, rounds=1)
    assert found.time is not None and found.flash is not None
    row = dict(zip(bench.HEAD, found.cells(), strict=True))
    assert float(row["x flash"].replace(",", "")) == pytest.approx(found.flash.us / found.time.us, abs=0.01)


def test_unsupported_baseline_is_noted_and_our_time_is_kept(installed, monkeypatch):
    monkeypatch.setattr(bench, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(bench, "matmul_rate", lambda device: 1e9)
    case = next(case for case in DECODE_ATTENTION.cases if case.id == "window")
    found = bench.measure(DECODE_ATTENTION, case, torch.float32, CPU, rounds=1)
    assert found.time is not None and found.flash is None and "does not support sinks" in found.error
