"""Every key of the supervised tree is moved away from its default by some test that sees what it does.

As for `etude train` (tests/reference/test_reference_keys.py): a moved key changes what a short run leaves behind, a
handed-on key reaches the options that workers and agent loops of both kinds of run read, a witnessed key has a test of its
own.
"""

import functools
import hashlib
import json

import pytest
from hold_key import run_held
from house_stage import TOOLS, by_heart, metrics
from test_trainer_sft import arguments

from etude.config import compose
from etude.data.files import write_parquet
from etude.dumps import rollout_record, write_rollouts
from etude.errors import EtudeError
from etude.models import TinyModelSpec, build_tiny_model, load_tokenizer, save_pretrained
from etude.options import SFTOptions, declarations
from etude.options.validate import value_of
from etude.trainer.run import fine_tune
from etude.trajectory import Provenance, StopReason, Trajectory

FUNCTION = '''
from etude.tools import function_tool

@function_tool
def look(place: str) -> str:
    """Looks at a place."""
    return place
'''


@pytest.fixture(scope="module")
def stage(tiny, tmp_path_factory):
    """A folder with what settings name: another model, other rows, a file of tools; and a run with settings, made once."""
    folder = tmp_path_factory.mktemp("keys")
    tokenizer = load_tokenizer(tiny.model)
    tokenizer.chat_template = "{% if loud is defined %}! {% endif %}" + tokenizer.chat_template
    for name, seed in (("model", 1), ("other", 2)):
        spec = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, seed=seed)
        save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / name)
    write_parquet([by_heart(n % 2) for n in range(8)], folder / "rows.parquet")
    write_parquet([by_heart(0) for _ in range(8)], folder / "other.parquet")
    (folder / "look.py").write_text(FUNCTION)
    (folder / "shown.jsonl").write_text(json.dumps(by_heart(0) | {"images": ["a.png"]}))  # which the model cannot read
    rolled = [rolled_out(uid, number, score) for uid in "ab" for number, score in enumerate((0.0, 0.5, 1.0, 1.5))]
    write_rollouts(folder, 1, rolled)
    trials = f"{tiny.folder}/data/val.parquet"

    def settings(given, run):
        own = [f"data.train_files={folder}/rows.parquet", f"model.path={folder}/model", "trainer.deterministic=false"]
        given = [each.format(folder=folder, run=run, trials=trials, tools=TOOLS) for each in given]
        return arguments(tiny, run, *own, "data.max_length=400", "optim.lr=1e-2", *given)

    @functools.cache
    def left(*given):
        """What a run with settings leaves: its figures, its files, its weights; or why there was none."""
        run = tmp_path_factory.mktemp("run")
        try:
            fine_tune(compose("sft", settings(given, run), root="sft"))
        except EtudeError as error:
            return str(error).replace(str(run), "")
        records = metrics(run) if (run / "metrics.jsonl").exists() else []
        figures = [{k: v for k, v in r.items() if not k.startswith(("timing", "perf"))} for r in records]
        files = sorted(str(path.relative_to(run)).partition("tfevents")[0] for path in run.rglob("*"))
        return figures, files, hashlib.sha256((run / "huggingface" / "model.safetensors").read_bytes()).hexdigest()

    left.settings, left.folder = settings, tmp_path_factory.mktemp("built")
    return left


def rolled_out(uid, number, score):
    made = Trajectory(f"{uid}{number}", [ord(uid), 40, 41])
    made.append([50 + number, 60, 70 + number], Provenance.SAMPLED, log_probs=[0.0] * 3)
    made.stop_reason = StopReason.COMPLETED
    return rollout_record(made, {"uid": uid}, step=1, input="", output="", score=score)


DUMP = "data.train_files={folder}/1.jsonl"
LINEAR = "optim.lr_scheduler_type=linear"
TRIAL = (
    "target_success.data_files={trials}",
    "target_success.low=0",
    "target_success.high=1",
    "target_success.samples=2",
)
TRIAL = (*TRIAL, "target_success.max_response_length=16")
# key → (its value, what it needs beside it)
MOVED = {
    "data.train_files": ("{folder}/other.parquet", ()),
    "data.train_batch_size": (3, ()),
    "data.max_length": (20, ()),
    "data.shuffle": ("false", ()),
    "data.min_score": (0.6, (DUMP,)),
    "data.max_per_prompt": (1, (DUMP,)),
    "loss.name": ("dpo", (DUMP,)),
    "loss.beta": (2.0, (DUMP, "loss.name=dpo")),
    "data.seed": (5, ()),
    "data.apply_chat_template_kwargs": ("{{loud:true}}", ()),
    "data.image_key": ("null", ("data.train_files={folder}/shown.jsonl",)),
    "model.path": ("{folder}/other", ()),
    "model.dtype": ("bfloat16", ()),
    "optim.name": ("muon", ()),
    "optim.lr": (0.02, ()),
    "optim.betas": ("[0.5,0.6]", ()),
    "optim.weight_decay": (0.5, ()),
    "optim.muon_lr_multiplier": (3, ("optim.name=muon",)),
    "optim.lr_warmup_steps": (2, ()),
    "optim.lr_scheduler_type": ("linear", ()),
    "optim.lr_decay_ratio": (0.4, (LINEAR,)),
    "optim.min_lr_ratio": (0.5, (LINEAR,)),
    "optim.clip_grad": (0.01, ()),
    "multi_turn.enable": ("false", ()),
    "multi_turn.tool_config_path": ("null", ()),
    "multi_turn.function_tool_path": ("{folder}/look.py", ()),
    "target_success.data_files": ("{trials}", TRIAL[1:]),
    "target_success.every": (1, TRIAL),
    "target_success.samples": (3, TRIAL),
    "target_success.max_response_length": (5, TRIAL),
    "trainer.total_epochs": (2, ("trainer.total_training_steps=null",)),
    "trainer.total_training_steps": (2, ()),
    "trainer.logger": ("[]", ()),
    "trainer.save_freq": (2, ()),
    "trainer.max_actor_ckpt_to_keep": (1, ("trainer.save_freq=1",)),
    "trainer.seed": (5, ()),
}


