"""Try the settings that an operation declares as tunable, and keep those that are faster on this device.

A candidate must match the reference's result within the operation's tolerance and must not spill registers unless that
is allowed. It must be faster than the default by more than noise, in the mean of the cases of its entry, and slower in
none. Otherwise the default remains. All candidates are compiled first, in parallel.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import (
    Sample,
    alternating,
    architecture,
    device_facts,
    device_is_lost,
    format_figure,
    input_sets,
    sampler,
)
from kernels import tuning
from kernels.jit import recorded
from kernels.op import Args, Case, Make, Op, tensors
from kernels.ops import OPS
from kernels.report import OpLaunch, compile_all
from kernels.tools.aot import TARGETS, Target

GAIN = 0.03  # minimum gain of a candidate
FIRST_ROUNDS, FINALISTS = 5, 3

Candidate = dict[str, Any]


def tune(
    cases: Sequence[tuple[Op, Case]], dtype: torch.dtype, device: torch.device, rounds: int, file: Path | None
) -> int:
    """Tune the cases and write each entry immediately. Return the exit code."""
    facts = device_facts(device)
    name = facts.get("device", "cpu")
    file = file or tuning.FOLDER / f"{name.lower().replace(' ', '-')}.json"
    failed = 0
    for op, group in groups(cases, dtype):
        try:
            entry = tuned(op, group, dtype, device, rounds)
        except Exception as error:  # failing cases do not affect others
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(f"{op.name} {', '.join(case.id for case in group)}: {reason}", flush=True)
            failed = 1
            if device_is_lost(device):
                return failed
            continue
        write(file, name, facts.get("architecture", "cpu"), op.name, entry)
        print(f"{op.name}: {entry['settings'] or 'default kept'}; {entry['right']} of {entry['tried']} are correct")
        for case, us in entry["us"].items():
            print(f"    {case}: {format_figure(us[0])} → {format_figure(us[1])} us", flush=True)
    print(f"written to {file}" if file.exists() else "none of these operations has settings")
    return failed


def groups(cases: Sequence[tuple[Op, Case]], dtype: torch.dtype) -> list[tuple[Op, list[Case]]]:
    """Group cases that query the table with the same sizes: one entry serves all of them."""
    found: dict[str, tuple[Op, list[Case]]] = {}
    for op, case in cases:
        if op.tunable:
            key = f"{op.name} {sorted(tuning_query(op, case, dtype).sizes.items())}"
            found.setdefault(key, (op, []))[1].append(case)
    return list(found.values())


def tuning_query(op: Op, case: Case, dtype: torch.dtype) -> tuning.TuningQuery:
    """Return the body's query of the table. Raise ValueError unless it makes exactly one."""
    with tuning.forced(op.name, {}), tuning.recorded_queries() as asked, recorded():
        op(*op.inputs(Make(torch.device("meta"), dtype), **case.sizes))
    mine = [one for one in asked if one.op == op.name]
    if len({str(one) for one in mine}) != 1:
        raise ValueError(f"{op.name} {case.id} queried its settings {len(mine)} times; expected once")
    return mine[0]


def write(file: Path, device: str, architecture: str, op: str, entry: dict[str, Any]) -> None:
    """Write the entry, in place of an entry for the same sizes."""
    if file.exists():
        value = json.loads(file.read_text())
    else:
        value = {"devices": [device], "architecture": architecture, "ops": {}}
    entries = [one for one in value["ops"].get(op, ()) if one["sizes"] != entry["sizes"]]
    value["ops"][op] = [*entries, entry]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1) + "\n")


