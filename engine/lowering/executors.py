"""Executors that other packages provide: functions that replace those of torch's executor.

A package registers an entry point of the group `slipway.executors`, with the name that `hardware.executor` selects:

    [project.entry-points."slipway.executors"]
    toy = "toy_executor:FUNCTIONS"

The value maps operations (engine/lowering/operations) to functions of the operation and the values of a step (`Run` in
engine/layers/reference/run.py). Operations that it leaves out are executed by torch. Its module is imported only by an
engine whose configuration names it.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from engine.api.errors import ConfigError
from engine.lowering.program import Op

GROUP = "slipway.executors"
Functions = Mapping[type, Callable[[Any, Any], None]]


def executor_names() -> tuple[str, ...]:
    """Return the names of the installed executors, without importing them."""
    return tuple(sorted({one.name for one in entry_points(group=GROUP)}))


def unknown_executor(name: str) -> str:
    """Return the message for an executor that is not installed."""
    known = ", ".join(executor_names())
    return f"{name}: no installed package has this executor; {f'there are {known}' if known else 'there is none'}"


def load_functions(name: str) -> Functions:
    """Return the functions of an executor. Raises ConfigError if its package is missing or unusable."""
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise ConfigError(f"hardware.executor={unknown_executor(name)}")
    package = found.dist.name if found.dist is not None else found.module
    what = f"hardware.executor={name}: {found.value} of the package {package}"
    try:
        functions = found.load()
    except Exception as error:  # any code of another package
        raise ConfigError(f"{what} cannot be imported: {error!r}; repair or remove that package") from error
    if not isinstance(functions, Mapping):
        raise ConfigError(f"{what} is not a mapping from operations to functions; update it")
    for op, function in functions.items():
        if not isinstance(op, type) or not issubclass(op, Op):
            raise ConfigError(f"{what} has a function for {op!r}, which is not an operation; update it")
        if not callable(function):
            raise ConfigError(f"{what} has no function for {op.__name__}; update it")
    return functions
