"""Decoding of a GGUF file by llama.cpp, in tokens a CPU second, for the table of docs/performance.md.

    pip install llama-cpp-python        # builds llama.cpp for this CPU: it needs a C++ compiler and some minutes
    python benchmarks/llama.py MODEL.gguf [--batches 1 8 32 64] [--float32]

Prompts of 300 tokens, 12 tokens each, one thread; the most probable token is taken. `--float32` first writes the weights in
float32, as Étude reads them.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

PROMPT_LENGTH, DECODED = 300, 12


def in_float32(path: str, folder: str) -> str:
    """Writes the file's weights in float32 and returns the new file's name."""
    target = str(Path(folder) / "float32.gguf")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = llama_cpp.LLAMA_FTYPE_ALL_F32, True, 1
    if llama_cpp.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(options)):
        raise SystemExit(f"{path} could not be written in float32")
    return target


def step(context: Any, rows: list[tuple[int, list[int], int]], width: int) -> np.ndarray:
    """Computes `rows` (sequence, tokens, position of the first) and returns the logits of each row's last token."""
    batch = llama_cpp.llama_batch_init(sum(len(tokens) for _, tokens, _ in rows), 0, 1)
    last, place = [], 0
    for sequence, tokens, first in rows:
        for offset, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, first + offset
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = offset == len(tokens) - 1
            place += 1
        last.append(place - 1)
    batch.n_tokens = place
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama.cpp could not compute a step")
    found = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (width,)).copy() for i in last]
    llama_cpp.llama_batch_free(batch)
    return np.stack(found)


def decode(model: Any, count: int) -> tuple[float, float]:
    """CPU seconds of the prefill and of the median step."""
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_seq_max = count * (PROMPT_LENGTH + DECODED + 8), count
    options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, options)
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rng, began = random.Random(0), time.process_time()
    prompts = [[rng.randrange(width) for _ in range(PROMPT_LENGTH)] for _ in range(count)]
    tokens = [int(step(context, [(n, ids, 0)], width).argmax()) for n, ids in enumerate(prompts)]
    prefill, times = time.process_time() - began, []
    for place in range(PROMPT_LENGTH, PROMPT_LENGTH + DECODED):
        began = time.process_time()
        tokens = step(context, [(n, [token], place) for n, token in enumerate(tokens)], width).argmax(axis=1).tolist()
        times.append(time.process_time() - began)
    llama_cpp.llama_free(context)
    return prefill, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--float32", action="store_true")
    given = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # it says each tensor that it reads
    llama_cpp.llama_log_set(silent, None)
    with tempfile.TemporaryDirectory() as folder:
        path = in_float32(given.model, folder) if given.float32 else given.model
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        for count in given.batches:
            prefill, seconds = decode(model, count)
            print(f"{count}: {count / seconds:.1f} tokens a CPU s, prefill {prefill:.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