@pytest.mark.parametrize("key", MOVED)
def test_a_moved_key_changes_what_a_run_leaves(stage, key):
    value, needs = MOVED[key]
    before = [each for each in needs if not each.startswith(f"{key}=")]
    assert stage(*before, f"{key}={value}") != stage(*before)


# key → (its value, where it arrives among the options of the roles)
HANDED_ON = {
    "model.trust_remote_code": ("true", "model.trust_remote_code"),
    "trainer.deterministic": ("true", "trainer.deterministic"),
    **{
        f"model.{name}": (value, f"model.{name}")
        for name, value in {
            "enable_gradient_checkpointing": "true",
            "lora_rank": 4,
            "lora_alpha": 8.0,
            "target_modules": "q_proj",
            "exclude_modules": "q_proj",
            "quantization": "nf4",
        }.items()
    },
    **{
        f"multi_turn.{name}": (value, f"rollout.multi_turn.{name}")
        for name, value in {
            "format": "search_r1",
            "tools_in_system": "true",
            "max_assistant_turns": 3,
            "max_user_turns": 3,
            "max_seconds": 5.0,
            "malformed_calls": "end",
            "malformed_call_penalty": 0.5,
            "max_consecutive_malformed_calls": 4,
            "max_turn_tokens": 55,
            "max_trajectory_tokens": 99,
            "max_parallel_calls": 3,
            "max_tool_response_length": 77,
            "tool_response_length_unit": "characters",
            "min_answer_tokens": 7,
            "tool_response_truncate_side": "left",
            "compact.at_tokens": 3000,
            "compact.keep_last": 2,
            "compact.summary_tokens": 99,
            "compact.prompt": "sum",
        }.items()
    },
}


@pytest.mark.parametrize("key", HANDED_ON)
def test_a_key_that_both_kinds_of_run_share_is_handed_on(stage, key):
    value, place = HANDED_ON[key]
    made = [
        value_of(compose("sft", stage.settings(given, stage.folder), root="sft").for_workers(), place)
        for given in ([], [f"{key}={value}"])
    ]
    assert made[0] != made[1]
    assert str(made[1]).lower().strip("(',)") == str(value)


SFT = "trainer/test_trainer_sft.py"
RAY = ("trainer/test_trainer_ray.py", "test_demonstrations_are_learned_on_two_nodes_as_in_one_process")
WITNESSED = {
    "multi_turn.interaction_config_path": (SFT, "test_trials_talk_to_the_configured_user"),
    "target_success.low": (SFT, "test_a_window_that_is_entered_leaves_a_model"),
    "target_success.high": (SFT, "test_a_window_that_is_never_entered_leaves_nothing"),
    "trainer.async_save": (SFT, "test_a_save_in_the_background_is_of_its_step"),
    "trainer.resume_mode": (SFT, "test_a_fresh_start_or_a_named_checkpoint_is_what_was_asked_for"),
    "trainer.resume_from_path": (SFT, "test_a_fresh_start_or_a_named_checkpoint_is_what_was_asked_for"),
    "trainer.max_skipped_steps": (SFT, "test_a_model_whose_gradients_are_never_finite_ends_the_run"),
    "plugins": (SFT, "test_a_plugin_is_imported"),
    "trainer.max_restarts": ("trainer/test_trainer_restarts.py", "test_fine_tuning_goes_on_too"),
    "trainer.backend": RAY,
    "trainer.nnodes": RAY,
}
UNSEEN = {
    "trainer.default_local_dir": "every run of the tests sets it, and reads what the run left there",
    "trainer.project_name": "a name: of the folder by default, and of pages at trackers",
    "trainer.experiment_name": "a name: of the folder by default, and of pages at trackers",
    "trainer.num_threads": "changes speed alone",
    "trainer.device": "there is one device where the tests run",
    "trainer.n_gpus_per_node": "groups are opened as for rollouts, whose tests see it",
    "trainer.min_nnodes": "groups are opened as for rollouts, whose tests see it",
    "ray.node_timeout": "groups are opened as for rollouts, whose tests see it",
    "ray.address": "groups are opened as for rollouts, whose tests see it",
    "ray.init_kwargs": "groups are opened as for rollouts, whose tests see it",
    "ray.call_timeout": "groups are opened as for rollouts, whose tests see it",
    "ray.data_plane": "demonstrations are the driver's: no batch stays between workers",
    "model.use_liger": "needs a GPU: the workers' tests see it refused",
    "model.enable_activation_offload": "needs a GPU: the test of updates on a pretend one sees it",
    "optim.offload": "needs a GPU: the test of updates on a pretend one sees it",
}


def test_every_key_is_seen_by_some_test():
    keys, seen = set(declarations(SFTOptions)), {*MOVED, *HANDED_ON, *WITNESSED}
    assert "\n".join(sorted(keys - seen - set(UNSEEN))) == ""
    assert "\n".join(sorted((seen | set(UNSEEN)) - keys)) == ""
    assert seen.isdisjoint(UNSEEN)


@pytest.mark.soak
@pytest.mark.parametrize("key", sorted(WITNESSED))
def test_a_witness_fails_where_the_key_is_held_at_its_default(key, tmp_path):
    held = run_held(key, "::".join(WITNESSED[key]), tmp_path)
    assert held.returncode == 1, held.stdout[-2000:]  # 1: tests ran, and failed
