"""Flags for every key of the manifest, generated from the schema: the key's path, as in `--engine.cache.block-tokens
32`.

A flag is equivalent to `--set` with its key: it has the same precedence and the same syntax of values. `--help` shows
the keys with a short form, `--help-all` every key by section.
"""

import argparse
import difflib
from typing import Any

from appliance.config.aliases import flat, foreign_keys
from appliance.config.keys import Key, find, keys, metadata
from appliance.config.settings import Option
from appliance.config.suggest import suggest_key


class SetKey(argparse.Action):
    """Collects --set and the flags of keys in order, so that the last value of a key wins."""

    def __call__(self, parser: argparse.ArgumentParser, space: Any, values: Any, option: str | None = None) -> None:
        if self.const:
            given = Option(next(flag for flag in self.option_strings if flag.startswith("--")), self.const, values)
        else:
            key, equals, text = str(values).partition("=")
            if not equals:
                parser.error(f"argument --set: {values} has no '='. Use --set KEY=VALUE")
            given = Option(f"--set {key}", key.strip(), text)
        setattr(space, self.dest, (*getattr(space, self.dest), given))


def flagged() -> tuple[Key, ...]:
    """Return the keys with a flag: all values, and the mapping of secrets as a whole, because the operator chooses its
    names."""
    return tuple(key for key in keys().values() if key.kind not in ("section", "layer") and "*" not in key.path)


def short_flags(key: Key) -> tuple[str, ...]:
    """Return the other flags of a key. `slipway plan` names the long one, if there is one, as the source."""
    declared = metadata().get(key.name)  # the mapping of secrets has none
    return () if declared is None else declared.flags


def flag(key: Key) -> str:
    return f"--{key.name.replace('_', '-')}"


def add_flags(command: argparse.ArgumentParser, *, every: bool) -> None:
    """Add --set, --overlay and a flag for each key. The help shows the keys with a short form; with `every` it shows
    all, in one group per section."""
    command.add_argument(
        *("-s", "--set"),
        dest="options",
        default=(),
        action=SetKey,
        metavar="KEY=VALUE",
        help="set a key, overriding environment and manifest, such as endpoints.port=9000; repeatable",
    )
    command.add_argument(
        "--overlay",
        dest="overlays",
        default=[],
        action="append",
        metavar="NAME",
        help="apply an overlay of the manifest, or a file (a name with / or .yaml); repeatable",
    )
    command.add_argument("--help-all", action="help", help="show this help with the flags of all keys, and exit")
    sections: dict[tuple[str, ...], Any] = {(): command}
    for key in flagged():
        above = key.path[:-1]
        if above not in sections:
            section = keys()[above]
            sections[above] = command.add_argument_group(section.name, section.text) if every else command
        short = short_flags(key)
        default = key.default_text() if key.required else f"default {key.default_text()}"
        text = f"{key.text} [{key.allowed}; {default}]"
        sections[above].add_argument(
            *short,
            flag(key),
            dest="options",
            default=(),
            action=SetKey,
            const=key.name,
            metavar=key.path[-1].upper(),
            help=text.replace("%", "%%") if every or short else argparse.SUPPRESS,
        )


def suggest_flag(word: str, others: set[str]) -> str:
    """Return a suggestion for an unknown `--word`: a key with this name here or in another server, one of the command's
    `others`, or a similar key."""
    path = tuple(word.removeprefix("--").replace("-", "_").split("."))
    above = find(path)
    if above and above.kind == "section":
        below = next(key for key in flagged() if key.path[: len(path)] == path)
        return f"it is a section. Use flags such as {flag(below)}, or --set {above.name}={{…}}"
    name = flat("".join(path))
    meant = [key for key in flagged() if name in (flat("".join(key.path)), flat(key.path[-1]))]
    if not meant and (foreign := foreign_keys().get(name)):
        meant = [key for key in flagged() if key.name == foreign]
    if not meant and (close := difflib.get_close_matches(word, others, 1, 0.6)):
        return f"did you mean {close[0]}?"
    if not meant:
        targets = {target for tail in (path, path[-1:]) for target in suggest_key(tail)[1]}
        meant = [key for key in flagged() if key.path in targets]
    if meant:
        return f"did you mean {' or '.join(map(flag, meant))}?"
    close = difflib.get_close_matches(word, map(flag, flagged()), 1, 0.6)
    return f"did you mean {close[0]}?" if close else "--help-all lists the flags of all keys"
