"""Wrong input, each one line on stderr with status 2, before any model is loaded."""

import shutil

import pytest
from house_stage import ROLLOUT, one_line_error
from trainer_tools import Moody

from etude.data.files import read_rows, write_parquet
from etude.workers import role


@pytest.fixture
def refused(tiny, tmp_path, capsys, monkeypatch):
    """What `etude train` says of overrides; loading a model is a failure."""

    def loads(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(role, "load_causal_lm", loads)
    return lambda *overrides, command="train": one_line_error(
        capsys, [command, *tiny.arguments(tmp_path / "run", *overrides)]
    )


SETTINGS = {
    "data.train_batch_size=9": "data.train_batch_size must be between 1 and 8, the number of rows, got 9",
    "data.max_prompt_length=5": "every prompt is longer than data.max_prompt_length=5 tokens; raise data.max_prompt_length",
    "data.prompt_key=promt": "no column 'promt' (data.prompt_key); did you mean 'prompt'?",
    f"{ROLLOUT}.n=1": f"{ROLLOUT}.n=1 (command line): algorithm.adv_estimator=grpo compares answers",
    "custom_reward_function.name=compute_scores": "'compute_scores'; did you mean 'compute_score'?",
    "trainer.device=cuda": "no GPU is visible",
    "trainer": "cannot read the argument 'trainer'; write key=value",
    "--example": "no option '--example'; see its --help",
}
"""What composing refuses is in tests/checks: two of these, and what is known only once rows and scorer are read."""


@pytest.mark.parametrize("override", SETTINGS)
def test_a_wrong_setting_is_one_line(refused, override):
    assert SETTINGS[override] in refused(override)


def test_a_prompt_that_is_too_long_names_its_row(refused, tiny):
    line = refused("data.max_prompt_length=5", "data.filter_overlong_prompts=false")
    assert f"{tiny.folder}/data/train.parquet: row 0: the prompt has " in line
    assert "tokens, tool schemas included; data.max_prompt_length is 5" in line


def test_a_malformed_row_names_file_and_line(refused, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"data_source": "x", "prompt": [{"role": "user", "content": "hi"}]}\n{"data_source": "x", "pro\n')
    line = refused(f"data.train_files={path}")
    assert f"{path}" in line
    assert "2" in line.removeprefix(str(path))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"tools_kwargs": {"calculater": {"create_kwargs": {"a": 1}}}}, "'calculater'; did you mean 'calculator'?"),
        ({"tools_kwargs": None}, "need_tools_kwargs is true but extra_info.tools_kwargs is missing"),
        ({"tools_kwargs": {"calculator": {"make_kwargs": {"a": 1}}}}, "unknown key 'make_kwargs'"),
    ],
)
def test_wrong_tool_arguments_name_the_row(refused, tiny, tmp_path, change, wanted):
    rows = read_rows(tiny.folder / "data" / "train.parquet")
    rows[3]["extra_info"] |= change
    path = tmp_path / "rows.jsonl"
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refused(f"data.train_files={path}")
    assert wanted in line
    assert f"{path}" in line


def test_an_agent_loop_that_does_not_exist_names_the_row(refused, tiny, tmp_path):
    rows = read_rows(tiny.folder / "data" / "train.parquet")
    rows[3]["agent_name"] = "tool_agnet"
    path = tmp_path / "rows.parquet"
    write_parquet(rows, path)
    line = refused(f"data.train_files={path}")
    assert f"{path}: row 3: agent_name: unknown agent loop 'tool_agnet'; did you mean 'tool_agent'?" in line


def test_tools_turned_off_need_no_arguments(tiny, tmp_path, capsys):
    from house_stage import metrics

    from etude.trainer.run import train

    train(tiny.config(tmp_path, f"{ROLLOUT}.multi_turn.enable=false", "trainer.total_training_steps=1"))
    assert not any(name.startswith("tool/") for name in metrics(tmp_path)[0])


def test_a_model_without_tokenizer_is_one_line(refused, tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.model, folder)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer there (tokenizer.json is missing)" in refused(f"actor_rollout_ref.model.path={folder}")


def test_a_model_without_weights_is_one_line(tiny, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny.model, folder)
    (folder / "model.safetensors").unlink()
    override = f"actor_rollout_ref.model.path={folder}"
    assert f"{folder}: cannot load the model" in one_line_error(
        capsys, ["train", *tiny.arguments(tmp_path / "run", override)]
    )


