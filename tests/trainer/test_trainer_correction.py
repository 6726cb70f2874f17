"""Corrections of what the engine sampled, in the real trainer, where the engine samples in bfloat16 and so differs."""

from dataclasses import replace

import pytest
from house_stage import ROLLOUT, metrics

from etude.errors import ConfigError
from etude.inference import ENGINES, check_returns_kept_ids
from etude.inference.native import NativeEngine
from etude.options import TrainOptions
from etude.trainer.correction import MismatchAlarm
from etude.trainer.events import Notice
from etude.trainer.run import train

CORRECTION = "algorithm.rollout_correction"
THREE_STEPS = ("trainer.total_training_steps=3", "data.max_response_length=24", f"{ROLLOUT}.dtype=bfloat16")

# Settings, and the figure that shows that they did something.
CORRECTIONS = {
    "token weights": (("rollout_is=token", "rollout_is_threshold=1.001"), "rollout_is_ratio_fraction_high"),
    "sequence weights": (("rollout_is=sequence", "rollout_is_batch_normalize=true"), "rollout_is_batch_norm_factor"),
    "IcePop": (("rollout_is=token", "rollout_is_threshold=0.999_1.001"), "rollout_is_oob_ratio"),
    "tokens rejected": (("rollout_rs=token_k1", "rollout_rs_threshold=0.99_1.01"), "rollout_rs_masked_fraction"),
    "sequences rejected": (
        ("rollout_rs=[seq_mean_k1,seq_max_k3]", "rollout_rs_threshold=[0.999_1.001,1e-4]"),
        "rollout_rs_seq_masked_fraction",
    ),
    "both": (
        ("rollout_is=token", "rollout_rs=seq_sum_k1", "rollout_rs_threshold=1.01"),
        "rollout_rs_seq_masked_fraction",
    ),
    "off-policy mask": (("off_policy_mask_threshold=1e-6",), "off_policy_masked_fraction"),
    "score centering": (("score_centering_topk=8", "rollout_is=token"), "score_centering_head_mass"),
    "bypass": (("bypass_mode=true", "rollout_rs=token_k2", "rollout_rs_threshold=1e-6"), "rollout_rs_masked_fraction"),
    "bypass, reinforce": (("bypass_mode=true", "loss_type=reinforce", "rollout_is=sequence"), "rollout_is_mean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", CORRECTIONS)
def test_each_correction_trains(tiny, tmp_path, which):
    settings, figure = CORRECTIONS[which]
    train(tiny.config(tmp_path, *THREE_STEPS, *(f"{CORRECTION}.{setting}" for setting in settings)))
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert any(record[f"rollout_corr/{figure}"] > 0 for record in records)
    assert any(record["rollout_corr/k3_kl"] > 1e-9 for record in records)
    assert all(record.get("actor/skipped_steps", 0) == 0 for record in records)


def test_a_step_whose_every_sequence_is_rejected_learns_nothing(tiny, tmp_path):
    settings = (f"{CORRECTION}.rollout_rs=seq_sum_k3", f"{CORRECTION}.rollout_rs_threshold=1e-30")
    train(tiny.config(tmp_path, *THREE_STEPS, "trainer.total_training_steps=2", *settings))
    for record in metrics(tmp_path):
        assert record["training/filter_groups/kept"] == 0
        assert record["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
        assert "actor/loss" not in record
        assert "critic/score/mean" in record  # of all that was sampled


def test_an_engine_far_from_the_trainer_raises_the_alarm_once(tiny, tmp_path):
    events = []
    train(tiny.config(tmp_path, *THREE_STEPS, f"{CORRECTION}.alarm_threshold=1e-5"), events.append)
    said = [event.text for event in events if isinstance(event, Notice)]
    assert len(said) == 1
    first = next(record for record in metrics(tmp_path) if record["rollout_corr/k3_kl"] > 1e-5)
    begin = f"step {first['step']}: the engine's log-probs are far from the trainer's (rollout_corr/k3_kl="
    assert said[0].startswith(begin)
    for cause in ("older weights", "temperature", "top_p", "precision", "chat template"):
        assert cause in said[0]


def test_the_alarm_speaks_again_at_ten_times_as_much():
    said = []
    alarm = MismatchAlarm(0.01)
    for step, distance in enumerate((0.001, 0.02, 0.09, 0.01, 0.3, 0.31, 2.0, 40.0)):
        figures = {"rollout_corr/k3_kl": distance, "rollout_corr/log_prob_diff_p99": 1.0, "training/global_step": step}
        alarm.note(figures, lambda event: said.append(event.text))
    assert [text.partition(":")[0] for text in said] == ["step 1", "step 4", "step 7"]
    MismatchAlarm(None).note(figures, said.append)
    alarm.note({}, said.append)
    assert len(said) == 3
    assert not any("steps old" in text for text in said)
    MismatchAlarm(0.01).note(figures | {"staleness/mean": 0.8}, lambda event: said.append(event.text))
    assert "); the tokens are 0.8 steps old on average (trainer.max_staleness), which may be all; else " in said[-1]


def test_the_temperature_is_the_same_on_both_sides(tiny, tmp_path):
    """One key heats the engine's distribution and the trainer's."""
    for temperature in (0.5, 1.7):
        run = tmp_path / str(temperature)
        train(tiny.config(run, "trainer.total_training_steps=1", f"{ROLLOUT}.temperature={temperature}"))
        (record,) = metrics(run)
        assert record["rollout_corr/log_prob_diff_max"] < 1e-3
        assert record["rollout_corr/eff_sample_size"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("restriction", [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_trainer_renormalises_over_what_top_p_and_top_k_kept(tiny, tmp_path, restriction, epochs):
    settings = ("trainer.total_training_steps=2", restriction, f"actor_rollout_ref.actor.ppo_epochs={epochs}")
    hot = f"{ROLLOUT}.temperature=1.5"  # so that they cut something off
    train(tiny.config(tmp_path, *settings, hot, "actor_rollout_ref.actor.use_kl_loss=true"))
    for record in metrics(tmp_path):
        assert record["rollout_corr/log_prob_diff_max"] < 1e-5
        assert record["rollout_corr/rollout_ppl"] > 1.0001
        if epochs == 1:
            assert record["actor/kl_loss"] < 1e-5 or record["step"] > 1  # the reference renormalises, too


def test_an_engine_that_does_not_return_what_it_kept_cannot_be_trained_with(tiny, tmp_path):
    @ENGINES.register("keeps_no_ids")
    class Engine(NativeEngine):
        returns_kept_ids = False

    for restriction in ("top_p=0.9", "top_k=5"):
        config = tiny.config(tmp_path, f"{ROLLOUT}.name=keeps_no_ids", f"{ROLLOUT}.{restriction}")
        with pytest.raises(ConfigError, match=f"^{ROLLOUT}.{restriction}: {ROLLOUT}.name=keeps_no_ids does not return"):
            train(config)
    options = replace(TrainOptions().rollout, name="keeps_no_ids")
    check_returns_kept_ids(options)
    Engine.returns_heads = False
    with pytest.raises(ConfigError) as caught:
        check_returns_kept_ids(options, heads=4)
    assert caught.value.key == f"{CORRECTION}.score_centering_topk"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_return_what_they_kept_for_a_finite_top_k_only(engine):
    options = replace(TrainOptions().rollout, name=engine, top_p=0.9)
    with pytest.raises(ConfigError) as caught:
        check_returns_kept_ids(options)
    assert caught.value.key == f"{ROLLOUT}.top_k"
    check_returns_kept_ids(replace(options, top_k=512))
    sampled = replace(options, top_k=512, val_kwargs=replace(options.val_kwargs, do_sample=True))
    if engine == "vllm":  # which then returns them of every request
        with pytest.raises(ConfigError) as caught:
            check_returns_kept_ids(sampled)
        assert caught.value.key == f"{ROLLOUT}.val_kwargs.top_k"
    else:
        check_returns_kept_ids(sampled)
