"""The examples in which a tiny model learns a real tool: what their demonstrations show is what the tools answer, and a step
of one runs. That the model learns is in docs/."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from house_stage import metrics
from server_stage import ServerProcess

import etude
from etude.cli.main import cli, run
from etude.config import compose
from etude.data import SFTDataset, read_rows
from etude.dumps import read_rollouts
from etude.quickstart.example import find_example
from etude.quickstart.prepare import write_model, write_tables
from etude.rewards import compute_score
from etude.schemas import FunctionCall
from etude.tools import ToolSession, load_tools
from etude.trainer.run import train

EXAMPLES = Path(etude.__file__).parents[1] / "examples"


def make(example, folder, **sizes):
    """The example's tables, with fewer demonstrations, and its model."""
    found = find_example(example)
    write_tables(found, folder, 1, replace(found.options.rows, demonstrations=60, **sizes))
    write_model(folder, [str(EXAMPLES / example / "tools.yaml")], 1, found.options.vocabulary)


@pytest.fixture(scope="module")
def phone_book(tmp_path_factory):
    """The example's folder, with its index."""
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    from etude.retrieval import build_index

    folder = tmp_path_factory.mktemp("phone_book")
    make("phone_book", folder)
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder


async def answers(example, calls):
    """What the example's tool says to each of these calls."""
    [tool] = load_tools(str(EXAMPLES / example / "tools.yaml"))
    async with ToolSession({tool.name: tool}, {}, request_id="example") as session:
        asked = [FunctionCall(name=tool.name, arguments=json.dumps(arguments)) for arguments in calls]
        return [outcome.response.text for outcome in await session.execute(asked, 0)]


def demonstrated(folder):
    """(the arguments of a demonstration's call, what the tool says there, the last message); None without a call."""
    for row in SFTDataset(str(folder / "data" / "demonstrations.parquet")):
        messages = row["messages"]
        called = messages[2].get("tool_calls")
        yield (called[0]["function"]["arguments"], messages[3]["content"], messages[-1]["content"]) if called else None


async def test_the_phone_book_is_found_as_demonstrated(phone_book, monkeypatch):
    with ServerProcess(str(phone_book / "index"), group="retrieve") as server:
        monkeypatch.setenv("SEARCH_URL", f"{server.url}/retrieve")
        for row in read_rows(phone_book / "data" / "test.parquet")[:40]:
            number = row["reward_model"]["ground_truth"]["target"][0]
            book = {line["contents"].split("\n")[1]: line["id"] for line in read_rows(phone_book / "corpus.jsonl")}
            [text] = await answers("phone_book", [{"query": book[number]}])
            assert text == f"Doc 1 (Title: {book[number]})\n{number}"
            assert book[number] in row["prompt"][1]["content"]
            assert compute_score(row["data_source"], f"<answer>{number}</answer>", {"target": [number]}) == 1.0
            assert compute_score(row["data_source"], "<answer>0</answer>", {"target": [number]}) == 0.0
    shown = [each for each in demonstrated(phone_book) if each]
    assert 10 < len(shown) < 50  # of 60: the others answer 0
    for arguments, text, said in shown:
        number = text.split("\n")[1]
        assert text == f"Doc 1 (Title: {arguments['query']})\n{number}"
        assert said == f"<answer>{number}</answer>"


def test_people_of_the_test_are_in_no_other_file(phone_book):
    questions = {split: read_rows(phone_book / "data" / f"{split}.parquet") for split in ("train", "val", "test")}
    people = {
        split: {row["reward_model"]["ground_truth"]["target"][0] for row in rows} for split, rows in questions.items()
    }
    assert [len(people[split]) for split in ("train", "val", "test")] == [240, 64, 128]
    assert len(set.union(*people.values())) == 240 + 64 + 128
    names = {line["id"] for line in read_rows(phone_book / "corpus.jsonl")}
    tested = {name for name in names if any(name in row["prompt"][1]["content"] for row in questions["test"])}
    assert len(names) == 480
    assert not any(each[0]["query"] in tested for each in demonstrated(phone_book) if each)


@pytest.mark.slow
async def test_programs_print_as_demonstrated(tmp_path):
    make("code_sums", tmp_path, train=16, val=4, test=4)
    shown = [each for each in demonstrated(tmp_path) if each]
    assert [text for _, text, _ in shown] == await answers("code_sums", [arguments for arguments, *_ in shown])
    for _, text, said in shown:
        assert said == f"The answer is \\boxed{{{text}}}."
    row = read_rows(tmp_path / "data" / "test.parquet")[0]
    assert compute_score(
        row["data_source"], f"\\boxed{{{row['reward_model']['ground_truth']}}}", row["reward_model"]["ground_truth"]
    )


def test_a_step_of_the_phone_book_runs_over_the_service(phone_book, tmp_path, monkeypatch):
    with ServerProcess(str(phone_book / "index"), group="retrieve") as server:
        monkeypatch.setenv("SEARCH_URL", f"{server.url}/retrieve")
        settings = [
            f"data.train_files={phone_book}/data/train.parquet",
            f"actor_rollout_ref.model.path={phone_book}/model",
            f"trainer.default_local_dir={tmp_path}/run",
            f"trainer.rollout_data_dir={tmp_path}/rollouts",
            "data.max_response_length=16",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=1",
            "trainer.logger=[jsonl]",
            "trainer.report=false",
        ]
        train(compose("agent", settings, EXAMPLES / "phone_book"))
        assert metrics(tmp_path / "run")[-1]["step"] == 1
        assert "search(query: string)" in next(iter(read_rollouts(tmp_path / "rollouts" / "1.jsonl")))["input"]
        command = ["eval", "--config-path", str(EXAMPLES / "phone_book"), "--config-name", "agent", *settings[1:3]]
        more = [
            f"data.val_files={phone_book}/data/test.parquet",
            "data.val_max_samples=2",
            "data.max_response_length=16",
        ]
        assert run(cli, [*command, *more, "--output", str(tmp_path / "eval.json")]) == 0
        assert json.loads((tmp_path / "eval.json").read_text())["success"] == 0.0
