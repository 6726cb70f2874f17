"""Learning from rollout dumps: the best are imitated token by token, and pairs of them move the policy as DPO says."""

import json

import pytest
from house_stage import metrics, one_line_error, same, steps, weights
from test_trainer_sft import arguments as sft_arguments

from etude.config import compose
from etude.data.dumped import rank_pairs, read_dumps
from etude.dumps import read_rollouts
from etude.errors import ConfigError
from etude.trainer.run import fine_tune, train
from etude.trainer.sft import SFTTrainer
from etude.training import demonstrations_to_batch


@pytest.fixture(scope="module")
def dumps(tiny, tmp_path_factory):
    """The dumps of a run of two steps: four prompts with four answers each."""
    folder = tmp_path_factory.mktemp("rolled")
    train(tiny.config(folder, "trainer.total_training_steps=2"))
    return [str(folder / "rollouts" / f"{step}.jsonl") for step in (1, 2)]


def arguments(tiny, dumps, folder, *overrides):
    given = (f"data.train_files=[{','.join(dumps)}]", "data.train_batch_size=2", "data.max_length=400")
    return sft_arguments(tiny, folder, *given, "trainer.total_training_steps=6", *overrides)


def config(*given):
    return compose("sft", arguments(*given), root="sft")


def test_the_best_rollouts_are_imitated_with_the_very_ids_and_mask_of_the_dump(tiny, dumps, tmp_path):
    trainer = SFTTrainer(config(tiny, dumps, tmp_path, "data.min_score=0.1", "data.max_per_prompt=1"))
    records = [record for file in dumps for record in read_rollouts(file)]
    best = {}
    for record in records:
        if record["score"] >= 0.1 and record["score"] > best.get(record["uid"], {"score": -1})["score"]:
            best[record["uid"]] = record
    assert 0 < len(best) == len(trainer.examples) < len(records)
    batch = demonstrations_to_batch([row["demonstration"] for row in trainer.examples], 0).batch
    for number, record in enumerate(best.values()):
        ids, width = record["prompt_ids"] + record["response_ids"], len(record["prompt_ids"])
        assert batch["input_ids"][number][: len(ids)].tolist() == ids
        assert batch["attention_mask"][number].sum() == len(ids)
        assert batch["response_mask"][number][width : len(ids)].tolist() == record["response_mask"]
        assert not batch["response_mask"][number][:width].any()
    trainer.groups.close()


def test_imitating_the_best_makes_them_likelier(tiny, dumps, tmp_path):
    """All are in every step."""
    fine_tune(config(tiny, dumps, tmp_path, "data.max_per_prompt=1", "data.train_batch_size=4", "optim.lr=1e-4"))
    losses = [record["sft/loss"] for record in metrics(tmp_path)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_preferring_the_better_raises_the_margin(tiny, dumps, tmp_path):
    """Four pairs, two a step: the margin of pairs is 0 when they are first seen, and grows from then on."""
    fine_tune(config(tiny, dumps, tmp_path, "loss.name=dpo", "data.max_per_prompt=1", "data.shuffle=false"))
    pairs = rank_pairs(read_dumps(dumps), None, 1)
    epoch = -(-len(pairs) // 2)
    figures = metrics(tmp_path)
    assert figures[0]["dpo/margin"] == 0
    assert figures[0]["dpo/loss"] == pytest.approx(0.6931472, abs=1e-6)
    later = figures[epoch:]
    assert all(record["dpo/margin"] > 0.05 for record in later)
    assert all(record["dpo/accuracy"] == 1 for record in later[-1:])
    assert later[-1]["dpo/loss"] < figures[0]["dpo/loss"]


def test_a_preference_run_resumes_with_the_same_bits_and_the_same_reference(tiny, dumps, tmp_path):
    settings = ("loss.name=dpo", "loss.beta=0.5", "trainer.save_freq=3", "trainer.max_actor_ckpt_to_keep=null")
    fine_tune(config(tiny, dumps, tmp_path / "whole", *settings))
    fine_tune(config(tiny, dumps, tmp_path / "parts", *settings, "trainer.total_training_steps=3"))
    fine_tune(config(tiny, dumps, tmp_path / "parts", *settings))
    assert steps(tmp_path / "parts") == [1, 2, 3, 4, 5, 6]
    assert same(weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6))
    for ours, theirs in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole")):
        assert [ours[f"dpo/{name}"] for name in ("loss", "margin")] == [
            theirs[f"dpo/{name}"] for name in ("loss", "margin")
        ]


def test_wrong_dumps_are_one_line(tiny, dumps, tmp_path, capsys):
    record = next(read_rollouts(dumps[0]))
    strange = tmp_path / "strange.jsonl"
    strange.write_text(json.dumps(record | {"prompt_ids": [10**6]}) + "\n")
    for given, wanted in {
        (f"data.train_files={strange}",): "1 has token ids that the tokenizer of ",
        ("data.max_length=20",): f"{dumps[0]}",
        ("data.min_score=99",): "none of 16 rollouts has a score of at least data.min_score=99",
        ("loss.name=dpo", "data.min_score=99"): "16 rollouts make no pair",
        ("loss.name=ipo",): "loss.name must be one of sft, dpo",
        ("loss.name=dpo", "loss.beta=0"): "loss.beta must be a number above 0",
    }.items():
        assert wanted in one_line_error(capsys, ["sft", *arguments(tiny, dumps, tmp_path / "run", *given)])
    talks = f"data.train_files={tiny.folder}/by_heart.parquet"
    with pytest.raises(ConfigError, match=r"loss\.name=dpo learns from rollout dumps .*by_heart\.parquet is none"):
        fine_tune(config(tiny, dumps, tmp_path / "run", "loss.name=dpo", talks))
