"""Messages about choices: the reason for a value, and the keys in conflict."""

from appliance.config.fix import Write
from appliance.config.problems import Problem
from appliance.config.settings import Settings
from appliance.constraints.rule import Rule, Variable, View
from appliance.constraints.solve import Conflict, Situation, conflicts, passed_over, solve

MAX_SUGGESTIONS = 6  # most suggestions listed for one key


def reason(situation: Situation, view: View, variable: Variable) -> str:
    """Return why an open variable has its value: its preference, or the rules that exclude a better value."""
    rules = passed_over(situation, view, variable)
    return "; ".join(rule.words(situation.facts) for rule in rules) or variable.why(view)


def problems(settings: Settings, situation: Situation) -> list[Problem]:
    """Return one problem for each conflict of a situation that has no solution."""
    return [_problem(settings, situation, found) for found in conflicts(situation)]


def _problem(settings: Settings, situation: Situation, found: Conflict) -> Problem:
    """Return a conflict as a problem at the last written key in it.

    Example: `fp8 cannot be combined with hardware.device: cpu (m.yaml:4:11): why; use auto or …`.
    """
    keys = (*found.open, *found.written)
    because = "; ".join(rule.words(situation.facts) for rule in _relevant(found.rules, keys[-1:]))
    if not keys:
        key = settings.manifest.model.source.key
        return Problem(settings.place(key), ".".join(key), because)
    first, others = keys[-1], keys[:-1]
    given = first.spelled(situation.written[first.name]) if found.written else "auto"
    beside = _listed([_beside(settings, situation, found, other) for other in others], "and")
    clash = f"{given} cannot be combined with {beside}" if others else given
    ways = [_alternatives(found, first), *(_alternatives(found, other, f"{other.key}: ") for other in others)]
    use = ", or ".join(filter(None, ways))
    message = "; use ".join(filter(None, (f"{clash}: {because}", use)))
    path, nearest = tuple(first.key.split(".")), _nearest(found, first)
    fix = Write(nearest) if nearest and path in settings.tree.values else None
    related = tuple(
        (one.key, settings.place(tuple(one.key.split(".")))) for one in others if one.name in situation.written
    )
    return Problem(
        *(settings.place(path), first.key, message),
        given=given,
        hint=use,
        fix=fix,
        certain=False,
        related=related,
    )


def _relevant(rules: tuple[Rule, ...], start: tuple[Variable, ...]) -> list[Rule]:
    """Sort rules so that each follows from known keys, beginning with the rules of the `start` keys."""
    known, left, found = {variable.name for variable in start}, list(rules), []
    while left:
        rule = next((rule for rule in left if known & set(rule.keys)), left[0])
        known |= set(rule.keys)
        left.remove(rule)
        found.append(rule)
    return found


def _beside(settings: Settings, situation: Situation, found: Conflict, variable: Variable) -> str:
    """Format another key of the conflict.

    Examples: `hardware.device: cpu (m.yaml:4:11)`, `hardware.device: auto (cuda here)`.
    """
    if variable.name in situation.written:
        value = variable.spelled(situation.written[variable.name])
        place = settings.place(tuple(variable.key.split(".")))
        return f"{variable.key}: {value} ({', '.join(filter(None, (str(place), place.through())))})"
    alone = solve(situation.with_values(**{one.name: None for one in found.written}))
    here = "" if alone is None else f" ({variable.spelled(getattr(alone, variable.name))} here)"
    return f"{variable.key}: auto{here}"


def _alternatives(found: Conflict, variable: Variable, before: str = "") -> str:
    """Return the values of one key that resolve the conflict as text after `before`, or "" if there are none."""
    values = found.instead[variable.name]
    if variable.limit and len(values) > 1:
        most = max(value for value in values if value is not None)
        return f"{before}at most {most}, or auto"
    if variable.sole:
        values = tuple(value for value in values if value is not None)
    words = list(dict.fromkeys("auto" if value is None else variable.spelled(value) for value in values))
    return before + _listed(words[:MAX_SUGGESTIONS], "or") if words else ""


def _nearest(found: Conflict, variable: Variable) -> str:
    """Return the value to suggest: the largest for a limit, else the first that resolves the conflict."""
    values = [value for value in found.instead[variable.name] if value is not None or not variable.sole]
    numbers = [value for value in values if value is not None]
    if variable.limit and numbers:
        return str(max(numbers))
    return next(("auto" if value is None else variable.spelled(value) for value in values), "")


def _listed(words: list[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
