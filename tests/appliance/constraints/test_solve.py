"""The solver compared with brute force over the product of all values: preferred solution, smallest conflict, fixes."""

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import contains, or_
from typing import Any

import pytest

from appliance.constraints.facts import ModelFacts
from appliance.constraints.rule import Facts, Rule, Variable, View
from appliance.constraints.rules import RULES
from appliance.constraints.solve import Situation, conflict, conflicts, least_rules, passed_over, solve
from appliance.constraints.variables import VARIABLES
from appliance.hardware.machine import Gpu, Machine
from tests.tiers import thinned

GIB = 2**30
BARE = Machine(2, "affinity", 8 * GIB, "MemAvailable", no_gpu="no driver")
COMPILED = replace(BARE, kernels=("avx512", "avx2", "base"))


def gpus(count: int = 1, capability: tuple[int, int] = (9, 0), **more: Any) -> Machine:
    return replace(COMPILED, gpus=(Gpu("GPU", 80 * GIB, 79 * GIB, capability),) * count, triton=True, **more)


PLAIN = ModelFacts(dtype="bfloat16", max_context=2, heads=((4, 2),), intermediate_sizes=(96,))
QUANTIZED = replace(PLAIN, quantized="4 bits (gptq)", held=True, whole=(1, 2))
GGUF = replace(PLAIN, quantized="gguf (other types)", quantizable=True, float16_pages=True, restored=9)
FACTS = {
    "a bare CPU": Facts(PLAIN, BARE),
    "a CPU": Facts(PLAIN, COMPILED),
    "a CPU and unlike experts": Facts(replace(PLAIN, mixed_expert_formats=("stored",)), COMPILED),
    "a CPU and a quantized checkpoint": Facts(QUANTIZED, COMPILED),
    "a CPU and a GGUF file": Facts(GGUF, COMPILED),
    "four GPUs": Facts(PLAIN, gpus(4)),
    "a GPU without Triton": Facts(PLAIN, replace(gpus(), triton=False)),
    "an old GPU": Facts(PLAIN, gpus(capability=(7, 5))),
    "a GPU without fp8": Facts(replace(PLAIN, dtype="float16"), gpus(capability=(8, 0), kernels=())),
    "a GPU and experts": Facts(replace(PLAIN, experts=True), gpus(2)),
    "a GPU and a model that pools": Facts(replace(PLAIN, pools=True), gpus(2)),
    "a GPU and odd heads": Facts(replace(PLAIN, head_sizes=(12,)), gpus()),
    "two GPUs, of which one is too small": Facts(PLAIN, gpus(2), lambda view: "" if view.tensor > 1 else "8 GiB"),
    "a model that nothing can mend": Facts(replace(PLAIN, normed_together=True), COMPILED),
    "unequal pages": Facts(replace(PLAIN, pages=((2, 64), (4, 64))), gpus()),
}
# Values that no variable proposes, some of which nothing allows.
MORE: dict[str, tuple[Any, ...]] = {"max_context": (3,), "tensor": (3,)}


def pool(variable: Variable, facts: Facts) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*variable.values(facts), *MORE.get(variable.name, ()))))


@dataclass(frozen=True)
class Lawful:
    """All assignments that satisfy the rules. A set of them is an integer: bit n is assignment n."""

    facts: Facts
    assignments: list[tuple[Any, ...]]  # values in the order of VARIABLES
    having: dict[str, dict[Any, int]]  # by variable and value: assignments with this value
    automatic: dict[str, int]  # by variable: assignments whose value is one of those that auto has there

    def members(self, chosen: int) -> Iterator[tuple[Any, ...]]:
        while chosen:
            yield self.assignments[(chosen & -chosen).bit_length() - 1]
            chosen &= chosen - 1


FIRST = 7  # variables whose rules are checked before the others have values: most assignments break one


def lawful(facts: Facts) -> Lawful:
    """Find every lawful assignment by trying all."""
    pools = [pool(variable, facts) for variable in VARIABLES]
    first = {one.name for one in VARIABLES[:FIRST]}
    early, found = [rule for rule in RULES if first.issuperset(rule.keys)], []
    for head in itertools.product(*pools[:FIRST]):
        if not all(rule.holds(View(facts, *head)) for rule in early):
            continue
        for tail in itertools.product(*pools[FIRST:]):
            view = View(facts, *head, *tail)
            if all(rule.holds(view) for rule in RULES):
                found.append((*head, *tail))
    columns = {one.name: [values[at] for values in found] for at, one in enumerate(VARIABLES)}
    return Lawful(
        facts,
        found,
        {
            one.name: {value: set_of(each == value for each in columns[one.name]) for value in values}
            for one, values in zip(VARIABLES, pools, strict=True)
        },
        {one.name: set_of(map(contains, auto_values(one, facts, columns), columns[one.name])) for one in VARIABLES},
    )


