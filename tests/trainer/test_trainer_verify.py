"""`etude verify`: a step is made again by the plain trainer, and a planted fault is named by its term."""

import json
import shutil

import pytest
import yaml
from house_stage import ACTOR, metrics, one_line_error
from safetensors.torch import load_file, save_file

from etude.cli.main import cli, run
from etude.trainer import ppo
from etude.trainer.verify import verify_step


def train(tiny, folder, *overrides):
    values = ("trainer.rollout_token_values=true", "trainer.verify_every=1", "trainer.max_actor_ckpt_to_keep=-1")
    assert run(cli, ["train", *tiny.arguments(folder, *values, *overrides)]) == 0


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """Two steps of one update each, the second of which was verified as it was made."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    decayed = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.optim.weight_decay=0.1")
    train(tiny, folder, *decayed, "trainer.total_training_steps=2")
    return folder


@pytest.fixture(scope="module")
def twice(tiny, tmp_path_factory):
    """Two steps of two updates each, the first of which moves the policy far."""
    folder = tmp_path_factory.mktemp("twice") / "run"
    train(tiny, folder, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=1e-2", "trainer.total_training_steps=2")
    return folder


def test_a_step_is_equal_live_and_from_its_folder_alone(done, twice, tmp_path, capsys):
    for folder in (done, twice):
        first, second = metrics(folder)
        assert (first.get("verify/equal"), second["verify/equal"]) == (None, 1.0)
        assert 0 < second["verify/difference"] < 1e-5
    moved = shutil.copytree(done, tmp_path / "moved")
    config = yaml.safe_load((moved / "config.yaml").read_text())
    config["actor_rollout_ref"]["model"]["path"] = "/not/on/this/machine"
    config["trainer"]["rollout_data_dir"] = "/nor/is/this/rollouts"
    (moved / "config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert run(cli, ["verify", str(moved)]) == 0
    said = capsys.readouterr().out
    assert "step 2: equal to 1e-05" in said
    for term in (
        "mask",
        "reward",
        "reference log-prob",
        "advantage",
        "ratio",
        "loss",
        "gradient norm",
        "weight change",
    ):
        assert f"✓ {term} " in said
    assert "the reference model is not on this machine" in said


def test_a_step_that_weight_decay_alone_moves_is_equal(tiny, tmp_path, capsys):
    (tmp_path / "pay.py").write_text("def compute_score(**given):\n    return 0.0\n")
    unpaid = (f"custom_reward_function.path={tmp_path}/pay.py", "trainer.total_training_steps=2")
    train(tiny, tmp_path / "run", *unpaid, f"{ACTOR}.optim.lr=3e-4", f"{ACTOR}.optim.weight_decay=0.01")
    assert metrics(tmp_path / "run")[1]["actor/grad_norm"] == 0
    assert run(cli, ["verify", str(tmp_path / "run")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_advantages_that_a_small_spread_divides_are_equal(tiny, tmp_path, estimator):
    """Rewards are nearly equal, and so what decides are KL penalties and values, of which more is rounding."""
    (tmp_path / "pay.py").write_text("def compute_score(solution_str, **given):\n    return len(solution_str) / 1e6\n")
    charged = (
        *("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"),
        *(f"algorithm.adv_estimator={estimator}", f"{ACTOR}.optim.lr=3e-4"),
    )
    steps = ("trainer.total_training_steps=2", "critic.optim.lr=1e-3", f"custom_reward_function.path={tmp_path}/pay.py")
    train(tiny, tmp_path / "run", "algorithm.zero_variance=keep", *charged, *steps)
    found = verify_step(tmp_path / "run", 2)
    assert found.first is None, found.explain()
    wrong = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    wrong["algorithm"] |= {"gamma": 0.99, "norm_adv_by_std_in_grpo": False}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(wrong))
    assert verify_step(tmp_path / "run", 2).first.name == "advantage"


def test_what_follows_the_first_update_may_differ_by_a_hundredth_of_what_it_moved(twice, tmp_path):
    """Adam divides a gradient that rounding alone decides by its own size."""
    moved = []
    for line in (twice / "rollouts" / "2.jsonl").read_text().splitlines():
        values = json.loads(line)["token_values"]
        moved += [new - old for new, old in zip(values["log_probs"], values["old_log_probs"]) if new is not None]
    usual = (sum(each**2 for each in moved) / len(moved)) ** 0.5
    for share, equal in ((0.5, True), (2.5, False)):
        copy = shutil.copytree(twice, tmp_path / str(share))
        first, second = metrics(copy)
        second["actor/grad_norm"] *= 1 + share * 0.01 * usual
        (copy / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (first, second)))
        found = {term.name: term for term in verify_step(copy, 2).terms}
        assert found["gradient norm"].equal == equal
        assert found["advantage"].equal


FAULTS = {  # what the configuration says and the run did not do → the term that differs first
    "reward": ("reward_model.score_weight", 2.0),
    "advantage": ("algorithm.norm_adv_by_std_in_grpo", False),
    "loss": ("actor_rollout_ref.actor.kl_loss_coef", 0.1),
    "ratio": ("actor_rollout_ref.actor.clip_ratio", 0.001),
    "learning rate": ("actor_rollout_ref.actor.optim.lr", 2e-2),
    "weight change": ("actor_rollout_ref.actor.optim.betas", [0.9, 0.99]),
}


@pytest.mark.parametrize("term", FAULTS)
def test_a_fault_is_named_by_its_term(done, twice, tmp_path, term):
    key, value = FAULTS[term]
    copy = shutil.copytree(twice if term == "ratio" else done, tmp_path / "copy")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    section = config
    *path, name = key.split(".")
    for each in path:
        section = section[each]
    section[name] = value
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    found = verify_step(copy, 2)
    assert found.first is not None
    assert found.first.name == term, found.explain()


def edit_lines(file, edit):
    records = [json.loads(line) for line in file.read_text().splitlines()]
    edit(records)
    file.write_text("".join(json.dumps(each) + "\n" for each in records))


def forge_mask(rows):
    """A token that its segment says was sampled, as if it had been observed."""
    mask = rows[0]["response_mask"]
    mask[mask.index(1)] = 0


def forget_log_probs(rows):
    """What NaN is written as."""
    for row in rows:
        row["token_values"]["log_probs"] = [None] * len(row["response_mask"])


DUMP, METRICS = "rollouts/2.jsonl", "metrics.jsonl"
FORGERIES = {  # of the dump or the metrics → the term that differs first, and what recorded it
    "score": ("reward", DUMP, lambda rows: rows[0].update(score=17.0)),
    "mask": ("mask", DUMP, forge_mask),
    "ids": ("mask", DUMP, lambda rows: rows[0]["response_ids"].reverse()),
    "text of a segment": ("text", DUMP, lambda rows: rows[0]["segments"][0].update(text="The answer is 42.")),
    "output": ("text", DUMP, lambda rows: rows[1].update(output=rows[1]["output"] + " ")),
    "turns": ("turns", METRICS, lambda rows: rows[0].update(num_turns=40)),
    "mean of the turns": ("turns", METRICS, lambda steps: steps[-1].update({"num_turns/mean": 2.0})),
    "endings": ("turns", METRICS, lambda rows: rows[0].update(stop_reason="max_turns")),
    "mean reward": ("reward", METRICS, lambda steps: steps[-1].update({"reward/total/mean": 0.9})),
    "success": ("reward", METRICS, lambda steps: steps[-1].update({"reward/success/mean": 1.0})),
    "log-probs": ("log-prob in the update", DUMP, forget_log_probs),
    "gradient norm": ("gradient norm", METRICS, lambda steps: steps[-1].update({"actor/grad_norm": None})),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_record_that_says_something_else_is_named(done, tmp_path, what):
    copy, (term, recorded_in, edit) = shutil.copytree(done, tmp_path / "copy"), FORGERIES[what]
    edit_lines(copy / (DUMP if what in ("turns", "endings") else recorded_in), edit)
    found = verify_step(copy, 2)
    assert found.first is not None
    assert found.first.name == term, found.explain()
    assert f"{recorded_in.removeprefix('rollouts/')}: " in found.first.where


@pytest.mark.parametrize("checkpoint", ["global_step_1", "global_step_2"])
def test_weights_that_only_others_read_are_compared(done, tmp_path, checkpoint):
    copy = shutil.copytree(done, tmp_path / "copy")
    file = copy / checkpoint / "actor" / "huggingface" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] += 1e-3
    save_file(weights, file, {"format": "pt"})
    assert f"{checkpoint}/actor/huggingface has another model.norm.weight" in verify_step(copy, 2).explain()


def test_means_over_rollouts_that_the_dump_lacks_are_not_compared(done, tmp_path):
    copy = shutil.copytree(done, tmp_path / "copy")
    edit_lines(copy / METRICS, lambda steps: steps[-1].update({"rollout/nothing_sampled": 1.0, "num_turns/mean": 9.0}))
    found = verify_step(copy, 2)
    assert found.first is None
    assert any("not in the dump" in note for note in found.notes)


def test_what_the_run_did_not_record_is_said(done, tmp_path):
    copy = shutil.copytree(done, tmp_path / "copy")
    edit_lines(copy / "metrics.jsonl", lambda steps: steps[-1].pop("actor/grad_norm"))
    assert "not recorded, so not compared: actor/grad_norm" in verify_step(copy, 2).notes


def wrong_mask(batch):
    """Trains on the first token of a tool's answer."""
    mask = batch.batch["response_mask"]
    follows = mask.flip(1).cumsum(1).flip(1)[:, 1:] > 0  # what nothing sampled follows is padding, not an answer
    holes = mask[:, :-1].bool() & ~mask[:, 1:].bool() & follows
    row, token = holes.nonzero()[0].tolist()
    mask[row, token + 1] = 1
    return batch


