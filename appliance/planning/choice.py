"""Results of a planning decision: a value with its reason, or a refusal that names the key to change."""

from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from appliance.config import exits
from appliance.config.fix import Write
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A resolved value, with the reason if the manifest did not set it explicitly."""

    value: T
    reason: str = ""


def refuse(
    settings: Settings, key: str, message: str, cause: exits.Exit = exits.MANIFEST, instead: str = ""
) -> NoReturn:
    """Raise Refused for one key, at the source location of the key or of its section.

    `instead` is the nearest valid value, as YAML text.
    """
    path = tuple(key.split("."))
    fix = Write(instead) if instead and path in settings.tree.values else None
    raise Refused([Problem(settings.place(path), key, message, fix=fix, certain=False)], cause)