def set_of(flags: Iterable[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in flags)[::-1] or "0", 2)


def auto_values(variable: Variable, facts: Facts, columns: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of auto at each assignment, computed once for all that agree in the variables that auto reads
    (test_rules.py)."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for at in range(len(columns[variable.name])):
        read = tuple(columns[name][at] for name in variable.reads)
        if read not in known:
            known[read] = variable.auto(View(facts, **dict(zip(variable.reads, read, strict=True))))
        yield known[read]


def choices(every: Lawful, situation: Situation, freed: frozenset[str] = frozenset()) -> int:
    """Return the assignments that a situation allows, as a set."""
    left = (1 << len(every.assignments)) - 1
    for one in VARIABLES:
        written, having = situation.written.get(one.name), every.having[one.name]
        if one.name in freed:
            values = dict.fromkeys((written, *one.values(situation.facts)))
            left &= reduce(or_, (having.get(value, 0) for value in values))
        else:
            left &= every.automatic[one.name] if written is None else having.get(written, 0)
    return left


def rank(values: tuple[Any, ...], situation: Situation) -> tuple[int, ...]:
    view = View(situation.facts, *values)
    open_ = [one for one in VARIABLES if one.name not in situation.written]
    return tuple(one.auto(view).index(getattr(view, one.name)) for one in open_)


def situations(facts: Facts, seed: int, count: int) -> list[Situation]:
    """With a few keys written, each to any value."""
    draw = random.Random(seed)
    found = [Situation(facts)]
    for _ in range(count):
        chosen = draw.sample(VARIABLES, draw.randint(1, 5))
        found.append(Situation(facts, {one.name: draw.choice(pool(one, facts)) for one in chosen}))
    return found


def test_the_fields_of_a_view_are_the_variables_in_their_order() -> None:
    assert [one.name for one in VARIABLES] == list(View.__dataclass_fields__)[1:]


# The brute force takes longest where most assignments are lawful. The facts kept are of every kind: both devices, each
# state of the kernels, all refusals by the model, and several GPUs.
FEW = (
    *("a bare CPU", "a CPU and unlike experts", "a CPU and a quantized checkpoint", "a CPU and a GGUF file"),
    *("four GPUs", "a GPU and a model that pools", "a model that nothing can mend"),
)


@pytest.mark.parametrize("name", thinned(FACTS, FEW))
def test_the_solver_matches_brute_force(name: str) -> None:
    facts = FACTS[name]
    every, solved, refused = lawful(facts), 0, 0
    for situation in situations(facts, seed=len(name), count=20):
        found, possible = solve(situation), choices(every, situation)
        if not possible:
            assert found is None, situation.written
            check_conflict(situation, every)
            check_conflicts(situation, every)
            refused += 1
            continue
        best = min(every.members(possible), key=lambda values: rank(values, situation))
        assert found == View(facts, *best), situation.written
        solved += 1
    assert refused >= 5 and (solved >= 2 or refused == 21), (solved, refused)


def check_conflict(situation: Situation, every: Lawful) -> None:
    """Check that the reported conflict is real and minimal, and that all fixes are listed."""
    found = conflict(situation)
    core = {one.name for one in (*found.written, *found.open)}
    freed = frozenset(one.name for one in VARIABLES) - core
    assert {one.name for one in found.written} == core & situation.written.keys()
    assert not choices(every, situation, freed), situation.written
    for name in core:
        assert choices(every, situation, freed | {name}), (situation.written, name)
    for variable in (*found.written, *found.open):
        ways = set(found.instead[variable.name])
        for value in (None, *variable.values(situation.facts)):
            changed = situation.with_values(**{variable.name: value})
            if changed.written != situation.written:
                assert (value in ways) == bool(choices(every, changed)), (situation.written, variable.name, value)
    check_rules(situation, found.rules, freed)


def check_conflicts(situation: Situation, every: Lawful) -> None:
    """Together they are all: with the last key of each opened, the rest has a solution; and so has each way out."""
    found = conflicts(situation)
    lasts = {one.written[-1].name: None for one in found if one.written}
    assert [one.written for one in found[:-1] if not one.written] == []
    assert bool(choices(every, situation.with_values(**lasts))) == bool(found[-1].written), situation.written
    for one in found:
        others = {name: None for name in lasts if not one.written or name != one.written[-1].name}
        for variable in (*one.written, *one.open):
            for value in one.instead[variable.name]:
                assert choices(every, situation.with_values(**{**others, variable.name: value})), (
                    situation.written,
                    value,
                )


def check_rules(situation: Situation, rules: tuple[Rule, ...], freed: frozenset[str]) -> None:
    assert solve(situation, rules=rules, freed=freed) is None
    for rule in rules:
        rest = [other for other in rules if other is not rule]
        assert solve(situation, rules=rest, freed=freed) is not None, (situation.written, rule.name)


@pytest.mark.parametrize(
    ("name", "variable", "rules"),
    [
        ("a CPU", "kernels", []),
        ("a GPU without Triton", "kernels", ["triton-there"]),
        ("a GPU and experts", "kernels", []),
        ("a GPU and a model that pools", "kernels", []),
        ("a GPU and odd heads", "kernels", ["triton-heads"]),
        ("an old GPU", "dtype", ["bfloat16"]),
        ("a CPU and unlike experts", "kernels", ["compiled-experts"]),
        ("two GPUs, of which one is too small", "tensor", ["memory"]),
    ],
)
def test_a_preferred_value_was_passed_over_for_these_rules(name: str, variable: str, rules: list[str]) -> None:
    situation = Situation(FACTS[name])
    view = solve(situation)
    assert view is not None
    own = next(one for one in VARIABLES if one.name == variable)
    assert [rule.name for rule in passed_over(situation, view, own)] == rules


def test_graphs_are_captured_where_tokens_are_drawn() -> None:
    for name, graphs in (("four GPUs", True), ("a GPU and a model that pools", False), ("a CPU", False)):
        view = solve(Situation(FACTS[name]))
        assert view is not None and view.graphs is graphs


def test_a_written_type_passes_compiled_kernels_over() -> None:
    situation = Situation(FACTS["a CPU"], {"dtype": "float16"})
    view = solve(situation)
    assert view is not None and view.kernels == "torch"
    own = next(one for one in VARIABLES if one.name == "kernels")
    assert [rule.name for rule in passed_over(situation, view, own)] == ["compiled-float32"]


def test_the_fewest_ranks_that_hold_the_model_are_taken() -> None:
    for least in (1, 2, 4):
        facts = Facts(PLAIN, gpus(4), lambda view, least=least: "" if view.tensor >= least else "no room")
        found = solve(Situation(facts))
        assert found is not None and found.tensor == least
    none = Situation(Facts(PLAIN, gpus(4), lambda view: "no room"))
    assert solve(none) is None and [rule.name for rule in least_rules(none)] == ["memory"]


def test_an_answer_takes_milliseconds() -> None:
    legal = Situation(FACTS["four GPUs"])
    refused = Situation(FACTS["four GPUs"], {"device": "cpu", "kv_cache": "fp8", "tensor": 1})
    for work, limit_s in ((lambda: solve(legal), 0.005), (lambda: conflict(refused), 0.05)):
        taken = []
        for _ in range(5):
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
        assert min(taken) < limit_s


def test_conflicts_name_written_keys_before_open_ones() -> None:
    """fp8 pages do not go with torch kernels, which are written, on any device."""
    found = conflict(Situation(FACTS["four GPUs"], {"kernels": "torch", "kv_cache": "fp8", "tensor": 1}))
    assert [one.name for one in found.written] == ["kernels", "kv_cache"] and found.open == ()


def test_a_freed_number_keeps_the_one_that_was_written() -> None:
    """Only blocks of 6 tokens fit, and the solver would never propose them."""
    facts = Facts(PLAIN, gpus(), lambda view: "" if view.block_tokens == 6 else "no room")
    assert solve(Situation(facts, {"block_tokens": 6})) is not None
    found = conflict(
        Situation(facts, {"block_tokens": 6, "kv_cache": "float16", "device": "cuda", "dtype": "bfloat16"})
    )
    assert [one.name for one in found.written] == ["device", "dtype", "kv_cache"]
    assert [one.name for one in found.open] == ["kernels"] and [rule.name for rule in found.rules] == ["triton-pages"]
