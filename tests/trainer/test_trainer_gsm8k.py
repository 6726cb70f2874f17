"""GSM8K with its tool, from the public files to a resumed run."""

import asyncio
import json
from pathlib import Path

import pytest
from house_stage import Tiny, metrics, same, steps, weights

from etude.agents import AgentContext, MultiTurnOptions, RolloutOptions, Sampling, ToolAgentLoop, TrajectoryClient
from etude.chat import ChatTemplate, HermesToolParser
from etude.cli.main import cli, run
from etude.config import compose
from etude.data.files import read_rows, write_parquet
from etude.inference import ScriptedEngine
from etude.models import load_tokenizer
from etude.tools import builtin_config, load_tools
from etude.trainer.run import train

TOOLS = [builtin_config("gsm8k"), builtin_config("calculator")]
SOURCE = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not (SOURCE / "train.jsonl").is_file(), reason="the GSM8K files are not there")


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """The whole data set, prepared by the command."""
    folder = tmp_path_factory.mktemp("gsm8k")
    assert run(cli, ["data", "gsm8k", "--input", str(SOURCE), "--output-dir", str(folder)]) == 0
    return folder


@needs_gsm8k
def test_the_whole_data_set_is_prepared(gsm8k):
    train_rows, test_rows = (read_rows(gsm8k / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train_rows), len(test_rows)) == (7473, 1319)
    row = train_rows[0]
    truth = row["reward_model"]["ground_truth"]
    assert row["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"]["ground_truth"] == truth == "72"


def answered(tiny, row, answers):
    """The trajectory of a model that submits `answers` one after another."""
    tokenizer = load_tokenizer(tiny.model)
    chat = ChatTemplate(tokenizer)
    calls = [{"name": "calc_gsm8k_reward", "arguments": {"answer": answer}} for answer in answers]
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + ["That is it."]

    def script(request_id, prompt_ids, turn):
        return [*tokenizer.encode(turns[turn], add_special_tokens=False), chat.end_of_turn_id]

    async def roll():
        client = TrajectoryClient(ScriptedEngine(script), "r")
        context = AgentContext(
            config=None,
            options=RolloutOptions(prompt_length=4096, response_length=4096, multi_turn=MultiTurnOptions()),
            tokenizer=tokenizer,
            chat=chat,
            parser=HermesToolParser(tokenizer),
            tools={tool.name: tool for tool in load_tools(builtin_config("gsm8k"))},
        )
        loop = ToolAgentLoop(trainer_config=context, server_manager=client, tokenizer=tokenizer, processor=None)
        params = Sampling(1.0, 1.0, -1, seed=1).params(0, 4096, chat.stop_token_ids)
        kwargs = row["extra_info"]["tools_kwargs"]
        return await loop.run(params, raw_prompt=row["prompt"], tools_kwargs=kwargs, request_id="r")

    return asyncio.run(roll())


@needs_gsm8k
def test_a_right_answer_earns_one_and_a_wrong_one_nothing(tiny, gsm8k):
    rows = read_rows(gsm8k / "test.parquet")
    for row in rows[:40]:
        gold = row["reward_model"]["ground_truth"]
        right = answered(tiny, row, [gold]).rewards
        assert right.total() == right.final["calc_gsm8k_reward"] == 1.0
        wrong = answered(tiny, row, ["-123456"]).rewards
        assert wrong.final["calc_gsm8k_reward"] == 0.0
        assert [value for _, _, value in wrong.steps] == [-0.05]  # no progress
    twice = answered(tiny, rows[0], [rows[0]["reward_model"]["ground_truth"], "-1"]).rewards
    assert [value for _, _, value in twice.steps] == [0.0, -0.05]
    assert twice.total() == pytest.approx(-0.05)  # the last answer counts
    assert answered(tiny, rows[0], []).rewards.total() == 0.0


@pytest.mark.slow
@needs_gsm8k
def test_training_with_the_tool_validates_saves_and_resumes(tiny: Tiny, gsm8k, tmp_path):
    tokenizer = load_tokenizer(tiny.model)
    rows = sorted(read_rows(gsm8k / "train.parquet"), key=lambda row: len(row["prompt"][1]["content"]))[:8]
    few = write_parquet(rows, tmp_path / "few.parquet")
    tools = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(TOOLS)]
    longest = max(ChatTemplate(tokenizer).prompt_length(row["prompt"], tools) for row in rows)
    assert longest < 1000  # of the tiny model's 1,024 positions

    def config(folder, steps_wanted):
        return compose(
            "gsm8k_tool",
            [
                f"data.train_files={few}",
                f"data.val_files={few}",
                "data.val_max_samples=2",
                f"data.max_prompt_length={longest}",
                "data.max_response_length=24",
                "data.train_batch_size=2",
                f"actor_rollout_ref.model.path={tiny.model}",
                "actor_rollout_ref.rollout.n=2",
                f"trainer.total_training_steps={steps_wanted}",
                "trainer.test_freq=1",
                "trainer.deterministic=true",
                "trainer.num_threads=1",
                "trainer.logger=[jsonl]",
                "trainer.report=false",
                f"trainer.default_local_dir={folder}",
            ],
        )

    train(config(tmp_path / "parts", 1))
    train(config(tmp_path / "parts", 2))
    train(config(tmp_path / "whole", 2))
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole") == [0, 1, 2]
    assert same(weights(tmp_path / "parts", 2), weights(tmp_path / "whole", 2))
    record = metrics(tmp_path / "whole")[-1]
    assert "val-core/openai/gsm8k/reward/mean@1" in record
    assert "tool/calc_gsm8k_reward/reward" in record  # scored at the end, called or not
    assert "reward/score/mean" not in record  # the tool is the only judge
    assert record["rollout/dropped"] == 0
