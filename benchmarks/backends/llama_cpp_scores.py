"""llama.cpp's logits of given tokens, and files that it quantizes, for `benchmarks.quality`. Needs llama-cpp-python.

    python -m benchmarks.backends.llama_cpp_scores version
    python -m benchmarks.backends.llama_cpp_scores quantize SOURCE.gguf TARGET.gguf Q4_0
    python -m benchmarks.backends.llama_cpp_scores score FILE.gguf WINDOWS.json FOLDER --threads 2

`score` writes FOLDER/0.npy, 1.npy, …: the logits of each window's tokens but the last, [tokens - 1, vocab] float32.
Each window is one batch from an empty context, without a token in front. KV cache and attention are llama.cpp's
defaults (float16). Any interpreter with llama-cpp-python and numpy runs this, so it imports nothing of the project.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def quantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp  # type: ignore[import-not-found]

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        raise SystemExit(f"llama.cpp cannot quantize {source} to {kind}")


def score(file: Path, windows: list[list[int]], folder: Path, threads: int) -> None:
    import llama_cpp

    longest = max(map(len, windows))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = longest
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    memory = llama_cpp.llama_get_memory(context)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(longest, 0, 1)
    for number, window in enumerate(windows):
        llama_cpp.llama_memory_clear(memory, True)
        for at, token in enumerate(window):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, True
            batch.seq_id[at][0] = 0
        batch.n_tokens = len(window)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot compute {len(window)} tokens of {file}")
        llama_cpp.llama_synchronize(context)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(window), vocab))
        np.save(folder / f"{number}.npy", logits[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version of llama-cpp-python")
    quantizing = commands.add_parser("quantize", help="write a GGUF file of another type")
    quantizing.add_argument("source", type=Path)
    quantizing.add_argument("target", type=Path)
    quantizing.add_argument("kind", help="a type of llama.cpp, such as Q8_0 or Q4_0")
    scoring = commands.add_parser("score", help="write the logits of each window")
    scoring.add_argument("file", type=Path)
    scoring.add_argument("windows", type=Path, help="JSON: a list of lists of token ids")
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.command == "version":
        import llama_cpp

        print(llama_cpp.__version__)
    elif options.command == "quantize":
        quantize(options.source, options.target, options.kind)
    else:
        score(options.file, json.loads(options.windows.read_text()), options.folder, options.threads)


if __name__ == "__main__":
    main()
