"""Rules for the options of other servers. The table of a server maps names of options to rules.

Names are normalised by `flat`: max-model-len and max_model_len are equal. An option without a rule uses the key that
declares its name as an alias (config/aliases.py), and its value is converted by the type of the key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.config.aliases import flat
from appliance.config.key import Server as Alias
from appliance.config.keys import metadata

Values = Mapping[str, Any]
"""Values of a manifest by the names of their keys."""


class NoEquivalent(Exception):
    """Raised by a conversion for a valid value that Slipway has no equivalent for. The message gives the reason."""


class NothingToSet(Exception):
    """Raised by a conversion for a value that Slipway needs no key for. The message gives the reason."""


@dataclass(frozen=True)
class Key:
    """An option that sets one key."""

    key: str
    convert: Callable[[str], Any] | None = None
    """Conversion of the text, by default by the type of the key. Raises ValueError for a malformed value."""
    automatic: tuple[str, ...] = ()  # values that leave the choice to the server
    flag: bool = False  # the option takes no value; it sets `value`
    value: Any = True
    note: str = ""  # remaining difference, written next to the value


@dataclass(frozen=True)
class Keys:
    """An option that sets several keys."""

    keys: tuple[str, ...]  # keys that it can set, for the documentation
    convert: Callable[[str], Values]
    many: bool = False  # the option takes several values, which are joined by line breaks
    secret: bool = False  # the value is never shown


@dataclass(frozen=True)
class Unneeded:
    """An option that needs no key, because Slipway has the same behaviour without one."""

    reason: str
    flag: bool = False
    optional: bool = False  # the option may have a value, on, off or auto


@dataclass(frozen=True)
class Missing:
    """An option without an equivalent."""

    reason: str
    flag: bool = False
    many: bool = False
    neutral: tuple[str, ...] = ()  # values that disable the feature: nothing is lost
    secret: bool = False


Rule = Key | Keys | Unneeded | Missing


@dataclass(frozen=True)
class Server:
    """A server whose options are converted."""

    name: str
    alias: Alias | None
    """Name in the aliases of keys."""
    port: int
    """Default port of its command."""
    rules: Mapping[str, Rule]
    """Rules by the long name of an option, without dashes."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Long names by other spellings of an option, such as -tp."""
    images: tuple[str, ...] = ()
    """Parts of the names of its container images."""
    image_port: int | None = None
    """Port in its container image, if that differs."""
    local: bool = False
    """Its command accepts connections of the same machine only by default."""
    env_prefix: str = ""
    """Environment variables with this prefix set the option of the rest of the name."""
    env_options: bool = False
    """Each option can also be set by an environment variable of its name in upper case."""
    base: "Server | None" = None
    """Server whose options are accepted, too."""
    positional: str = ""
    """Option that a word without dashes sets."""
    negatable: bool = False
    """`--no-X` disables the flag X."""
    full_name: bool = False
    """The served name is the complete name of the model by default."""
    vllm_api: bool = False
    """Its API has the fields of vLLM's."""

    def rule(self, name: str) -> Rule | None:
        """Return the rule of an option by its name without dashes, or None."""
        found = {flat(known): rule for known, rule in table(self).items()}.get(flat(name))
        return found or (self.base.rule(name) if self.base else None)


def table(server: Server) -> dict[str, Rule]:
    """Return the rules of a server by the names of its options, without the rules of its base."""
    aliases = {
        word.replace("_", "-"): Key(key)
        for key, one in metadata().items()
        for word in (one.aliases.get(server.alias, ()) if server.alias else ())
    }
    declared = {flat(name) for name in server.rules}
    return {**server.rules, **{name: rule for name, rule in aliases.items() if flat(name) not in declared}}
