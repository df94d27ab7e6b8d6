"""The solver: the first choices by preference that satisfy every rule, or the least that is in conflict.

Backtracking over the variables in their order; a rule is asked as soon as the last of its variables has a value. A
variable is open (`auto`: the few values that it may become of itself), written (that value alone), or freed (all that
could be written). A conflict is what remains when everything has been freed, one by one, that it does not need: first
what is open, then what is written; then rules are left out in the same way. Source: the deletion filter of Chinneck,
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
    """`written`: the operator's values by the names of variables; what is missing is open."""

    facts: Facts
    written: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **values: Any) -> "Situation":
        """With other values; None opens a variable."""
        kept = {**self.written, **values}
        return replace(self, written={name: value for name, value in kept.items() if value is not None})


@dataclass(frozen=True)
class Conflict:
    """`written` and `open` variables of which none can be left out, and the `rules` that they break together.
    `instead`: by variable, the values with which the rest would go together; an open one may be written."""

    written: tuple[Variable, ...]
    open: tuple[Variable, ...]
    rules: tuple[Rule, ...]
    instead: Mapping[str, tuple[Any, ...]]


def solve(
    situation: Situation,
    *,
    rules: Sequence[Rule] = RULES,
    variables: Sequence[Variable] = VARIABLES,
    freed: Collection[str] = (),
) -> View | None:
    """The choices, or None where there are none."""
    view = View(situation.facts)
    # What is written has one value: to take it first changes no preference, and ends a vain search at once.
    variables = sorted(variables, key=lambda variable: variable.name not in situation.written or variable.name in freed)
    order = {variable.name: at for at, variable in enumerate(variables)}
    due: list[list[Rule]] = [[] for _ in range(len(variables) + 1)]
    for rule in rules:
        due[1 + max((order[key] for key in rule.keys), default=-1)].append(rule)

    def search(at: int) -> bool:
        if not all(rule.holds(view) for rule in due[at]):
            return False
        if at == len(variables):
            return True
        variable = variables[at]
        for value in domain(variable, situation, view, freed):
            setattr(view, variable.name, value)
            if search(at + 1):
                return True
        return False

    return view if search(0) else None


def domain(variable: Variable, situation: Situation, view: View, freed: Collection[str] = ()) -> tuple[Any, ...]:
    """What the variable may be, the best first, after those before it have their values in `view`."""
    written = situation.written.get(variable.name)
    if variable.name in freed:
        own = () if written is None else (written,)
        return tuple(dict.fromkeys((*own, *variable.values(situation.facts))))
    return variable.auto(view) if written is None else (written,)


def conflicts(situation: Situation) -> tuple[Conflict, ...]:
    """All that is in conflict, one after another: the last written key of each is opened to find the next. The ways out
    of one are those that remain when the others are resolved so."""
    found, rest = [], situation
    while solve(rest) is None:
        found.append(conflict(rest))
        if not found[-1].written:
            break  # no key mends that
        rest = rest.but(**{found[-1].written[-1].name: None})
    if len(found) == 1:
        return tuple(found)
    told = []
    for one in found:
        others = {other.written[-1].name: None for other in found if other is not one and other.written}
        alone = situation.but(**others)
        told.append(replace(one, instead={key.name: tuple(_instead(alone, key)) for key in (*one.written, *one.open)}))
    return tuple(told)


def conflict(situation: Situation) -> Conflict:
    """Of a situation without a solution: what is in conflict, the least of it."""
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
    """The variables that can be freed without a solution, and the others."""
    freed: frozenset[str] = frozenset()
    for variable in sorted(VARIABLES, key=lambda variable: variable.name in situation.written):
        if solve(situation, freed=freed | {variable.name}) is None:
            freed |= {variable.name}
    return freed, tuple(variable for variable in VARIABLES if variable.name not in freed)


def least_rules(situation: Situation, freed: Collection[str] = ()) -> tuple[Rule, ...]:
    """Rules that have no solution together, and would have one without any one of them."""
    kept = list(RULES)
    for rule in RULES:
        rest = [other for other in kept if other is not rule]
        if solve(situation, rules=rest, freed=freed) is None:
            kept = rest
    return tuple(kept)


def _instead(situation: Situation, variable: Variable) -> Iterator[Any]:
    """Values of the variable that go together with everything else as it is; None stands for leaving it open."""
    if variable.name in situation.written and solve(situation.but(**{variable.name: None})) is not None:
        yield None
    for value in variable.values(situation.facts):
        changed = situation.but(**{variable.name: value})
        if value != situation.written.get(variable.name) and solve(changed) is not None:
            yield value


def passed_over(situation: Situation, view: View, variable: Variable) -> tuple[Rule, ...]:
    """Why an open variable did not become what it prefers: the rules that exclude it, given the choices before it; none
    where it did."""
    before = {other.name: getattr(view, other.name) for other in VARIABLES[: VARIABLES.index(variable)]}
    first = domain(variable, situation, view)[0]
    if first == getattr(view, variable.name):
        return ()
    return least_rules(replace(situation, written={**situation.written, **before, variable.name: first}))
