"""The stage of the tests with a real vLLM: two tiny checkpoints, a server of our own, and the environment it needs."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.inference.vllm.server import RECEIVER
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, load_causal_lm, save_pretrained

CONTEXT = 1024  # tokens: long answers take a second, in which a request can be aborted or overtaken
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
TEXTS = ["What is 2 + 3? The answer is 5. tool call name arguments text value country capital"] * 4
START_SECONDS = 240


EXPERTS = {
    **{
        "vocab_size": 400,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
}


def save_model(folder, seed, experts=False):
    """A tiny Qwen3, peaked enough for other weights to show. (On a CPU vLLM takes heads of 32, and none of 16.)"""
    tokenizer = build_tiny_tokenizer(TEXTS, 400)
    if experts:
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
    else:
        spec = TinyModelSpec(hidden_size=128, num_layers=2, intermediate_size=256, seed=seed)
        model = build_tiny_model(spec, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6)
    save_pretrained(model, tokenizer, folder)
    return Path(folder)


def adapters_of(folder, target, count):
    """(folders of random LoRA adapters of a checkpoint, the models that they make of it)."""
    from etude.models.lora import add_adapters, save_adapters
    from etude.options.training import ModelOptions

    folders, merged = [], []
    for number in range(count):
        model = load_causal_lm(folder)
        add_adapters(model, ModelOptions(path=str(folder), lora_rank=8), seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        save_adapters(model, target / f"adapter-{number}")
        save_pretrained(model, None, target / f"merged-{number}")
        folders.append(str(target / f"adapter-{number}"))
        merged.append(load_causal_lm(target / f"merged-{number}"))
    return folders, merged


def score_by(model):
    """What the trainer would compute: see `etude.inference.probe.Score`."""

    def score(rows, temperature):
        values = []
        for prompt, response in rows:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float() / temperature
            log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            values.append(log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
        return values

    return score


@contextmanager
def vllm_server(model, port, log, *flags, dev_mode=True):
    """vLLM's own server as a process, once it answers; yields the process. The command is that of `docs/engines.md`."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", RECEIVER, "--host", "127.0.0.1", "--port", str(port), *flags]
    variables = {**os.environ, **ON_CPU, "VLLM_SERVER_DEV_MODE": str(int(dev_mode))}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, Path(log).read_text()[-3000:]
            assert time.monotonic() < deadline, Path(log).read_text()[-3000:]
            time.sleep(0.5)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
