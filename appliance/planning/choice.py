"""What a plan decides: a value with its reason, or a refusal with the place of the key to change."""

from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from appliance.config import exits
from appliance.config.fix import Write
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value, and the reason where it was not simply asked for."""

    value: T
    reason: str = ""


def refuse(
    settings: Settings, key: str, message: str, cause: exits.Exit = exits.MANIFEST, instead: str = ""
) -> NoReturn:
    """Refuses the plan because of one key, at the place where it, or the section around it, was written. `instead` is
    the nearest value that can be had, as YAML text."""
    path = tuple(key.split("."))
    remedy = Write(instead) if instead and path in settings.tree.values else None
    raise Refused([Problem(settings.place(path), key, message, remedy=remedy, certain=False)], cause)
