"""`etude config`: the tree, its sources, and plain YAML."""

import yaml
from omegaconf import OmegaConf

from etude.cli.main import cli, run
from etude.config import compose


def shown(capsys, *arguments: str) -> str:
    assert run(cli, ["config", *arguments]) == 0
    return capsys.readouterr().out


def test_plain_yaml_is_the_configuration(capsys):
    printed = yaml.safe_load(shown(capsys, "--yaml", "-cn", "sft", "trainer.seed=3"))
    assert printed == OmegaConf.to_container(compose("sft", ["trainer.seed=3"]))


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
