"""Where a wrong value that was interpolated is put right: in what gave it, not in the text that names that."""

from dataclasses import replace

from appliance.declare.document import is_secret, masked
from appliance.declare.locate import Spelled, Tree, dotted
from appliance.declare.problems import Problem, short
from appliance.declare.remedy import Move, Replace, Write


def mended_where_written(problem: Problem, tree: Tree) -> Problem:
    """The problem with a remedy for where its value was written: the value of a variable, a default, or a variable of
    the environment, of which the message says how to set it. The message names the text that stands at the place."""
    spelled = next((one for path, one in tree.spelled.items() if dotted(path) == problem.key), None)
    if spelled is None or isinstance(problem.remedy, Replace):
        return problem
    match problem.remedy:
        case Write(text):
            problem = _at_giver(problem, spelled, text)
        case Move(path, text) if text:
            problem = replace(problem, remedy=Move(path))
    said = short(masked(spelled.text))
    if said in problem.message or is_secret(tuple(problem.key.split("."))) or problem.code == "unknown-key":
        return problem
    return replace(problem, message=f"{problem.message}; the value is that of {said}")


def _at_giver(problem: Problem, spelled: Spelled, text: str) -> Problem:
    giver = spelled.giver
    if giver is None:
        return replace(problem, remedy=None)
    certain = problem.certain and not spelled.shared
    if spelled.default is not None:
        remedy = Replace(f":-{spelled.default}}}", f":-{text}}}") if text.isprintable() and text[:1] != '"' else None
        return replace(problem, remedy=remedy, mend_at=giver, certain=certain)
    problem = replace(problem, mend_at=giver, certain=certain)
    if giver.line:
        return problem
    message, hint = problem.message, f"set {giver}={text}"
    if problem.hint.startswith("write "):  # it says how to write the value in the file
        message = message.removesuffix(f"; {problem.hint}")
        return replace(problem, hint=hint, message=f"{message}; {hint}")
    before = " " if message.endswith("?") else "; "
    return replace(problem, hint=f"{problem.hint}{before}{hint}".strip("; "), message=f"{message}{before}{hint}")
