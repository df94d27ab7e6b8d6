"""Errors that a user, an operator or a checkpoint causes; everything else is a bug and ends the process.

Each message says what was given, what is possible, and which key to change.
"""

EXIT_PERMANENT = 78  # configuration, checkpoint or memory: a restart fails the same way (sysexits.h: EX_CONFIG)
EXIT_DRIFT = 79  # its numbers are no longer those of its start: a restart helps, unless it happens again
EXIT_CRASH = 70  # anything else: a restart may help (sysexits.h: EX_SOFTWARE)


class EngineError(Exception):
    """Root of all expected errors of the engine. `code` is a stable word for logs, exit codes and API errors."""

    code = "engine_error"


class ConfigError(EngineError):
    """The engine configuration cannot work: sizes, devices, types."""

    code = "config"


class CheckpointError(EngineError):
    """The checkpoint is incomplete, damaged, or not of the declared shape."""

    code = "checkpoint"


class UnknownArchitecture(CheckpointError):
    """No declaration serves this architecture."""

    code = "architecture"


class TaskError(CheckpointError):
    """The checkpoint is whole, but cannot be served for what it is wanted for."""

    code = "task"


class OutOfMemory(EngineError):
    """The model or one block of its cache does not fit."""

    code = "memory"


class RequestError(EngineError):
    """A request cannot be served as it stands; others go on. `param` is the field to change."""

    code = "request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StepError(EngineError):
    """The model gave no usable logits for a request; others go on."""

    code = "step"


# Why a row has no token: the model's fault, and that of what its request asks for together
NOT_FINITE = "the model's output is not finite (NaN or infinity); the weights or the dtype may be at fault"
NOTHING_LEFT = "no token is possible here: grammar, allowed_token_ids, logit_bias and bad_words exclude all of them"


class SelfTestFailed(EngineError):
    """A golden prompt comes out otherwise than the lock says, before the engine served."""

    code = "self_test"


class Drift(EngineError):
    """A golden prompt comes out otherwise than it did: the engine must not go on."""

    code = "drift"


class EngineGone(EngineError):
    """The engine process ended or was never there."""

    code = "engine_gone"
