"""Examples as folders: one with a service runs whole, and what is wrong with one is said in a line."""

import json
import os
import re

import pytest
from test_quickstart_stages import TINY, WARM_UP

from etude.cli.main import cli, run
from etude.errors import ConfigError, EtudeError
from etude.quickstart import run_service
from etude.quickstart.example import CALCULATOR, Rows, find_example
from etude.quickstart.stages import Quickstart


def test_an_example_runs_with_its_service(tmp_path):
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    rows = Rows(train=8, val=3, test=4, demonstrations=32)
    example = find_example("phone_book")
    overrides = (*TINY, "trainer.total_training_steps=2", "algorithm.filter_groups.enable=false")
    one = Quickstart(example, tmp_path / "run", 1, overrides, lambda text: None, rows=rows, warm_up_overrides=WARM_UP)
    summary = one.run()
    assert "SEARCH_URL" not in os.environ
    assert summary["cpu_seconds"]["service"] > 0
    assert summary["claim"]["metric"] == "success"
    assert summary["claim"]["held"] is False  # two steps teach nothing
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["example"] == "phone_book"
    with pytest.raises(ConfigError, match="holds the phone_book of seed 1"):
        Quickstart(find_example(CALCULATOR), tmp_path / "run", 1, (), lambda text: None)


def test_only_the_variables_of_the_service_are_put_back(tmp_path, monkeypatch):
    (tmp_path / "example.yaml").write_text("shows: x\n")
    (tmp_path / "agent.py").write_text(
        "from contextlib import nullcontext\nserve = lambda folder: nullcontext({'TOWN': 'Rome', 'ROAD': '1'})\n"
    )
    monkeypatch.setenv("TOWN", "Oslo")
    monkeypatch.delenv("ROAD", raising=False)
    one = Quickstart(find_example(str(tmp_path)), tmp_path, 1, (), lambda text: None)
    with one._serve():
        assert (os.environ["TOWN"], os.environ["ROAD"]) == ("Rome", "1")
        monkeypatch.setenv("SET_MEANWHILE", "1")
    assert (os.environ["TOWN"], os.environ["SET_MEANWHILE"], "ROAD" in os.environ) == ("Oslo", "1", False)


def test_a_service_that_does_not_start_is_told():
    with pytest.raises(EtudeError, match="python -c pass did not start"), run_service("-c", "pass"):
        pass


def test_a_readme_says_what_its_example_claims():
    for path in find_example("phone_book").folder.parent.glob("*/example.yaml"):
        claim = find_example(str(path.parent)).options
        does = f"{'rises' if claim.margin > 0 else 'falls'} by at least {abs(claim.margin):g}, in every seed"
        said = f"The claim: {claim.metric.replace('_', ' ')}, sampled on its test questions, {does}"
        assert said in (path.parent / "README.md").read_text(), path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("margin: 0.3\n", "shows"),
        ("shows: x\nmagrin: 0.3\n", "did you mean 'margin'"),
        ("shows: x\nmargin: 0\n", "margin must not be 0"),
        ("[1]", "must be a mapping"),
        ("shows: x\nmodel: smollm\n", "model 'smollm' is no folder and not known; did you mean 'smollm2'"),
    ],
)
def test_a_faulty_example_is_named(tmp_path, text, wanted):
    (tmp_path / "example.yaml").write_text(text)
    with pytest.raises(ConfigError, match=wanted) as caught:
        find_example(str(tmp_path))
    assert "example.yaml" in str(caught.value)


def test_an_unknown_example_is_told_what_there_is(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no example 'phone_bok'; did you mean 'phone_book'"):
        find_example("phone_bok")
    with pytest.raises(ConfigError, match=r"holds no example\.yaml"):
        find_example(str(tmp_path))
    (tmp_path / "parcels").mkdir()
    (tmp_path / "parcels/example.yaml").write_text("shows: x\nmodel: smollm2\nrows: {train: 8}\n")
    monkeypatch.chdir(tmp_path)
    assert find_example("parcels").options.rows.demonstrations == 0  # a pretrained model needs none
    with pytest.raises(ConfigError, match="no example 'parcel'; did you mean 'parcels'"):
        find_example("parcel")
    monkeypatch.chdir("parcels")
    with pytest.raises(ConfigError, match=r"it is the working directory itself; name it --example \."):
        find_example("parcels")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("random.sample(range(20), n)", "population.*agent.py:4.*asked for 30 of train, 64 of val"),
        ("range(min(n, 20))", "made fewer rows than asked for: 20 of 30 of train, 20 of 64 of val"),
        ("[i % 30 for i in range(n)]", "agent.py: prepare gives 256 of 256 test rows to train on, too"),
        ("(time.sleep(0.3), range(n))[1]", "still at work after 0.1 s; it was asked for 30 of train"),
    ],
    ids=["fails", "makes fewer", "repeats itself", "does not end"],
)
def test_an_example_that_has_run_out_of_rows_is_told_what_was_asked(tmp_path, monkeypatch, capsys, caplog, make, said):
    monkeypatch.setattr("etude.quickstart.prepare._SLOW", 0.1)
    (tmp_path / "example.yaml").write_text("shows: x\nrows: {train: 30}\nmodel: smollm2\n")
    row = "{'data_source': 'x', 'prompt': [{'role': 'user', 'content': str(i)}], 'reward_model': {'ground_truth': '1'}}"
    (tmp_path / "agent.py").write_text(
        f"import random\nimport time\ndef table(n):\n    return [{row} for i in {make}]\n\n\n"
        "def prepare(folder, seed, rows):\n    return {each: table(vars(rows)[each]) for each in ('train', 'val', 'test')}\n"
    )
    (tmp_path / "agent.yaml").write_text("defaults: [grpo_trainer, _self_]\n")
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    assert run(cli, ["check", "--config-path", str(tmp_path), "--config-name", "agent", "--no-rollout"])
    told = capsys.readouterr()
    assert re.search(said, " ".join(f"{told.out} {told.err} {caplog.text}".split())), told


@pytest.mark.parametrize(
    ("model", "command", "rule"),
    [
        ("model: MODEL", ["check", "--no-rollout", "--config-name", "agent", "--config-path"], "`model: "),
        ("model: MODEL", ["quickstart", "--example"], "`model: "),
        ("", ["quickstart", "--example"], "an untrained one, for lack of `model`"),
    ],
)
def test_a_model_that_example_yaml_overrules_is_told(tmp_path, monkeypatch, capsys, caplog, model, command, rule):
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    (tmp_path / "held").mkdir()
    mine.mkdir()
    (mine / "example.yaml").write_text(f"shows: x\n{model.replace('MODEL', str(tmp_path / 'held'))}\n")
    (mine / "agent.yaml").write_text("defaults: [grpo_trainer]\nactor_rollout_ref: {model: {path: other}}\n")
    (mine / "agent.py").write_text("def prepare(folder, seed, rows):\n    return {}\n")
    assert run(cli, [*command, str(mine)])  # it makes no rows
    told = capsys.readouterr()
    said = " ".join(f"{told.err} {caplog.text}".split())
    assert f"{mine}/agent.yaml: actor_rollout_ref.model.path=other is overruled by example.yaml: {rule}" in said
