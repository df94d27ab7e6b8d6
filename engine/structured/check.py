"""Check grammars by compiling them in a separate process: `python -m engine.structured.check BYTES`.

The process has limited memory and a small stack, and its parent may kill it at any time, so that a hostile grammar can
only break this process. Input lines are JSON {"kind", "text"}; output lines are {"fault"}, "" if the grammar compiles.
Checks that need the model's tokenizer (special tokens by name) are left to the engine.
"""

import ctypes
import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.api.errors import RequestError
from engine.api.messages import Grammar
from engine.structured.definition import LIMITS, definition, reason

STACK: Final = 4 << 20  # bytes, less than an engine's: what compiles here does not overflow the stack there
_PR_SET_PDEATHSIG: Final = 1
_NAMES: Final = ("no tokenizer - can't validate",)  # error about token names, which only the engine knows


class _Bytes:
    """A vocabulary of single bytes."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end of text>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def fault(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return why the grammar cannot be compiled or has no first token, or ""."""
    try:
        text = definition(grammar)
    except RequestError as error:
        return str(error)
    found = LLMatcher.validate_grammar(text, limits=LIMITS)
    if found and not any(name in found for name in _NAMES):
        return reason(grammar.kind, found)
    if "<[" in grammar.text or found:
        return ""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        if not matcher.is_accepting():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
    if "unknown special token" in matcher.get_error():
        return ""
    if "NoExtension" in matcher.get_error():
        return reason(grammar.kind, "it accepts no text")
    return reason(grammar.kind, matcher.get_error())


def _bound_memory(limit: int) -> None:
    """Limit memory to `limit` bytes more than are mapped now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256, slices=[])
    for line in sys.stdin.buffer:
        print(json.dumps({"fault": fault(msgspec.json.decode(line, type=Grammar), tokenizer)}), flush=True)


def main(arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # only the parent stops this process
    threading.stack_size(STACK)
    serving = threading.Thread(target=_serve)
    _bound_memory(int(arguments[0]) + STACK)
    serving.start()
    serving.join()


if __name__ == "__main__":
    main(sys.argv[1:])
