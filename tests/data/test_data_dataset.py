"""The prompt dataset: what its items carry, and that a prompt is kept whole or not at all."""

import json
import logging

import pytest
from omegaconf import OmegaConf

from etude.data import DataOptions, RLDataset, RLHFDataset, write_parquet
from etude.errors import ConfigError, DataError
from etude.tools import builtin_config

SCHEMAS = {
    "calculator": {"type": "function", "function": {"name": "calculator", "description": "x" * 40}},
    "search": {"type": "function", "function": {"name": "search", "description": "y" * 80}},
}


class CharacterTemplate:
    """A chat template whose tokens are characters."""

    @property
    def tokenizer(self):
        return self

    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(number) for number in ids)

    def initial_ids(self, messages, tools, image_tokens=()):
        if any(message["role"] == "developer" for message in messages):
            raise DataError("the chat template refuses the messages: no developer role\nhere")
        text = json.dumps(tools or []) + "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return [ord(character) for character in text]

    def require_whole(self, messages, tools):
        self.initial_ids(messages, tools)

    def prompt_length(self, messages, tools, image_tokens):
        return len(self.initial_ids(messages, tools))


def a_row(content="Hi", **extra_info):
    return {
        "data_source": "task",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": content},
        "extra_info": extra_info,
    }


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(files, schemas=None, max_samples=-1, **options):
    return RLDataset(
        files, CharacterTemplate(), schemas, DataOptions(**options), interactions=["n"], max_samples=max_samples
    )


@pytest.mark.parametrize("missing", [None, "", " ", float("nan"), [], {}, [None, ""]], ids=repr)
def test_a_row_that_cannot_be_scored_is_refused_by_number(tmp_path, missing):
    rows = [a_row("5") | {"data_source": "openai/gsm8k"} for _ in range(3)]
    rows[1]["reward_model"]["ground_truth"] = missing
    numbered = {jsonl(tmp_path / "a.jsonl", rows): ":2: "}
    if missing is None or isinstance(missing, str):  # a Parquet column holds values of one type
        numbered[str(write_parquet(rows, tmp_path / "a.parquet"))] = ": row 1: "
    for file, number in numbered.items():
        with pytest.raises(DataError) as raised:
            RLDataset(file, CharacterTemplate(), None, DataOptions(), scored=True)
        assert str(raised.value).startswith(f"{file}{number}reward_model.ground_truth is missing")
        assert len(dataset(file)) == 3  # a scorer of one's own may need none
    rows[1]["reward_model"]["ground_truth"] = 0
    RLDataset(jsonl(tmp_path / "b.jsonl", rows), CharacterTemplate(), None, DataOptions(), scored=True)


def test_a_program_whose_tests_do_not_pair_is_refused_by_number(tmp_path):
    tests = {"inputs": ["1\n", "2\n"], "outputs": ["2\n"]}
    rows = [
        a_row({"inputs": ["1\n"], "outputs": ["2\n"]}),
        a_row(json.dumps(tests)),
        a_row({"assert_case": ["f()", 1]}),
    ]
    for row in rows:
        row.update(data_source="apps", prompt=[{"role": "user", "content": "Double it."}])
    for bad, fault in ((1, "there are 2 inputs and 1 outputs"), (2, "'assert_case' must be a list of statements")):
        file = jsonl(tmp_path / f"{bad}.jsonl", [rows[0], rows[bad]])
        with pytest.raises(DataError) as raised:
            RLDataset(file, CharacterTemplate(), None, DataOptions(), scored=True)
        assert str(raised.value) == f"{file}:2: ground_truth: {fault}"