def test_a_wrong_mask_or_advantage_is_named_as_it_happens(tiny, tmp_path, monkeypatch, caplog):
    expand, compute = ppo.PPOTrainer._expand, ppo.compute_advantages

    def scaled(batch, options, *state):
        found, *rest = compute(batch, options, *state)
        found.batch["advantages"] *= 1.5
        return found, *rest

    for name, patch in (
        ("mask", (ppo.PPOTrainer, "_expand", lambda self, taken: wrong_mask(expand(self, taken)))),
        ("advantage", (ppo, "compute_advantages", scaled)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(*patch)
            train(tiny, tmp_path / name, "trainer.total_training_steps=2", "trainer.save_freq=-1")
        assert metrics(tmp_path / name)[-1]["verify/equal"] == 0.0
        assert f"step 2: the {name} differs: " in caplog.text


def test_what_cannot_be_verified_is_said_at_once(tiny, done, tmp_path, capsys):
    nucleus = tiny.arguments(tmp_path, "trainer.verify_every=1", "actor_rollout_ref.rollout.top_p=0.9")
    assert "rollout.top_p=0.9 cannot be verified" in one_line_error(capsys, ["train", *nucleus])
    nowhere = tiny.arguments(tmp_path, "trainer.verify_every=1", "trainer.rollout_data_dir=null")
    assert "set trainer.rollout_data_dir" in one_line_error(capsys, ["train", *nowhere])
    assert "those that have both: 2" in one_line_error(capsys, ["verify", str(done), "--step", "1"])
    forced = shutil.copytree(done, tmp_path / "forced")
    [dump] = (forced / "rollouts").glob("2.jsonl")
    dump.write_text(dump.read_text().replace('"provenance": "sampled"', '"provenance": "sampled", "grammar": true', 1))
    assert "sampled under a grammar" in one_line_error(capsys, ["verify", str(forced)])
    tuned = shutil.copytree(done, tmp_path / "tuned")
    (tuned / "config.yaml").write_text("trainer: {num_threads: 1}\n")
    assert "is no run of `etude train`" in one_line_error(capsys, ["verify", str(tuned)])
    assert run(cli, ["verify", str(done), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 2
