"""YAML syntax errors, with the most likely cause."""

import re

import yaml

from appliance.config.document import within_secrets


def explain(error: yaml.MarkedYAMLError, text: str) -> tuple[int, int, str, str]:
    """Return line and column (from 1), the error message, and a fix ("" if unknown)."""
    mark = error.problem_mark or error.context_mark
    if "unexpected end of stream" in (error.problem or "") and error.context_mark:
        mark = error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.splitlines()
    problem = (error.problem or "cannot be read").replace("\\t", "tab")
    message = f"not valid YAML: {problem}"
    # The parser reports where it failed. The cause is often a key without a space after its colon, there or a line
    # above.
    for number in (line, line - 1):
        if 0 <= number < len(lines) and (match := re.match(r"\s*(- )?([A-Za-z_]\w*):([^\s/].*)$", lines[number])):
            fixed = f"{match[2]}: {'…' if within_secrets(lines, number + 1) else match[3]}"
            return number + 1, match.start(2) + 1, message, f"a space must follow the colon: {fixed}"
    here = lines[line] if line < len(lines) else ""
    if here[column - 1 : column + 1] == "${" and (match := re.match(r"\$\{[^}]*\}?", here[column - 1 :])):
        return line + 1, column, message, f'within {{ }} and [ ] interpolation needs quotes: "{match[0]}"'
    return line + 1, column + 1, message, _hint(problem, here, column)


def _hint(problem: str, line: str, column: int) -> str:
    if "\t" in line[column : column + 1]:
        return "use spaces"
    if "unexpected end of stream" in problem:
        return "the quote that opens here is not closed"
    if "mapping values are not allowed" in problem:
        return "quote a text that contains ': ', or check the indentation"
    if "chomping or indentation" in problem:
        return f'put a text that begins with {line[column - 1 : column]} in quotes: "{line[column - 1 :].strip()}"'
    if "found character" in problem and column < len(line):
        return f"put a text that begins with {line[column]} in quotes"
    if "block end" in problem or "<block mapping start>" in problem:
        return "check the indentation: keys of one section start in the same column"
    if "expected ',' or" in problem:
        return "a { or [ is not closed, or a comma is missing"
    return ""
