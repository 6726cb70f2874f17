"""Loading and saving: what fits together loads, everything else is one line that names the folder."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import CheckpointError, ConfigError
from etude.models import (
    TinyModelSpec,
    build_tiny_model,
    build_tiny_tokenizer,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    load_value_model,
    save_pretrained,
)
from etude.options import model_path

SPEC = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, vocab_size=300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tiny_tokenizer(["What is 1 + 2? The answer is 3."] * 9, SPEC.vocab_size)
    model = build_tiny_model(SPEC, tokenizer)
    save_pretrained(model, tokenizer, folder)
    return folder, model, tokenizer


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_saved_model_and_tokenizer_come_back(saved):
    folder, model, tokenizer = saved
    again, words = load_causal_lm(folder), load_tokenizer(str(folder))
    ids = tokenizer("1 + 2 <tool_call><|im_end|>", return_tensors="pt")["input_ids"]
    assert torch.equal(words("1 + 2 <tool_call><|im_end|>", return_tensors="pt")["input_ids"], ids)
    assert words.chat_template == tokenizer.chat_template
    assert (words.pad_token_id, words.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not again.training
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id


def test_weights_that_do_not_fit_a_device_say_what_to_set(saved, monkeypatch):
    def full(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ConfigError, match=r"in float32 do not fit the free memory of 'cpu'.*fsdp2"):
        load_causal_lm(saved[0])


@pytest.mark.parametrize(("dtype", "made"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype(saved, dtype, made):
    assert {p.dtype for p in load_causal_lm(saved[0], dtype=dtype).parameters()} == {made}


def test_a_model_can_be_saved_without_its_tokenizer(saved, tmp_path):
    save_pretrained(saved[1], None, tmp_path / "bare")
    assert load_causal_lm(tmp_path / "bare") is not None
    with pytest.raises(ConfigError, match="no tokenizer there") as error:
        load_tokenizer(tmp_path / "bare")
    assert str(tmp_path / "bare") in one_line(error)


@pytest.mark.parametrize("load", [load_tokenizer, load_causal_lm, load_value_model])
def test_missing_folders_never_reach_a_network(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "absent", str(tmp_path / "absent"), "./absent", "~/absent_model", "runs/absent", "absent"):
        with pytest.raises(ConfigError, match="model folder not found") as error:
            load(name)
        assert str(name) in one_line(error)
    with pytest.raises(ConfigError, match="`etude sft` or `etude train` makes this folder: was it run"):
        load("runs/warm-up/huggingface")
    with pytest.raises(ConfigError, match="a folder or a GGUF file"):
        load("file")


def test_a_hub_name_without_a_hub(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)

    def absent(name, **options):
        assert name == "someone/some-model"
        assert options["local_files_only"] is False
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no\nconnection. See https://huggingface.co/docs")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", absent)
    line = "neither a local folder nor a model the hub gives: no connection; give a folder in model.path, or"
    with pytest.raises(ConfigError, match=line):
        load_tokenizer("someone/some-model")
    assert caplog.records == []


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_damaged_model_folders(load, folder):
    def fails(reason):
        with pytest.raises(ConfigError, match=reason) as error:
            load(folder)
        assert str(folder) in one_line(error)

    (folder / "model.safetensors").rename(folder / "away")
    fails("cannot load the model")
    (folder / "model.safetensors").write_bytes(b"junk")
    fails("cannot load the model")
    (folder / "config.json").write_text("{")
    fails("config.json: cannot be read")
    (folder / "config.json").write_text("[]")
    fails("must hold a JSON object")
    (folder / "config.json").unlink()
    fails("config.json is missing")


@pytest.mark.parametrize("place", ["run", "run/global_step_10"])
def test_a_run_in_the_place_of_a_model_is_told_the_model_in_it(tmp_path, place):
    for step in (9, 10):
        (held := tmp_path / f"run/global_step_{step}/actor/huggingface").mkdir(parents=True)
        (held / "config.json").write_text("{}")
        os.utime(held / "config.json", (step, step))
    with pytest.raises(ConfigError, match=r"not a model folder; it holds .*global_step_10/actor/huggingface"):
        model_path.read_config(tmp_path / place)


def test_missing_weights_are_not_made_up(folder):
    edit(folder / "config.json", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(ConfigError, match=r"weights are missing, the first is .*layers\.1") as error:
        load_causal_lm(folder)
    one_line(error)


def test_damaged_tokenizers(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template") as error:
        load_tokenizer(folder)
    assert str(folder) in one_line(error)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load the tokenizer") as error:
        load_tokenizer(folder)
    one_line(error)


def test_more_tokens_than_embedding_rows(saved, folder):
    edit(folder / "config.json", vocab_size=10)
    with pytest.raises(ConfigError, match="only 10 rows") as error:
        load_tokenizer(folder)
    assert str(folder) in one_line(error)
    edit(folder / "config.json", vocab_size=None, text_config={"vocab_size": 11})
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"vocab_size": null, ', ""))
    with pytest.raises(ConfigError, match="only 11 rows"):
        load_tokenizer(folder)
    wide = build_tiny_tokenizer(["other words here and there, all of them new"] * 9, 290)
    check_vocabulary(saved[2], saved[1])
    with pytest.raises(ConfigError, match="rows"):
        check_vocabulary(wide, load_value_model(saved[0]))


def test_pad_token_falls_back_to_eos(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"device": "abacus"}, "device 'abacus'"),
    ],
)
def test_options_that_are_not_available(saved, options, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        load_causal_lm(saved[0], **options)
    one_line(error)


def test_saving_where_a_file_stands(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save the model"):
        save_pretrained(saved[1], saved[2], tmp_path / "file")


def test_importing_the_room_does_not_import_transformers():
    code = "import sys, etude.models, etude.chat; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITH_DROPOUT = {
    "llama": TINY | {"attention_dropout": 0.5},
    "seed_oss": TINY | {"head_dim": 8},  # its own defaults: attention and residuals
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0},
    "opt": {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32, "layerdrop": 0.5, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
}


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
@pytest.mark.parametrize("kind", WITH_DROPOUT)
def test_a_loaded_model_has_no_dropout(tmp_path, kind, load):
    config = AutoConfig.for_model(kind, **WITH_DROPOUT[kind])
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    ids = torch.arange(2, 14)[None]
    noisy = made.train()(input_ids=ids).logits
    assert not torch.allclose(noisy, made.eval()(input_ids=ids).logits)
    model = load(tmp_path)
    model = model.backbone if load is load_value_model else model
    quiet = model.eval()(input_ids=ids)[0]
    assert torch.equal(model.train()(input_ids=ids)[0], quiet)
