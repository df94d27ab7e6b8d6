"""Limit on the number of values of a request body, so that no body costs seconds of validation and rendering."""

from typing import Any, Final

from appliance.server.errors.api import BadRequest

MAX_VALUES: Final = 2**16
"""Maximum number of objects, lists, texts and numbers in a body. A list of token ids counts as one value."""

IDS: Final = frozenset(
    (
        *("prompt", "input", "inputs", "tokens", "query", "items"),
        *("allowed_token_ids", "stop_token_ids", "logprob_token_ids"),
    )
)
"""Fields that may contain lists of token ids."""

COUNTED_FROM: Final = 2 * MAX_VALUES
"""Bytes of the smallest body that can exceed the limit: a value takes two bytes."""


MAX_ENTRIES: Final = {"messages": 8192, "tools": 1024, "functions": 1024}
"""Maximum length of lists whose entries are more expensive than others."""


def check_counts(body: dict[str, Any], size: int) -> None:
    """Raise BadRequest if a body of `size` bytes has too many values or a list with too many entries.

    The error names the list, or the field with the most values.
    """
    for name, most in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list) and len(value) > most:
            raise BadRequest(f"{name} has {len(value):,} entries; the limit is {most:,}.", name)
    if size >= COUNTED_FROM:
        _check_values(body)


def _check_values(body: dict[str, Any]) -> None:
    if len(body) > MAX_VALUES:
        raise BadRequest(f"The request has {len(body):,} fields; the limit is {MAX_VALUES:,} values.")
    counts = {}
    left = MAX_VALUES
    for name, value in body.items():
        counts[name] = _count(value, left, has_ids=name in IDS)
        left -= counts[name]
        if left < 0:
            largest = max(counts, key=lambda each: counts[each])
            raise BadRequest(
                f"The request has more than {MAX_VALUES:,} values, most of them in {largest[:64]!r}. Send fewer "
                "messages, tools or other entries.",
                largest[:64],
            )


def _count(value: Any, most: int, *, has_ids: bool) -> int:
    """Return the number of values within `value`, or a number above `most`."""
    count, open_values = 1, [value]
    while open_values and count <= most:
        current = open_values.pop()
        if isinstance(current, dict):
            children = list(current.values())
        elif isinstance(current, list) and not (has_ids and set(map(type, current)) == {int}):
            children = current
        else:
            continue
        count += len(children)
        open_values += (child for child in children[: most + 1] if isinstance(child, dict | list))
    return count
