"""OpenVINO: calls of the model alone, without any sampling; its own defaults of arithmetic, which round activations to
8 bits by groups of 32 and compute in bfloat16 where the CPU can.

optimum-intel makes the model: int8 by channels, int4 symmetric by groups of 32 with a head of 8 bits.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.backends import STEPS, Job, Measure, prompts

OPTIONS = {"int4": ("--group-size", "32", "--sym", "--ratio", "1.0")}


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """bits: fp16, int8 or int4."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]

    folder = checkpoint / f"openvino-{bits}"
    if not (folder / "openvino_model.xml").exists():
        program = Path(sys.executable).with_name("optimum-cli")
        command = [program, "export", "openvino", "-m", checkpoint, "--task", "text-generation-with-past"]
        command += ["--weight-format", bits, *OPTIONS.get(bits, ()), folder]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    core = openvino.Core()
    network = core.read_model(folder / "openvino_model.xml")
    _keep_last(network)
    compiled = core.compile_model(
        network, "CPU", {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    )
    request = compiled.create_infer_request()
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    cached: tuple[Job, list[Any]] | None = None  # whose prompts the states hold, and these
    rounds = 0

    def call(ids: Any, past: int) -> None:
        rows, length = ids.shape
        request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones((rows, past + length), np.int64),
                "position_ids": np.tile(np.arange(past, past + length, dtype=np.int64), (rows, 1)),
                "beam_idx": np.arange(rows, dtype=np.int32),
            },
            share_inputs=True,
        )

    def measure(job: Job) -> float:
        nonlocal cached, rounds
        rounds += 1
        if job.batch == 0:
            cached = None
            request.reset_state()
            ids = np.array(prompts(1, job.context, vocab, start=rounds), np.int64)
            start = time.perf_counter()
            call(ids, 0)
            return job.context / (time.perf_counter() - start)
        if cached is None or cached[0] != job:
            request.reset_state()
            call(np.array(prompts(job.batch, job.context, vocab), np.int64), 0)
            cached = job, [np.array(state.state.data) for state in request.query_state()]
        for state, value in zip(request.query_state(), cached[1], strict=True):
            state.state = openvino.Tensor(value)
        one = np.full((job.batch, 1), 11, np.int64)
        call(one, job.context)
        start = time.perf_counter()
        for step in range(1, STEPS):
            call(one, job.context + step)
        return job.batch * (STEPS - 1) / (time.perf_counter() - start)

    return measure


def _keep_last(network: Any) -> None:
    """Logits of the last position alone, as its own generation does it."""
    import numpy as np
    from openvino import opset13 as ops  # type: ignore[import-not-found]

    node = network.outputs[0].get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    last = ops.slice(node.input_value(0), np.array([-1]), np.array([2**31 - 1]), np.array([1]), np.array([1]))
    node.input(0).replace_source_output(last.output(0))
