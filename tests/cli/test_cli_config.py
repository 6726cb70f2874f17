"""`etude config`: the tree, its sources, and plain YAML."""

import pytest
import yaml

from etude.cli.main import cli, run
from etude.config import compose
from etude.options.validate import plain


def shown(capsys, *arguments: str) -> str:
    assert run(cli, ["config", *arguments]) == 0
    return capsys.readouterr().out


def test_plain_yaml_is_the_configuration(capsys):
    printed = yaml.safe_load(shown(capsys, "--yaml", "-cn", "sft", "trainer.seed=3"))
    assert printed == plain(compose("sft", ["trainer.seed=3"]))


def test_the_tree_says_where_each_value_came_from(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("trainer: {device: cpu}\n", encoding="utf-8")
    lines = shown(capsys, "--config-name", "mine", "--config-path", str(tmp_path), "trainer.seed=3").splitlines()
    assert "trainer:" in lines
    assert f"  device: cpu\t{tmp_path / 'mine.yaml'}" in lines
    assert "  seed: 3\tcommand line" in lines
    assert "  logger: [console, jsonl, tensorboard]\ttrainer/run.yaml" in lines
    assert "  apply_chat_template_kwargs: {}\tdata/data.yaml" in lines
    assert "  val_batch_size: null\tdata/data.yaml" in lines


def test_interpolations_are_shown_on_request(capsys):
    assert "${trainer.seed}" not in shown(capsys)
    assert "${trainer.seed}" in shown(capsys, "--no-resolve")
    assert "${trainer.seed}" in shown(capsys, "--no-resolve", "--yaml")


def test_errors_are_one_line(capsys):
    for arguments in (["trainer.sed=1"], ["--nonsense"], ["-cn", "nowhere"], ["-cp", "/nowhere", "-cn", "x"]):
        assert run(cli, ["config", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_a_key_is_explained(capsys):
    text = shown(capsys, "actor_rollout_ref.actor.optim.min_lr_ratio", "actor_rollout_ref.actor.optim.min_lr_ratio=0.1")
    assert text.splitlines() == [
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        "  Final rate as a share of the peak.",
        "  takes       a number from 0 to 1",
        "  default     0.0",
        "  set by      command line",
        "  no effect   here: it applies where lr_scheduler_type is linear or cosine",
    ]


def test_the_end_of_a_name_and_a_section_are_explained(capsys):
    text = shown(capsys, "--explain", "critic_warmup", "algorithm.kl_ctrl", "-cn", "ppo_trainer")
    assert "trainer.critic_warmup=0" in text
    assert "takes       a whole number of at least 0, in steps" in text
    assert "applies     with estimators that need a critic (algorithm.adv_estimator=gae), as here" in text
    assert [line for line in text.splitlines() if line.startswith("algorithm.kl_ctrl.")][
        -1
    ] == "algorithm.kl_ctrl.target_kl=0.1"
    assert "default     ${data.max_prompt_length}" in shown(capsys, "prompt_length")
    assert "other name  data.max_prompt_length" in shown(capsys, "prompt_length")
    assert "in verl     default null; turns on a reward model" in shown(capsys, "reward_model.enable")


def test_a_key_of_verl_is_explained_under_its_name_here(capsys):
    assert "max_assistant_turns" in shown(capsys, "actor_rollout_ref.rollout.multi_turn.max_turns")
    assert "clip_grad" in shown(capsys, "critic.grad_clip")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "no effect   here: rows are packed by tokens: ppo_max_tok",
        ),
        ("ppo_micro_batch_size_per_gpu", "no effect   here: rows are packed by tokens: ppo_max_tok"),
        ("agent.num_workers", "no effect   here: all trajectories run at once in one process; rollout.max_concurrent_"),
    ],
)
def test_a_key_that_is_accepted_without_effect_is_explained(capsys, key, said):
    assert run(cli, ["config", key]) == 0
    name, line = capsys.readouterr().out.splitlines()
    assert name == key
    assert line.startswith(f"  {said}")
    assert line.endswith("; leave it out")


def test_an_unknown_or_ambiguous_key_is_one_line(capsys):
    assert run(cli, ["config", "trainer.sed"]) == 2
    assert capsys.readouterr().err == "error: unknown key trainer.sed; did you mean 'trainer.seed'?\n"
    assert run(cli, ["config", "--explain", "n"]) == 2
    assert "actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.val_kwargs.n" in capsys.readouterr().err
