"""Record golden prompts: `python -m engine.golden CONFIG.json` builds the engine's worker, runs the prompts, and prints
the outputs as JSON. It opens no socket and serves no requests. `slipway lock` and `slipway selftest` run it.
"""

import os
import sys
import time
from pathlib import Path

import msgspec

from engine.__main__ import build
from engine.api.config import EngineConfig, read_config
from engine.api.errors import EXIT_CRASH, EXIT_PERMANENT, ConfigError, EngineError
from engine.api.golden import TEXTS, Golden, Prompt, Recorded
from engine.binding import bind
from engine.core.loop import Worker, build_self_test
from engine.text import Tokenizer
from engine.text.files import FILES


def texts(model: Path) -> tuple[Prompt, ...]:
    """Return the text prompts as tokens of the checkpoint; none for a checkpoint without a tokenizer."""
    if not any((model / name).exists() for name in FILES):
        return ()
    tokenizer = Tokenizer(model)
    return tuple(Prompt(name, tuple(tokenizer.encode(text))) for name, text in TEXTS.items())


def record(config: EngineConfig, worker: Worker) -> Recorded:
    """Run all configured prompts. Prompts whose logits are not finite are left out."""
    folder = Path(config.model.path)
    watch = build_self_test(config, worker, texts(folder if folder.is_dir() else folder.parent))
    found: dict[str, Golden] = {}
    if watch is not None:
        watch.start(lambda plan: worker.start(plan, {}).result(), time.monotonic, lambda fraction: None)
        found = watch.references
    return Recorded(worker.arithmetic, tuple(golden for golden in found.values() if golden.finite))


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine.golden CONFIG.json", file=sys.stderr)
        return 2

    def lost(error: Exception) -> None:
        print(f"rank: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_CRASH)

    try:
        config = read_config(Path(arguments[0]))
        bind(config)
        if not config.lifecycle.self_test.prompts:
            raise ConfigError("self_test.prompts=0: there is nothing to record; set lifecycle.self_test.prompts")
        worker = build(config, lambda phase, fraction: None, lambda phase, taken: None, lost)
        recorded = record(config, worker)
        worker.close()
    except EngineError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    print(msgspec.json.encode(recorded).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
