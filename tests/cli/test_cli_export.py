"""`etude export`: the model of a run, of a checkpoint or of a folder, for any Hugging Face program."""

import pytest
import torch
from house_stage import one_line_error
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.cli.main import cli, run
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.workers.checkpoint import write_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two checkpoints in bfloat16, whose float32 weights are beside the models."""
    folder, tokenizer = tmp_path_factory.mktemp("run"), build_tiny_tokenizer([], 265)
    for step in (1, 2):
        spec = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, seed=step)
        model, role = build_tiny_model(spec, tokenizer), folder / f"global_step_{step}" / "actor"
        exact = {f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
        write_state(exact | {"optimizer.AdamW.x.step": torch.ones(())}, role / "state")
        save_pretrained(model.bfloat16(), tokenizer, role / "huggingface")
        (role.parent / "trainer.json").write_text(f'{{"step": {step}}}')
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder


def exported(source, target, *options):
    assert run(cli, ["export", str(source), str(target), *options]) == 0
    AutoTokenizer.from_pretrained(target)
    return AutoModelForCausalLM.from_pretrained(target, dtype="auto")


@pytest.mark.parametrize(("place", "step"), [(".", 2), ("global_step_1", 1), ("global_step_1/actor/huggingface", 1)])
def test_the_model_is_found_and_copied(folder, tmp_path, place, step):
    model = exported(folder / place, tmp_path / "made")
    assert model.dtype == torch.bfloat16
    own = load_file(folder / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")
    assert own.keys() == load_file(tmp_path / "made" / "model.safetensors").keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in own.items())


def test_float32_is_what_the_optimizer_updated(folder, tmp_path):
    exact = exported(folder, tmp_path / "exact", "--dtype", "float32")
    rounded = load_file(folder / "global_step_2" / "actor" / "huggingface" / "model.safetensors")
    state = exact.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.equal(state[name].bfloat16(), tensor) for name, tensor in rounded.items())
    assert not all(torch.equal(state[name], tensor.float()) for name, tensor in rounded.items())
    half = exported(folder, tmp_path / "half", "--dtype", "float16").state_dict()
    assert all(torch.equal(half[name], tensor.half()) for name, tensor in state.items())


def test_a_supervised_runs_result_comes_before_its_checkpoints(folder, tmp_path):
    result = tmp_path / "run"
    (result / "huggingface").parent.mkdir()
    (result / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "global_step_1" / "actor" / "huggingface").rename(result / "huggingface")
    try:
        exported(result, tmp_path / "made")
    finally:
        (result / "huggingface").rename(folder / "global_step_1" / "actor" / "huggingface")


def test_wrong_folders_are_one_line(folder, tmp_path, capsys):
    def error(*arguments):
        return one_line_error(capsys, ["export", *arguments])

    assert error(tmp_path / "nowhere", tmp_path / "made").startswith(
        f"{tmp_path}/nowhere: no such folder; name a run's"
    )
    assert "neither a run, nor a checkpoint, nor a model" in error(tmp_path, tmp_path / "made")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert error(folder, tmp_path / "full") == f"{tmp_path}/full exists already: name a new folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