def test_an_item_carries_what_a_rollout_needs(tmp_path):
    kwargs = {"search": {"create_kwargs": {"k": 1}}}
    row = a_row("Hi", index="q7", tools_kwargs=kwargs, interaction_kwargs={"name": "n"}) | {"ability": "a", "own": [1]}
    item = dataset(str(write_parquet([row | {"agent_name": "mine"}], tmp_path / "x.parquet")), SCHEMAS)[0]
    text = json.dumps(list(SCHEMAS.values())) + "<user>Hi"
    assert item["raw_prompt"] == [{"role": "user", "content": "Hi"}]
    assert item["full_prompts"] == text
    assert item["raw_prompt_ids"] == [ord(character) for character in text]
    assert item["index"] == "q7"
    assert item["tools_kwargs"] == item["extra_info"]["tools_kwargs"] == kwargs
    assert item["interaction_kwargs"] == {"name": "n"}
    assert item["reward_model"] == {"style": "rule", "ground_truth": "Hi"}
    assert (item["data_source"], item["agent_name"], item["ability"], item["own"]) == ("task", "mine", "a", [1])
    assert "uid" not in item


def test_a_missing_index_is_the_row_number_over_all_files(tmp_path):
    files = [jsonl(tmp_path / "a.jsonl", [a_row(), a_row()]), jsonl(tmp_path / "b.jsonl", [a_row(index=9), a_row()])]
    assert [item["index"] for item in dataset(files)] == [0, 1, 9, 3]
    assert dataset(files[0])[0]["tools_kwargs"] == {}


def test_items_are_copies(tmp_path):
    data = dataset(jsonl(tmp_path / "a.jsonl", [a_row(tools_kwargs={"search": {}})]), SCHEMAS)
    item = data[0]
    item["raw_prompt"][0]["content"] += " changed"
    item["tools_kwargs"]["search"]["create_kwargs"] = {"x": 1}
    assert data[0]["raw_prompt"][0]["content"] == "Hi"
    assert data[0]["tools_kwargs"] == {"search": {}}


def test_filtering_counts_the_schemas_of_the_active_tools(tmp_path, caplog):
    rows = [a_row("all"), a_row("one", tool_selection=["calculator"]), a_row("none", tool_selection=[])]
    path = jsonl(tmp_path / "a.jsonl", rows)
    lengths = [len(item["raw_prompt_ids"]) for item in dataset(path, SCHEMAS)]
    assert lengths[0] > lengths[1] > lengths[2]
    with caplog.at_level(logging.WARNING):
        kept = dataset(path, SCHEMAS, max_prompt_length=lengths[1])
    assert [item["raw_prompt"][0]["content"] for item in kept] == ["one", "none"]
    assert kept.overlong == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: left out 1 of 3 prompts, longer than data.max_prompt_length={lengths[1]} tokens with their tool schemas"
    ]
    assert len(dataset(path, None, max_prompt_length=lengths[2])) == 3  # tools off: schemas cost nothing


def test_a_prompt_of_exactly_the_limit_is_kept_whole(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [a_row("x" * 50)])
    length = len(dataset(path)[0]["raw_prompt_ids"])
    assert len(dataset(path, max_prompt_length=length)[0]["raw_prompt_ids"]) == length
    with pytest.raises(DataError, match=rf"every prompt is longer than data\.max_prompt_length={length - 1}"):
        dataset(path, max_prompt_length=length - 1)


def test_an_overlong_prompt_is_an_error_when_filtering_is_off(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [a_row("x"), a_row("x" * 50)])
    with pytest.raises(DataError) as raised:
        dataset(path, max_prompt_length=20, filter_overlong_prompts=False)
    text = str(raised.value)
    assert text.startswith(f"{path}:2: the prompt has 58 tokens")
    assert "data.max_prompt_length is 20" in text
    assert "filter_overlong_prompts=true" in text
    assert len(dataset(path, max_prompt_length=20, filter_overlong_prompts=False, truncation="drop")) == 1


def test_row_faults_name_file_and_row(tmp_path):
    path = write_parquet(
        [a_row(tools_kwargs={"search": {"create_kwargs": {"k": 1}}}), a_row(index=1)], tmp_path / "x.parquet"
    )
    assert len(dataset(str(path), SCHEMAS)) == 2
    path = write_parquet(
        [a_row(index=1), a_row(tools_kwargs={"find": {"create_kwargs": {"k": 1}}})], tmp_path / "x.parquet"
    )
    with pytest.raises(DataError, match=r"x\.parquet: row 1: tools_kwargs names the tool 'find'"):
        dataset(str(path), SCHEMAS)


