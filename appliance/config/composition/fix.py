"""Fixes for wrong interpolated values, applied where the value was defined instead of where it is referenced."""

from dataclasses import replace

from appliance.config.document import is_secret, masked
from appliance.config.fix import Move, Replace, Write
from appliance.config.overrides import assignment
from appliance.config.problems import Problem, short
from appliance.config.yaml_loader import Tree, dotted


def fix_at_definition(problem: Problem, tree: Tree) -> Problem:
    """Return the problem with a fix at the definition of its value.

    This is the value of a variable, a default, or an environment variable, for which the message explains how to set
    it. The message quotes the text at the reference.
    """
    interpolated = next((one for path, one in tree.interpolated.items() if dotted(path) == problem.key), None)
    if interpolated is None or isinstance(problem.fix, Replace) or problem.code == "unknown-key":
        return problem if interpolated is None or not isinstance(problem.fix, Move) else _moved(problem, problem.fix)
    said = short(masked(interpolated.text))
    shown = said in problem.message or is_secret(tuple(problem.key.split(".")))
    from_text = "" if shown else f"the value comes from {said}"
    if not isinstance(problem.fix, Write) or interpolated.definition is None:
        return _joined(replace(_without_advice(problem), fix=None), from_text)
    text, definition, certain = problem.fix.text, interpolated.definition, problem.certain and not interpolated.shared
    problem = replace(problem, fix_at=definition, certain=certain)
    if interpolated.default is not None:
        plain = not set(text) & set('"$}\n')
        fix = Replace(f":-{interpolated.default}}}", f":-{text}}}") if plain else None
        return _joined(replace(problem, fix=fix), from_text)
    if definition.line:
        return _joined(problem, from_text)
    return _joined(_joined(_without_advice(problem), from_text), assignment(definition, text), is_hint=True)


def _moved(problem: Problem, fix: Move) -> Problem:
    """Return the problem with a fix that moves the key and its text unchanged."""
    return replace(problem, fix=Move(fix.path))


def _without_advice(problem: Problem) -> Problem:
    """Remove a hint that explains how to write the value in the file."""
    if not problem.hint.startswith(("write ", "leave ")):
        return problem
    return replace(problem, hint="", message=problem.message.removesuffix(problem.hint).removesuffix("; "))


def _joined(problem: Problem, text: str, *, is_hint: bool = False) -> Problem:
    if not text:
        return problem
    between = " " if problem.message.endswith("?") else "; "
    hint = f"{problem.hint}{between if problem.hint else ''}{text}" if is_hint else problem.hint
    return replace(problem, message=f"{problem.message}{between}{text}", hint=hint)
