"""Fixes for wrong interpolated values, applied where the value was defined instead of where it is referenced."""

from dataclasses import replace

from appliance.config.document import is_secret, masked
from appliance.config.fix import Move, Replace, Write
from appliance.config.overrides import assignment
from appliance.config.problems import Problem, short
from appliance.config.yaml_loader import Tree, dotted


def mended_where_written(problem: Problem, tree: Tree) -> Problem:
    """Return the problem with a fix at the definition of its value.

    This is the value of a variable, a default, or an environment variable, for which the message explains how to set
    it. The message quotes the text at the reference.
    """
    spelled = next((one for path, one in tree.spelled.items() if dotted(path) == problem.key), None)
    if spelled is None or isinstance(problem.remedy, Replace) or problem.code == "unknown-key":
        return problem if spelled is None or not isinstance(problem.remedy, Move) else _moved(problem, problem.remedy)
    said = short(masked(spelled.text))
    shown = said in problem.message or is_secret(tuple(problem.key.split(".")))
    from_text = "" if shown else f"the value is that of {said}"
    if not isinstance(problem.remedy, Write) or spelled.giver is None:
        return _joined(replace(_without_advice(problem), remedy=None), from_text)
    text, giver, certain = problem.remedy.text, spelled.giver, problem.certain and not spelled.shared
    problem = replace(problem, mend_at=giver, certain=certain)
    if spelled.default is not None:
        plain = not set(text) & set('"$}\n')
        remedy = Replace(f":-{spelled.default}}}", f":-{text}}}") if plain else None
        return _joined(replace(problem, remedy=remedy), from_text)
    if giver.line:
        return _joined(problem, from_text)
    return _joined(_joined(_without_advice(problem), from_text), assignment(giver, text), is_hint=True)


def _moved(problem: Problem, remedy: Move) -> Problem:
    """Return the problem with a fix that moves the key and its text unchanged."""
    return replace(problem, remedy=Move(remedy.path))


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