class Trial:
    """A case on the device, with its reference's result. Raises ValueError if the default's result differs."""

    def __init__(self, op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self._op, self._dtype, self._device = op, dtype, device
        self._sets, _ = input_sets(lambda seed: op.inputs(Make(device, dtype, seed), **case.sizes), op.traffic, device)
        self._wanted = tensors(op.reference(*copied(self._sets[0])))
        default = self.side({})
        if default is None:
            raise ValueError(f"{case.id}: the result with the default settings is wrong")
        self.default = default

    def side(self, candidate: Candidate) -> Sample | None:
        """Return a timing function, or None if the candidate cannot run here or its result differs."""
        with tuning.forced(self._op.name, candidate):
            try:
                if not close(self._op, self._dtype, self._wanted, tensors(self._op(*copied(self._sets[0])))):
                    return None
                return _forced(self._op.name, candidate, sampler(self._op, self._sets, self._device))
            except Exception:  # too little memory or tiles that do not fit: not a candidate here
                return None


def tuned(op: Op, cases: Sequence[Case], dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the entry for cases that query with the same sizes. Its settings are empty if the default remains, so that
    no other entry takes its place."""
    asked = [tuning_query(op, case, dtype) for case in cases]
    tried = candidates(op.tunable)
    alive = _compiled(op, cases, dtype, device, tried)
    ratios: dict[int, list[float]] = {number: [] for number in alive}
    for case in cases:
        trial = Trial(op, case, dtype, device)
        base = alternating([trial.default], FIRST_ROUNDS)[0].us
        for number in list(ratios):
            one = trial.side(tried[number])
            if one is None:
                del ratios[number]
            else:
                ratios[number].append(alternating([one], FIRST_ROUNDS)[0].us / base)
    ranked = sorted(ratios, key=lambda number: math.prod(ratios[number]))[:FINALISTS]
    times: dict[str, list[float]] = {}  # by case: of the default, then of the finalists
    for case in cases:
        trial = Trial(op, case, dtype, device)
        samples = [trial.default, *(one for number in ranked if (one := trial.side(tried[number])) is not None)]
        assert len(samples) == 1 + len(ranked), "candidates passed before"
        times[case.id] = [time.us for time in alternating(samples, rounds)]
    best = _best(list(times.values()))
    return {
        "sizes": {key if key in op.nearest else f"={key}": value for key, value in asked[0].sizes.items()},
        "settings": tried[ranked[best - 1]] if best else {},
        "us": {case: [round(us[0], 3), round(us[best], 3)] for case, us in times.items()},
        "tried": len(tried),
        "right": len(ratios),
    }


def _best(times: Sequence[Sequence[float]]) -> int:
    """Return the fastest column of the cases' times by their geometric mean; or the first column, unless the fastest is
    faster by more than noise, and slower in no case."""
    columns = range(1, len(times[0]))
    ratio = {at: math.prod(row[at] / row[0] for row in times) ** (1 / len(times)) for at in columns}
    worst = {at: max(row[at] / row[0] for row in times) for at in columns}
    good = [at for at in columns if ratio[at] < 1 - GAIN and worst[at] < 1 + GAIN]
    return min(good, key=lambda at: ratio[at], default=0)


def candidates(tunable: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Return every combination."""
    return [dict(zip(tunable, values, strict=True)) for values in itertools.product(*tunable.values())]


def copied(args: Args) -> Args:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def close(op: Op, dtype: torch.dtype, wanted: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Return whether the result is within the operation's tolerance of the reference. Integers must be equal."""
    return all(_error(want, got) <= op.tolerance[dtype] for want, got in zip(wanted, given, strict=True))


def _error(want: Tensor, got: Tensor) -> float:
    """Return the largest difference relative to the reference's own size and its root mean square."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return math.inf
    if not want.is_floating_point() or want.numel() == 0:
        return 0.0 if torch.equal(want, got) else math.inf
    want, got = want.float(), got.float()
    size = want[want.isfinite()].square().mean().sqrt()
    difference = torch.where(want == got, 0.0, (want - got).abs() / want.abs().maximum(size).clamp(min=1e-30))
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _forced(name: str, candidate: Candidate, sample: Sample) -> Sample:
    """Return a sample that sets the candidate's settings. A graph has them already; other calls need them each time."""

    def run() -> float:
        with tuning.forced(name, candidate):
            return sample()

    return run


# -- compiling all candidates in parallel ------------------------------------------------------------------------------


def candidate_launches(
    target: Target, *, op: str, cases: Sequence[str], dtype: torch.dtype, tried: Sequence[Candidate]
) -> list[OpLaunch]:
    """Return the launches of each candidate, whose number is the case."""
    (one,) = [one for one in OPS if one.name == op]
    wanted = []
    for case in one.cases:
        if case.id in cases:
            for number, candidate in enumerate(tried):
                with tuning.forced(op, candidate), recorded() as launches:
                    one(*one.inputs(Make(torch.device("meta"), dtype), **case.sizes))
                wanted += [OpLaunch(op, str(number), launch, one.may_spill) for launch in launches]
    return wanted


def _compiled(
    op: Op, cases: Sequence[Case], dtype: torch.dtype, device: torch.device, tried: list[Candidate]
) -> list[int]:
    """Return the numbers of the candidates that compile without spills; all candidates if that cannot be determined."""
    everyone = set(range(len(tried)))
    if device.type != "cuda" or architecture(device) not in TARGETS:
        return sorted(everyone)
    source = partial(candidate_launches, op=op.name, cases=[case.id for case in cases], dtype=dtype, tried=tried)
    rows = compile_all(
        [source],
        [TARGETS[architecture(device)]],
        devices=[torch.cuda.get_device_name(device)],
        processes=len(os.sched_getaffinity(0)),
    )
    bad = {int(number) for row in rows if any(row.faults()) for number in row.cases}
    return sorted(everyone - bad)
