"""Samplers and dataset classes in a run: what they are told, and that a resumed run draws the same."""

import json

import pytest
from house_stage import metrics, same, weights

from etude.data import DataOptions, ResumableLoader, open_sampler
from etude.data.files import read_rows
from etude.dumps import read_rollouts
from etude.errors import ConfigError, DataError
from etude.options.data import SamplerOptions
from etude.trainer.rollout_source import PromptQueue
from etude.trainer.run import train

SAMPLER = """
from etude.data import Sampler, row_success


class Last(Sampler):
    '''The last rows of the file; writes down what it is told.'''

    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.seen = []

    def draw(self, count):
        return range(len(self.data_source) - count, len(self.data_source))

    def update(self, batch):
        self.seen.append(sorted(row_success(batch)))
        assert len(batch) == 8  # two rows, four answers each
        open(__file__ + ".seen", "a").write(f"{self.seen[-1]}\\n")


class Questions:
    '''As verl's datasets: called with files, tokenizer, config and processor.'''

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        from etude.data import read_rows

        assert tokenizer.chat_template
        assert config.max_prompt_length == 128
        assert config.tool_config_path
        self.rows = [row for file in data_files for row in read_rows(file)]

    def __len__(self):
        return 4

    def __getitem__(self, number):
        row = dict(self.rows[number])
        messages = [*row.pop("prompt")[:1], {"role": "user", "content": f"Compute {number} + 7."}]
        return {**row, "raw_prompt": messages}


from etude.data import RLHFDataset


class Fewer(RLHFDataset):
    '''One that was derived from verl's.'''

    def __len__(self):
        return 2


class Numbers:
    def __init__(self, **kwargs):
        pass

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return number
"""


def prompts(run_dir, step):
    return {record["input"] for record in read_rollouts(run_dir / "rollouts" / f"{step}.jsonl")}


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SAMPLER)
    return path


def test_a_sampler_of_ones_own_draws_and_is_told(tiny, own, tmp_path):
    train(
        tiny.config(
            tmp_path / "run",
            f"data.sampler.class_path={own}",
            "data.sampler.class_name=Last",
            "trainer.total_training_steps=2",
        )
    )
    questions = [row["prompt"][1]["content"] for row in read_rows(tiny.folder / "data" / "train.parquet")[-2:]]
    for step in (1, 2):
        found = prompts(tmp_path / "run", step)
        assert len(found) == 2
        assert all(any(question in text for text in found) for question in questions)
    assert own.with_name("mine.py.seen").read_text() == "[6, 7]\n[6, 7]\n"


def test_a_resumed_run_with_a_sampler_is_bit_identical(tiny, tmp_path):
    given = ["data.sampler.class_name=curriculum", "trainer.save_freq=1"]
    train(tiny.config(tmp_path / "whole", *given, "trainer.total_training_steps=4"))
    train(tiny.config(tmp_path / "parts", *given, "trainer.total_training_steps=2"))
    train(tiny.config(tmp_path / "parts", *given, "trainer.total_training_steps=4"))
    assert same(weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4))
    for step in range(1, 5):
        assert prompts(tmp_path / "whole", step) == prompts(tmp_path / "parts", step)
    with pytest.raises(ConfigError, match=r"data\.sampler\.class_name"):
        train(tiny.config(tmp_path / "parts", "trainer.total_training_steps=5"))


def test_the_floor_moves_what_a_curriculum_draws(tiny, tmp_path):
    drawn = []
    for floor in (0.0, 1.0):
        given = ["data.sampler.class_name=curriculum", f"data.sampler.floor={floor}", "trainer.total_training_steps=3"]
        train(tiny.config(tmp_path / str(floor), *given))
        drawn.append([prompts(tmp_path / str(floor), step) for step in range(1, 4)])
    assert drawn[0][0] == drawn[1][0]  # nothing is known yet
    assert drawn[0] != drawn[1]


def test_the_weights_move_what_a_mixture_draws(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.sampler\.weights names nowhere; the rows are of etude/arithmetic"):
        train(tiny.config(tmp_path, "data.sampler.class_name=mixture", "+data.sampler.weights.nowhere=1"))


def test_a_dataset_class_of_ones_own_makes_the_rows(tiny, own, tmp_path):
    given = [f"data.custom_cls.path={own}", "data.custom_cls.name=Questions", "trainer.total_training_steps=1"]
    train(tiny.config(tmp_path / "run", *given))
    assert all("+ 7." in text for text in prompts(tmp_path / "run", 1))
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1]


def test_a_class_derived_from_rlhf_dataset_makes_the_rows(tiny, own, tmp_path):
    given = [f"data.custom_cls.path={own}", "data.custom_cls.name=Fewer", "trainer.total_training_steps=2"]
    train(tiny.config(tmp_path / "run", *given))
    assert prompts(tmp_path / "run", 1) == prompts(tmp_path / "run", 2)  # there are only two rows


def test_a_class_whose_items_are_no_rows_is_named(tiny, own, tmp_path):
    with pytest.raises(DataError, match=r"data\.custom_cls: item 0 must be a row, got int"):
        train(tiny.config(tmp_path, f"data.custom_cls.path={own}", "data.custom_cls.name=Numbers"))


def test_prompts_that_a_sampler_drew_ahead_are_drawn_again_on_resume():
    """Rows in flight when a checkpoint is written: their batch follows from no plan, so that each says its own row."""
    options = DataOptions(sampler=SamplerOptions(class_name="curriculum"))

    def queue():
        rows = Rows({"n": number} for number in range(9))
        loader = ResumableLoader(rows, 3, sampler=open_sampler(options, rows))
        return loader, PromptQueue(loader, None)

    _, whole = queue()
    expected = [(number, place, row["n"]) for number, place, row in whole.take(12)]
    _, prompts = queue()
    taken = prompts.take(5)  # two batches drawn, one row of them waits
    state = json.loads(json.dumps(prompts.state_dict(taken[2:])))
    loader, resumed = queue()
    loader.load_state_dict(state["loader"])
    resumed.restore(state)
    assert [(number, place, row["n"]) for number, place, row in resumed.take(10)] == expected[2:]


class Rows(list):
    sources = ["one"] * 9
