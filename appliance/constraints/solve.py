"""Solver: finds the preferred choices that satisfy every rule, or a minimal conflict.

The solver backtracks over the variables in order and evaluates a rule as soon as its last variable has a value. After a
failure it returns to the last variable that the failure depends on (conflict-directed backjumping, Prosser, "Hybrid
algorithms for the constraint satisfaction problem", 1993): a shortage of GPUs is found once, not for each number
format. A variable is open (`auto`: the values it may resolve to), written (one value), or freed (all values that could
be written). A minimal conflict is found by freeing variables one at a time while there is still no solution: first the
open ones, then the written ones. Rules are then removed in the same way. This is the deletion filter of Chinneck,
"Feasibility and Infeasibility in Optimization", 2008, chapter 6.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.constraints.rule import Facts, Rule, Variable, View
from appliance.constraints.rules import RULES
from appliance.constraints.variables import VARIABLES


@dataclass(frozen=True)
class Situation:
    """Input of the solver."""

    facts: Facts
    written: Mapping[str, Any] = field(default_factory=dict)
    """The operator's values by variable name; missing variables are open."""

    def with_values(self, **values: Any) -> "Situation":
        """Return a copy with these values; None makes a variable open."""
        kept = {**self.written, **values}
        return replace(self, written={name: value for name, value in kept.items() if value is not None})


@dataclass(frozen=True)
class Conflict:
    """A minimal conflict."""

    written: tuple[Variable, ...]  # written variables, each of them necessary for the conflict
    open: tuple[Variable, ...]  # open variables, each of them necessary for the conflict
    rules: tuple[Rule, ...]  # rules that they break together
    instead: Mapping[str, tuple[Any, ...]]
    """By variable: values that would resolve the conflict, which may also be written for an open variable."""


def solve(
    situation: Situation,
    *,
    rules: Sequence[Rule] = RULES,
    variables: Sequence[Variable] = VARIABLES,
    freed: Collection[str] = (),
) -> View | None:
    """Return the choices, or None if there is no solution."""
    view = View(situation.facts)
    # Written variables have one value. Assigning them first changes no preference and ends a futile search early.
    variables = sorted(variables, key=lambda variable: variable.name not in situation.written or variable.name in freed)
    bits = {variable.name: 1 << at for at, variable in enumerate(variables)}
    due: list[list[tuple[Rule, int]]] = [[] for _ in range(len(variables) + 1)]
    for rule in rules:
        read = sum(bits[key] for key in rule.keys)
        due[read.bit_length()].append((rule, read))

    def search(at: int) -> int | None:
        """Return None once all variables have values, else the variables that the failure depends on, as bits."""
        for rule, read in due[at]:
            if not rule.holds(view):
                return read
        if at == len(variables):
            return None
        variable, bit = variables[at], 1 << at
        is_open = variable.name not in situation.written and variable.name not in freed
        involved = sum(bits[name] for name in variable.reads) if is_open else 0
        for value in domain(variable, situation, view, freed):
            setattr(view, variable.name, value)
            failed = search(at + 1)
            if failed is None or not failed & bit:
                return failed  # another value would fail in the same way
            involved |= failed
        return involved & ~bit

    return view if search(0) is None else None


def domain(variable: Variable, situation: Situation, view: View, freed: Collection[str] = ()) -> tuple[Any, ...]:
    """Return the candidate values of a variable, best first, given the earlier variables in `view`."""
    written = situation.written.get(variable.name)
    if variable.name in freed:
        own = () if written is None else (written,)
        return tuple(dict.fromkeys((*own, *variable.values(situation.facts))))
    return variable.auto(view) if written is None else (written,)


def conflicts(situation: Situation) -> tuple[Conflict, ...]:
    """Return all conflicts.

    To find the next conflict, the last written key of the previous one is opened. The alternatives for one conflict
    assume that the other conflicts are resolved in this way.
    """
    found, rest = [], situation
    while solve(rest) is None:
        found.append(conflict(rest))
        if not found[-1].written:
            break  # no key can resolve it
        rest = rest.with_values(**{found[-1].written[-1].name: None})
    if len(found) == 1:
        return tuple(found)
    found_conflicts = []
    for one in found:
        others = {other.written[-1].name: None for other in found if other is not one and other.written}
        alone = situation.with_values(**others)
        found_conflicts.append(
            replace(one, instead={key.name: tuple(_instead(alone, key)) for key in (*one.written, *one.open)})
        )
    return tuple(found_conflicts)


def conflict(situation: Situation) -> Conflict:
    """Return a minimal conflict of a situation without a solution."""
    freed, core = _core(situation)
    rules = least_rules(situation, freed)
    written = tuple(variable for variable in core if variable.name in situation.written)
    return Conflict(
        written,
        tuple(variable for variable in core if variable.name not in situation.written),
        rules,
        {variable.name: tuple(_instead(situation, variable)) for variable in core},
    )


def _core(situation: Situation) -> tuple[frozenset[str], tuple[Variable, ...]]:
    """Return the variables that can be freed without creating a solution, and the remaining variables."""
    freed: frozenset[str] = frozenset()
    for variable in sorted(VARIABLES, key=lambda variable: variable.name in situation.written):
        if solve(situation, freed=freed | {variable.name}) is None:
            freed |= {variable.name}
    return freed, tuple(variable for variable in VARIABLES if variable.name not in freed)


def least_rules(situation: Situation, freed: Collection[str] = ()) -> tuple[Rule, ...]:
    """Return a minimal set of rules without a solution: removing any one of them creates a solution."""
    kept = list(RULES)
    for rule in RULES:
        rest = [other for other in kept if other is not rule]
        if solve(situation, rules=rest, freed=freed) is None:
            kept = rest
    return tuple(kept)


def _instead(situation: Situation, variable: Variable) -> Iterator[Any]:
    """Yield the values that satisfy all rules with everything else unchanged; None means open."""
    if variable.name in situation.written and solve(situation.with_values(**{variable.name: None})) is not None:
        yield None
    for value in variable.values(situation.facts):
        changed = situation.with_values(**{variable.name: value})
        if value != situation.written.get(variable.name) and solve(changed) is not None:
            yield value


def passed_over(situation: Situation, view: View, variable: Variable) -> tuple[Rule, ...]:
    """Return the rules that exclude the preferred value of an open variable, given the choices before it.

    Return no rules if the variable has its preferred value.
    """
    before = {other.name: getattr(view, other.name) for other in VARIABLES[: VARIABLES.index(variable)]}
    first = domain(variable, situation, view)[0]
    if first == getattr(view, variable.name):
        return ()
    return least_rules(replace(situation, written={**situation.written, **before, variable.name: first}))
