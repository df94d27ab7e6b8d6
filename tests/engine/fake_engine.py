"""Run an engine process with a simulated device and no model: `python fake_engine.py CONFIG.json [MODE]`.

The token at position p after a prefix is (sum of the prefix + p) % 97, so any test can compute a stream. Modes:
"refuse": the worker cannot be built; "crash": building it is a bug; "slow": 20 ms a step; "die": step 5 is a bug.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.__main__ import serve
from engine.api.config import read_config
from engine.api.errors import CheckpointError
from engine.api.messages import RankMemory
from engine.core.plan import StepResult
from engine.kv.layout import layout
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock

VOCAB = 97


def next_token(ids):
    return (sum(ids) + len(ids)) % VOCAB


class Worker:
    weight_bytes = 1
    snapshots = None
    adapters = None
    memory = (RankMemory({"head": 1}),)
    seconds = {"loading": 0.25}

    def __init__(self, config, step_s=0.0, dies_at=0):
        attention = Attention(hidden=8, heads=1, kv_heads=1, head_dim=8, rope=None)
        block = (ResidualBlock(body=attention), ResidualBlock(body=MLP(hidden=8, intermediate_size=8)))
        self.model = Model(
            embed=Embedding(vocab=VOCAB, hidden=8), blocks=(block,), norm=None, head=Head(tied=True), max_context=4096
        )
        self.layout = layout(self.model, block_tokens=config.cache.block_tokens, element_bytes=4)
        self.blocks = self.layout.blocks(config.memory.kv_cache)
        self.kv_bytes = self.blocks * self.layout.block_bytes
        self._table = {}
        self._step_s, self._dies_at = step_s, dies_at
        self._thread = ThreadPoolExecutor(1)

    def start(self, plan, masks):
        return self._thread.submit(self._run, plan)

    def close(self):
        self._thread.shutdown()

    def _run(self, plan):
        time.sleep(self._step_s)
        assert plan.step != self._dies_at, "the device is broken"
        for slot in plan.dropped:
            del self._table[slot]
        for new in plan.new:
            self._table[new.slot] = list(new.ids)
        sampled, failed = [], {}
        for index, row in enumerate(plan.rows):
            ids = self._table[row.slot]
            token = -1
            if row.sample:
                assert len(ids) == row.first + row.count
                token = next_token(ids)
                ids.append(token)
            if 13 in ids[: row.first + row.count]:
                failed[index] = "logits are not finite"
            sampled.append(token)
        return StepResult(plan.step, tuple(sampled), failed=failed)


def build(mode):
    def build_worker(config, progress, took, lost):
        progress("loading", 0.5)
        if mode == "refuse":
            raise CheckpointError(f"{config.model.path}: model.safetensors is missing")
        if mode == "crash":
            raise ZeroDivisionError("a bug")
        return Worker(config, step_s=0.02 if mode == "slow" else 0.0, dies_at=5 if mode == "die" else 0)

    return build_worker


if __name__ == "__main__":
    code = serve(read_config(Path(sys.argv[1])), build(sys.argv[2] if len(sys.argv) > 2 else ""))
    sys.stderr.flush()
    os._exit(code)