def test_a_prompt_the_template_refuses_names_its_row(tmp_path):
    bad = a_row() | {"prompt": [{"role": "developer", "content": "x"}]}
    with pytest.raises(DataError, match=r"a\.jsonl:2: the chat template refuses the messages: no developer role here"):
        dataset(jsonl(tmp_path / "a.jsonl", [a_row(), bad]))


def test_max_samples_are_the_first_that_fit(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [a_row("x" * 50), a_row("b"), a_row("c"), a_row("d")])
    data = dataset(path, max_prompt_length=20, max_samples=2)
    assert [item["raw_prompt"][0]["content"] for item in data] == ["b", "c"]


def test_another_prompt_key(tmp_path):
    row = a_row()
    row["question"] = row.pop("prompt")
    path = jsonl(tmp_path / "a.jsonl", [row])
    assert dataset(path, prompt_key="question")[0]["raw_prompt"][0]["content"] == "Hi"
    with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'prompt'"):
        dataset(path)


def test_no_files_is_an_error():
    with pytest.raises(DataError, match=r"data\.train_files"):
        dataset([])


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [{"role": "user", "content": "c"}]},
        {"reward_model": {"ground_truth": "43"}},
        {"data_source": "gsm8k"},
        {"extra_info": {"index": 1, "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "43"}}}}},
        {"answer": "43"},
    ],
)
def test_the_fingerprint_of_a_file_follows_all_of_its_rows(tmp_path, change):
    rows = [a_row("a"), a_row("b")]
    first = dataset([jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows)])
    other = jsonl(tmp_path / "c.jsonl", [rows[0], rows[1] | change])
    digests = [*first.fingerprints.values(), *dataset(other).fingerprints.values()]
    assert list(first.fingerprints) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert digests[0] == digests[1] != digests[2]


@pytest.fixture(scope="module")
def tokenizer():
    from etude.models import build_tiny_tokenizer

    return build_tiny_tokenizer(["Compute 2 + 3."], 300)


def test_the_documents_class_is_made_of_files_a_tokenizer_and_the_data_section(tokenizer, tmp_path, caplog):
    config = OmegaConf.create(
        {
            "prompt_key": "prompt",
            "max_prompt_length": 500,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": 2,
            "truncation": "error",
            "seed": None,
            "tool_config_path": str(builtin_config("calculator")),
        }
    )
    row = a_row("2 + 3", index=4, tools_kwargs={"calculator": {"create_kwargs": {}}})
    file = jsonl(tmp_path / "a.jsonl", [row, a_row("x" * 600), row])
    rows = RLHFDataset(data_files=file, tokenizer=tokenizer, config=config)
    assert len(rows) == 2
    assert isinstance(rows, RLDataset)
    assert "calculator" in rows[0]["full_prompts"]
    assert rows[0]["raw_prompt"] == row["prompt"]
    [told] = [message for message in caplog.messages if "no effect" in message]
    assert told.endswith("data.filter_overlong_prompts_workers")
    del config.tool_config_path
    bare = RLHFDataset(OmegaConf.create([file, file]), tokenizer, config, None, max_samples=1)
    assert len(bare) == 1
    assert "calculator" not in bare[0]["full_prompts"]
    assert bare[0]["tools_kwargs"] == row["extra_info"]["tools_kwargs"]  # whichever tools the caller has


def test_the_documents_class_refuses_what_would_cut_prompts(tokenizer, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [a_row("a")])
    with pytest.raises(ConfigError, match="truncation must be one of error, drop, got 'left'"):
        RLHFDataset(file, tokenizer, {"truncation": "left"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_batch_size", 0),
        ("val_batch_size", 0),
        ("max_prompt_length", 0),
        ("max_response_length", -1),
        ("val_max_samples", 0),
        ("seed", -1),
        ("truncation", "left"),
    ],
)
def test_options_refuse_what_cannot_work(key, value):
    with pytest.raises(ConfigError, match=f"^{key} must"):
        DataOptions(**{key: value})


def test_options_take_one_file_or_several():
    options = DataOptions(train_files="a.parquet", val_files=["b.parquet", "c.parquet"])
    assert (options.train_files, options.val_files) == (("a.parquet",), ("b.parquet", "c.parquet"))