def test_a_wrong_tool_file_names_its_entry(refused, tmp_path):
    tool = Moody(tmp_path / "tool", "pass")
    tool.yaml.write_text(tool.yaml.read_text().replace(":Moody", ":Mody"))
    line = refused(tool.override)
    assert f"{tool.yaml}: tools[0]" in line
    assert "did you mean 'Moody'?" in line


@pytest.mark.parametrize("command", ["train", "eval"])
def test_what_is_validated_is_checked_first(refused, tiny, tmp_path, command):
    rows = read_rows(tiny.folder / "data" / "val.parquet")
    del rows[1]["data_source"]
    path = write_parquet(rows, tmp_path / "val.parquet")
    assert "needs 'data_source'" in refused(f"data.val_files={path}", command=command)


def test_an_evaluation_needs_rows(refused):
    assert "data.val_files is empty" in refused(command="eval")


ALTERNATING = """{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
ONE_ANSWER = ALTERNATING.replace(
    "(m.role == 'user') != (loop.index0 % 2 == 0)", "not loop.first and m.role == loop.previtem.role"
)
"""A template that takes one message of a role after the other, tools' among them."""


@pytest.fixture
def with_template(tiny, tmp_path):
    """The tiny model with another chat template, as an override."""

    def make(template):
        folder = tmp_path / "model"
        shutil.copytree(tiny.model, folder)
        (folder / "chat_template.jinja").write_text(template)
        return f"actor_rollout_ref.model.path={folder}"

    return make


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ALTERNATING, "the chat template cannot show the model a tool's answer: "),
        (ONE_ANSWER, "the chat template cannot show the model the answers to two calls in one turn: "),
    ],
)
def test_a_template_that_cannot_answer_tools_is_one_line(refused, with_template, template, reason):
    model = with_template(template)
    line = refused(model)
    assert "actor_rollout_ref.rollout.multi_turn: tools are configured, but" in line
    assert reason in line
    assert "set multi_turn.tools_in_system=true" in line


def test_a_template_that_cannot_be_continued_names_the_model(refused, with_template):
    model = with_template("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    assert f"{model.partition('=')[2]}: the chat template does not close an assistant turn" in refused(model)


@pytest.mark.parametrize(
    "format_override", [f"{ROLLOUT}.multi_turn.format=search_r1", f"{ROLLOUT}.multi_turn.enable=false"]
)
def test_a_template_without_tools_does_where_it_is_asked_for_none(tiny, tmp_path, with_template, format_override):
    from etude.trainer.setup import prepare

    setup, _ = prepare(tiny.config(tmp_path, with_template(ALTERNATING), format_override))
    assert not setup.chat.answers_tools


def test_an_agent_loop_of_the_users_own_shows_answers_in_its_own_way(tiny, tmp_path, with_template):
    from etude.agents import AgentLoopBase, register
    from etude.trainer.setup import prepare

    @register("own_way")
    class OwnWay(AgentLoopBase):
        async def run(self, sampling_params, **row):
            raise NotImplementedError

    prepare(tiny.config(tmp_path, with_template(ALTERNATING), f"{ROLLOUT}.agent.default_agent_loop=own_way"))


LLAMA = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.tool_calls %}{%- for call in m.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
    {%- endfor %}{%- else %}{{- m.content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize(("format_name", "warned"), [("hermes", True), ("llama3_json", False), ("search_r1", False)])
def test_a_format_that_does_not_read_the_templates_own_calls_is_warned_of(
    tiny, tmp_path, with_template, caplog, format_name, warned
):
    from etude.trainer.setup import prepare

    prepare(tiny.config(tmp_path, with_template(LLAMA), f"{ROLLOUT}.multi_turn.format={format_name}"))
    lines = [record.getMessage() for record in caplog.records if "multi_turn.format" in record.getMessage()]
    assert len(lines) == warned
    assert all("format=hermes does not read the call" in line and '"parameters": {"city"' in line for line in lines)


def test_a_format_that_is_meant_is_not_warned_of(tiny, tmp_path, caplog):
    from etude.trainer.setup import prepare

    for own in ("hermes", "sums"):  # the latter a parser of the user's, which the template knows nothing of
        prepare(tiny.config(tmp_path, f"{ROLLOUT}.multi_turn.format={own}"))
    assert not caplog.records
