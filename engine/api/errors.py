"""Errors caused by a user, an operator or a checkpoint. Any other exception is a bug and ends the process.

Each message contains the given value, the allowed values, and the key to change.
"""

EXIT_PERMANENT = 78  # configuration, checkpoint or memory: a restart fails the same way (sysexits.h: EX_CONFIG)
EXIT_DRIFT = 79  # outputs differ from those at the start: a restart helps unless it happens again
EXIT_CRASH = 70  # anything else: a restart may help (sysexits.h: EX_SOFTWARE)


class EngineError(Exception):
    """Base class of all expected errors of the engine. `code`: stable identifier for logs and API errors."""

    code = "engine_error"


class ConfigError(EngineError):
    """The engine configuration is invalid: sizes, devices or types."""

    code = "config"


class CheckpointError(EngineError):
    """The checkpoint is incomplete, damaged, or does not match its declared shapes."""

    code = "checkpoint"


class UnknownArchitecture(CheckpointError):
    """The architecture is not supported."""

    code = "architecture"


class TaskError(CheckpointError):
    """The checkpoint is valid, but does not support the requested task."""

    code = "task"


class OutOfMemory(EngineError):
    """The model or one block of its KV cache does not fit into memory."""

    code = "memory"


class RequestError(EngineError):
    """A request is invalid. Other requests are not affected. `param`: the field to change."""

    code = "request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StepError(EngineError):
    """The model produced no usable logits for a request. Other requests are not affected."""

    code = "step"


# Reasons why a row has no token: the model's output, and the constraints of the request.
NOT_FINITE = "the model's output is not finite (NaN or infinity); the weights or the dtype may be at fault"
NOTHING_LEFT = "no token is possible here: grammar, allowed_token_ids, logit_bias and bad_words exclude all of them"


class SelfTestFailed(EngineError):
    """A golden prompt at the start gave other outputs than the lock file has."""

    code = "self_test"


class Drift(EngineError):
    """A golden prompt gave other outputs than at the start of the engine, which must stop."""

    code = "drift"


class EngineGone(EngineError):
    """The engine process exited or was never started."""

    code = "engine_gone"
