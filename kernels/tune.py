"""Tries the settings that an operation declares as tunable, and keeps what is faster on this device.

A candidate must give the reference's result within the operation's tolerance, must not spill where it may not, and must
be faster than the default by more than noise: otherwise the default stays. All are compiled first, side by side.
"""

import itertools
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import tuning
from kernels.aot import TARGETS, Target
from kernels.jit import recorded
from kernels.op import Args, Case, Make, Op, tensors
from kernels.ops import OPS
from kernels.report import Wanted, compile_all
from kernels.timing import Sample, alternating, architecture, device_facts, figure, lost, sampler, sets_for

GAIN = 0.03  # what a candidate must be faster by
FIRST_ROUNDS, FINALISTS = 5, 3

Candidate = dict[str, Any]


def tune(
    cases: Sequence[tuple[Op, Case]], dtype: torch.dtype, device: torch.device, rounds: int, file: Path | None
) -> int:
    """Writes what it found as it goes; the exit code."""
    facts = device_facts(device)
    name = facts.get("device", "cpu")
    file = file or tuning.FOLDER / f"{name.lower().replace(' ', '-')}.json"
    failed = 0
    for op, case in cases:
        if not op.tunable:
            continue
        try:
            entry = tuned(op, case, dtype, device, rounds)
        except Exception as error:  # a case that fails costs no other
            print(f"{op.name} {case.id}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            failed = 1
            if lost(device):
                return failed
            continue
        write(file, name, facts.get("architecture", "cpu"), op.name, entry)
        kept = entry["settings"] or "the default stays"
        us = f"{figure(entry['default_us'])} → {figure(entry['us'])} us"
        print(f"{op.name} {case.id}: {kept}; {us}, of {entry['tried']} tried {entry['right']} right", flush=True)
    print(f"written to {file}" if file.exists() else "no operation of these has settings to try")
    return failed


def write(file: Path, device: str, architecture: str, op: str, entry: dict[str, Any]) -> None:
    """Puts the entry in the place of the one for the same sizes."""
    if file.exists():
        value = json.loads(file.read_text())
    else:
        value = {"devices": [device], "architecture": architecture, "ops": {}}
    entries = [one for one in value["ops"].get(op, ()) if one["sizes"] != entry["sizes"]]
    value["ops"][op] = [*entries, entry]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1) + "\n")


def tuned(op: Op, case: Case, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """The entry of a case; its settings are empty where the default stays, so that no other entry takes its place.
    Raises ValueError for an operation that asks for no settings, or twice."""

    def make(seed: int) -> Args:
        return op.inputs(Make(device, dtype, seed), **case.sizes)

    args = make(0)
    wanted = tensors(op.reference(*copied(args)))
    with tuning.forced(op.name, {}), tuning.asked() as questions:
        given = tensors(op(*copied(args)))
    mine = [question for question in questions if question.op == op.name]
    if len({str(question) for question in mine}) != 1:
        raise ValueError(f"{op.name} asked for its settings {len(mine)} times; once is needed")
    question = mine[0]
    if not close(op, dtype, wanted, given):
        raise ValueError("the default's own result is wrong")
    tried = candidates(op.tunable, question.default)
    good = _compiled(op, case, dtype, device, tried)
    sets, _ = sets_for(make, op.traffic, device)

    def side(candidate: Candidate) -> Sample | None:
        """None for one that cannot run here, or computes something else."""
        with tuning.forced(op.name, candidate):
            try:
                if not close(op, dtype, wanted, tensors(op(*copied(args)))):
                    return None
                return _forced(op.name, candidate, sampler(op, sets, device))
            except Exception:  # more memory than there is, tiles that do not fit: it is no candidate here
                return None

    ranked: list[tuple[float, int]] = []
    for number, candidate in enumerate(good):
        one = side(candidate)
        if one is not None:
            ranked.append((alternating([one], FIRST_ROUNDS)[0].us, number))
    finalists = [good[number] for _, number in sorted(ranked)[:FINALISTS]]
    samples = [one for candidate in ({}, *finalists) if (one := side(candidate)) is not None]
    assert len(samples) == 1 + len(finalists), "they ran a moment ago"
    base, *rest = alternating(samples, rounds)
    best = min(range(len(rest)), key=lambda at: rest[at].us, default=None)
    faster = best is not None and rest[best].us < (1 - GAIN) * base.us
    return {
        "case": case.id,
        "sizes": {key if key in op.near else f"={key}": value for key, value in question.sizes.items()},
        "settings": finalists[best] if best is not None and faster else {},
        "us": round(rest[best].us if best is not None and faster else base.us, 3),
        "default_us": round(base.us, 3),
        "tried": len(tried),
        "right": len(ranked),
    }


def candidates(tunable: Any, default: tuning.Settings) -> list[Candidate]:
    """Every combination but the default's. Of each only what differs from the default."""
    found = []
    for values in itertools.product(*tunable.values()):
        candidate = {
            name: value for name, value in zip(tunable, values, strict=True) if default.get(name, value) != value
        }
        if candidate and candidate not in found:
            found.append(candidate)
    return found


def copied(args: Args) -> Args:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def close(op: Op, dtype: torch.dtype, wanted: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Within the operation's tolerance of the reference; whole numbers must be equal."""
    return all(_error(want, got) <= op.tolerance[dtype] for want, got in zip(wanted, given, strict=True))


def _error(want: Tensor, got: Tensor) -> float:
    """Largest difference relative to the reference's own size and its root mean square."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return math.inf
    if not want.is_floating_point() or want.numel() == 0:
        return 0.0 if torch.equal(want, got) else math.inf
    want, got = want.float(), got.float()
    size = want[want.isfinite()].square().mean().sqrt()
    difference = torch.where(want == got, 0.0, (want - got).abs() / want.abs().maximum(size).clamp(min=1e-30))
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _forced(name: str, candidate: Candidate, sample: Sample) -> Sample:
    """A graph has its settings already; what runs call by call needs them each time."""

    def run() -> float:
        with tuning.forced(name, candidate):
            return sample()

    return run


# -- compiling all candidates side by side -----------------------------------------------------------------------------


def candidate_launches(
    target: Target, *, op: str, case: str, dtype: torch.dtype, tried: Sequence[Candidate]
) -> list[Wanted]:
    """Launches of each candidate, whose number is the case."""
    (one,) = [one for one in OPS if one.name == op]
    (sizes,) = [found.sizes for found in one.cases if found.id == case]
    wanted = []
    for number, candidate in enumerate(tried):
        with tuning.forced(op, candidate), recorded() as launches:
            one(*one.inputs(Make(torch.device("meta"), dtype), **sizes))
        wanted += [Wanted(op, str(number), launch, one.may_spill) for launch in launches]
    return wanted


def _compiled(op: Op, case: Case, dtype: torch.dtype, device: torch.device, tried: list[Candidate]) -> list[Candidate]:
    """Those that compile and keep their registers; all where that cannot be known beforehand."""
    if device.type != "cuda" or architecture(device) not in TARGETS:
        return tried
    source = partial(candidate_launches, op=op.name, case=case.id, dtype=dtype, tried=tried)
    bad: set[int] = set()
    rows = compile_all(
        [source],
        [TARGETS[architecture(device)]],
        devices=[torch.cuda.get_device_name(device)],
        processes=len(os.sched_getaffinity(0)),
    )
    for row in rows:
        if any(row.faults()):
            bad |= {int(number) for number in row.cases}
    return [candidate for number, candidate in enumerate(tried) if number not in bad]
