"""The four layers: what overrides what, what is refused, and that nothing is left behind."""

import re
import textwrap
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from etude.config import compose, compose_with_sources, package_roots, quoted
from etude.config.groups import stored
from etude.config.layers import TREE, file_layers
from etude.errors import ConfigError
from etude.options.validate import plain, value_of

ROLLOUT, OPTIM = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def refusal(*arguments, **keywords) -> str:
    """The one line with which a composition is refused."""
    with pytest.raises(ConfigError) as caught:
        compose(*arguments, **keywords)
    text = str(caught.value)
    assert "\n" not in text
    return text


# The package's own tree


@pytest.mark.parametrize("root", package_roots())
def test_every_root_composes_with_everything_filled_in(root):
    config = compose_with_sources(root).config
    assert "${" not in OmegaConf.to_yaml(config)
    assert OmegaConf.is_struct(config)


@pytest.mark.parametrize("root", package_roots())
def test_the_layers_merge_to_what_hydra_composes(root):
    merged = OmegaConf.merge(*(layer.values for layer in file_layers(root, TREE)))
    with stored(), hydra.initialize_config_dir(str(TREE), version_base="1.3"):
        composed = hydra.compose(root)
    assert OmegaConf.to_container(merged, resolve=False) == OmegaConf.to_container(composed, resolve=False)


@pytest.mark.parametrize("path", sorted(TREE.rglob("*.yaml")), ids=lambda p: str(p.relative_to(TREE)))
def test_every_key_is_commented(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    uncommented = []
    in_defaults = False
    for number, line in enumerate(lines):
        if re.match(r"\S", line):
            in_defaults = line.startswith("defaults:")
        is_leaf = re.match(r"\s*\w+: \S", line) is not None
        if is_leaf and not in_defaults and not lines[number - 1].lstrip().startswith("#"):
            uncommented.append(line.strip())
    assert uncommented == []


def test_the_roots_differ_where_they_say():
    assert compose("ppo_trainer").algorithm.adv_estimator == "gae"
    assert compose("grpo_trainer").algorithm.adv_estimator == "grpo"
    quickstart = compose("quickstart")
    assert quickstart.trainer.deterministic is True
    assert [Path(p).name for p in quickstart.actor_rollout_ref.rollout.multi_turn.tool_config_path] == [
        "calculator_terse.yaml"
    ]
    gsm8k = compose("gsm8k_tool")
    assert gsm8k.reward_model.enable is False
    assert all(Path(p).is_file() for p in gsm8k.actor_rollout_ref.rollout.multi_turn.tool_config_path)
    assert len(gsm8k.actor_rollout_ref.rollout.multi_turn.tool_config_path) == 2


def test_an_unknown_builtin_tool_is_one_line():
    text = refusal("ppo_trainer", [f"{ROLLOUT}.tool_config='${{etude.builtin_tools:calculater}}'"])
    assert "tool_config" in text
    assert "calculater" in text


def test_composing_leaves_hydra_as_it_was(tmp_path):
    compose("ppo_trainer")
    assert not GlobalHydra.instance().is_initialized()
    store = ConfigStore.instance().repo
    store["optim"] = own = {}  # a program may have a group of the same name
    write(tmp_path, "mine.yaml", "lr: 3\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        file_layers("sft", TREE)  # `compose` keeps the layers of a root
        assert hydra.compose("mine").lr == 3
    assert store.pop("optim") is own
    assert not {"actor", "data", "ppo_trainer.yaml"} & store.keys()


# The user's YAML and the command line


def test_each_layer_overrides_the_one_before(tmp_path):
    write(tmp_path, "mine.yaml", "data: {train_batch_size: 7, max_prompt_length: 99}\n")
    composition = compose_with_sources("mine", ["data.max_prompt_length=100"], tmp_path, root="grpo_trainer")
    config, sources = composition.config, composition.sources
    assert (config.data.max_response_length, sources["data.max_response_length"]) == (2048, "data/data.yaml")
    assert (config.algorithm.adv_estimator, sources["algorithm.adv_estimator"]) == ("grpo", "grpo_trainer.yaml")
    assert (config.data.train_batch_size, sources["data.train_batch_size"]) == (7, str(tmp_path / "mine.yaml"))
    assert (config.data.max_prompt_length, sources["data.max_prompt_length"]) == (100, "command line")
    assert config.actor_rollout_ref.rollout.prompt_length == 100


def test_every_leaf_has_a_source(tmp_path):
    write(tmp_path, "mine.yaml", "reward_model: {reward_kwargs: {a: {b: 1}, c: []}}\n")
    composition = compose_with_sources("mine", ["reward_model.reward_kwargs.a.d=2"], tmp_path)
    for key in ("reward_model.reward_kwargs.a.b", "reward_model.reward_kwargs.c", "plugins", "data.train_files"):
        assert composition.sources[key]
    assert composition.sources["reward_model.reward_kwargs.a.d"] == "command line"
    assert "reward_model.reward_kwargs" not in composition.sources


@pytest.mark.parametrize("listed", ["grpo_trainer", "sft"])
def test_a_defaults_list_may_name_another_root(tmp_path, listed):
    write(tmp_path, "mine.yaml", f"defaults: [{listed}, _self_]\ntrainer: {{seed: 5}}\n")
    config = compose("mine", [], tmp_path, root="ppo_trainer")
    expected = compose(listed, ["trainer.seed=5"])
    assert config == expected


def test_a_defaults_list_may_include_own_files_and_hydra_settings(tmp_path):
    write(tmp_path, "part/small.yaml", "train_batch_size: 3\n")
    write(
        tmp_path,
        "mine.yaml",
        """
        hydra: {searchpath: [file://verl/trainer/config]}
        defaults: [ppo_trainer, part@data: small, _self_]
        """,
    )
    assert compose("mine", [], tmp_path).data.train_batch_size == 3
    assert compose("mine", ["data.train_batch_size=4"], tmp_path).data.train_batch_size == 4


def test_a_group_is_chosen_on_the_command_line(tmp_path):
    write(tmp_path, "part/small.yaml", "train_batch_size: 3\n")
    write(tmp_path, "part/large.yaml", "train_batch_size: 300\n")
    write(tmp_path, "mine.yaml", "defaults: [part@data: small, _self_]\n")
    assert compose("mine", ["part@data=large"], tmp_path).data.train_batch_size == 300
    assert compose("ppo_trainer", ["data=legacy_data"]) == compose("ppo_trainer")


def test_a_yaml_that_was_printed_composes_to_itself(tmp_path):
    config = compose("quickstart", ["trainer.seed=9"])
    write(tmp_path, "again.yaml", OmegaConf.to_yaml(OmegaConf.create(plain(config))))
    assert compose("again", [], tmp_path) == config


def test_a_name_is_looked_up_in_config_and_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "config/one.yaml", "trainer: {seed: 11}\n")
    write(tmp_path, "two.yaml", "trainer: {seed: 12}\n")
    assert compose("one").trainer.seed == 11
    assert compose("two").trainer.seed == 12
    assert compose("config/one.yaml").trainer.seed == 11
    assert compose("one.yaml", [], "config").trainer.seed == 11


def test_a_users_file_may_have_the_name_of_a_root(tmp_path):
    write(tmp_path, "quickstart.yaml", "trainer: {seed: 13}\n")
    assert compose("quickstart", [], tmp_path).trainer.seed == 13


def test_a_missing_file_is_named_with_the_nearest(tmp_path):
    write(tmp_path, "training.yaml", "trainer: {seed: 1}\n")
    text = refusal("trainin", [], tmp_path)
    assert str(tmp_path) in text
    assert "did you mean 'training'?" in text


def test_a_missing_folder_is_named_with_the_nearest(tmp_path):
    write(tmp_path / "shop", "agent.yaml", "trainer: {seed: 1}\n")
    assert refusal("agent", [], tmp_path / "shp").endswith("shp: there is no such folder; did you mean 'shop'?")


def test_a_yaml_with_the_name_of_one_of_ours_is_told(tmp_path, monkeypatch, caplog):
    write(tmp_path, "sft.yaml", "defaults: [sft, _self_]\noptim: {lr: 3.0e-5}\n")
    monkeypatch.chdir(tmp_path)
    assert compose("sft", [], root="sft").optim.lr == 1e-5
    assert "--config-name sft is Étude's own configuration, not sft.yaml: for yours add --config-path ." in caplog.text
    assert "leads back to its own file; rename your file" in refusal("sft", [], ".")  # the list means the one beside it
    write(tmp_path, "sft.yaml", "optim: {lr: 3.0e-5}\n")
    caplog.clear()
    assert compose("sft", [], ".", root="sft").optim.lr == 3e-5
    assert compose(None, [], root="sft").optim.lr == 1e-5
    assert not caplog.text


@pytest.mark.parametrize("text", ["läufe/one", "runs (old)/a", "a = b", "it's", "back\\slash (x)"])
def test_a_text_needs_no_second_pair_of_quotes(text):
    folder = f"trainer.default_local_dir={text}"
    assert compose("grpo_trainer", [folder]).trainer.default_local_dir == text
    assert compose("grpo_trainer", [f"trainer.default_local_dir={quoted(text)}"]).trainer.default_local_dir == text


@pytest.mark.parametrize("value", ["[a", "{a", "'a", '"a', "a trainer.seed=3", "a,trainer.seed=3", "a +trainer.x=3"])
def test_a_list_a_quote_or_several_arguments_in_one_are_no_text(value):
    assert "cannot read the argument" in refusal("grpo_trainer", [f"trainer.default_local_dir={value}"])


def test_another_option_for_the_yaml_says_the_two_that_name_it():
    assert "name your YAML by --config-path FOLDER --config-name NAME" in refusal("ppo_trainer", ["--config", "a.yaml"])


def test_the_folder_that_one_is_in_is_not_looked_for_below(tmp_path, monkeypatch):
    write(tmp_path / "shop", "agent.yaml", "trainer: {seed: 1}\n")
    monkeypatch.chdir(tmp_path / "shop")
    assert refusal("agent", [], "shop").endswith("there is no such folder; this is that folder: write --config-path .")


def test_a_runs_own_configuration_sets_nothing_without_effect(tmp_path):
    write(tmp_path, "config.yaml", OmegaConf.to_yaml(compose_with_sources("grpo_trainer").config))
    made = compose_with_sources("config", [], tmp_path, collect=True)
    assert made.remarks == compose_with_sources("grpo_trainer", collect=True).remarks


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1\n", "line"),
        ("- 1\n- 2\n", "key: value"),
        ("defaults: [nowhere]\n", "nowhere"),
        ("defaults: [grpo_trainer, data@data: data, _self_]\n", "data"),
        ("\x80", "mine.yaml"),
        ("trainer:\n\tseed: 1\n", "use spaces, not tabs"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, expected):
    (tmp_path / "mine.yaml").write_bytes(content.encode("latin-1"))
    text = refusal("mine", [], tmp_path)
    assert "mine.yaml" in text
    assert expected in text


def test_an_empty_file_changes_nothing(tmp_path):
    write(tmp_path, "mine.yaml", "# nothing yet\n")
    assert compose("mine", [], tmp_path) == compose("ppo_trainer")


# Names


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data.trian_files", "data.train_files"),
        ("trainer.sed", "trainer.seed"),
        ("trainer.lr", "actor_rollout_ref.actor.optim.lr"),
        ("rollout.n", "actor_rollout_ref.rollout"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("trainer.batch_size", "data.train_batch_size"),
        (f"{ROLLOUT}.multi_turns.format", f"{ROLLOUT}.multi_turn"),
        (f"{ROLLOUT}.max_assistant_turns", f"{ROLLOUT}.multi_turn.max_assistant_turns"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path, key, nearest):
    for prefix in ("", "+", "++"):
        text = refusal("ppo_trainer", [f"{prefix}{key}=1"])
        assert "(command line)" in text
        assert f"did you mean {nearest}?" in text
    write(tmp_path, "mine.yaml", OmegaConf.to_yaml(_nested(key, 1)))
    text = refusal("mine", [], tmp_path)
    assert str(tmp_path / "mine.yaml") in text
    assert f"did you mean {nearest}?" in text


def test_a_name_of_trl_is_not_taken_for_a_key_that_looks_like_it():
    for key, ours in {
        "beta": "kl_loss_coef",
        "trainer.mask_truncated_completions": "no key",
        "data.warmup_ratio": "lr_warmup_steps",
        "trainer.learning_rate": "actor.optim.lr",
    }.items():
        text = refusal("ppo_trainer", [f"{key}=1"])
        assert "did you mean" not in text
        assert ours in text


def _nested(key, value):
    config = OmegaConf.create()
    OmegaConf.update(config, key, value, force_add=True)
    return config


def test_a_key_unlike_any_other_is_refused_without_a_guess():
    assert "etude config" in refusal("ppo_trainer", ["qqq.xxx=1"])


def test_free_form_sections_take_anything():
    config = compose(
        "ppo_trainer",
        [
            "reward_model.reward_kwargs.a.b=1",
            "custom_reward_function.reward_kwargs={x: [1, 2]}",
            "data.apply_chat_template_kwargs.enable_thinking=false",
        ],
    )
    assert config.reward_model.reward_kwargs == {"a": {"b": 1}}
    assert config.custom_reward_function.reward_kwargs == {"x": [1, 2]}
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("key", ["reward_model.reward_kwargs", "data", "actor_rollout_ref.actor.optim"])
@pytest.mark.parametrize("value", ["3", "null", "[1]"])
def test_a_section_cannot_become_a_value(key, value):
    text = refusal("ppo_trainer", [f"{key}={value}"])
    assert f"{key} must be a section" in text


# Types


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.seed=x", "trainer.seed must be a whole number of at least 0, got 'x' (command line)"),
        ("trainer.seed=1.5", "trainer.seed must be a whole number of at least 0, got 1.5"),
        ("trainer.seed=null", "trainer.seed must be a whole number of at least 0, got null"),
        ("trainer.seed=true", "trainer.seed must be a whole number of at least 0, got True"),
        ("trainer.seed=[1]", "trainer.seed must be a whole number of at least 0, got [1]"),
        ("data.shuffle=1", "data.shuffle must be true or false, got 1"),
        ("data.prompt_key=3", "data.prompt_key must be text, got 3"),
        ("data.train_files=null", "data.train_files must be a list, got null"),
        ("data.train_files=[1]", "data.train_files[0] must be text, got 1"),
        (f"{OPTIM}.lr=fast", "actor.optim.lr must be a number of at least 0, got 'fast'"),
        (f"{OPTIM}.betas=[0.9]", "a list of 2 values, each a number from 0 below 1, got [0.9]"),
        (f"{OPTIM}.name=adam", "adamw, muon, adamw_8bit, adamw_schedule_free, got 'adam'; did you mean 'adamw'?"),
        ("actor_rollout_ref.rollout.mode=asink", "did you mean 'async'?"),
        ("data.val_batch_size=many", "data.val_batch_size must be a whole number of at least 1 or null, got 'many'"),
        ("data.train_batch_size={a: 1}", "data.train_batch_size is one value, not a section (command line)"),
        ("data.seed=${trainer.sed}", "data.seed (command line): Interpolation key 'trainer.sed' not found"),
        ("data.prompt_key=${data.prompt_key}", "data.prompt_key (command line)"),
    ],
)
def test_a_wrong_value_is_named(override, expected):
    assert expected in refusal("ppo_trainer", [override])


@pytest.mark.parametrize("argument", ["trainer.seed", "~trainer.seed", "trainer.seed=1,2", "a b", "=1", "--verbose"])
def test_an_argument_that_is_no_setting_is_named(argument):
    assert f"'{argument}'" in refusal("ppo_trainer", [argument])


def test_values_take_the_type_of_their_key():
    config = compose(
        "ppo_trainer",
        [
            "actor_rollout_ref.actor.optim.lr=1",
            "actor_rollout_ref.actor.clip_ratio_low='0.1'",
            "data.train_files=/data/train.parquet",
            "trainer.logger=console",
            "plugins=agent.py",
            f"{ROLLOUT}.multi_turn.function_tool_path=tools.py",
        ],
    )
    assert repr(config.actor_rollout_ref.actor.optim.lr) == "1.0"
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert config.data.train_files == ("/data/train.parquet",)
    assert config.trainer.logger == ("console",)
    assert config.plugins == ("agent.py",)
    assert config.actor_rollout_ref.rollout.multi_turn.function_tool_path == ("tools.py",)


def test_interpolations_follow_their_target_through_every_layer():
    config = compose("ppo_trainer", ["trainer.seed=3", "data.max_response_length=9", "actor_rollout_ref.model.path=m"])
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (3, 3)
    assert config.actor_rollout_ref.rollout.response_length == 9
    assert config.critic.model.path == "m"
    raw = compose_with_sources("ppo_trainer", ["trainer.seed=3"], resolve=False).config
    assert OmegaConf.to_container(raw, resolve=False)["data"]["seed"] == "${trainer.seed}"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=8)))
def test_any_value_is_of_the_right_type_or_refused(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("any")
    OmegaConf.save(OmegaConf.create({"data": {"train_batch_size": value}}), folder / "mine.yaml")
    try:
        config = compose("mine", [], folder)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
        assert type(config.data.train_batch_size) is int
    assert "\n" not in refused
    if type(value) is int and 1 <= value < 2**31:
        assert not refused
        assert config.data.train_batch_size == value
    else:
        assert not refused or "data.train_batch_size must be a whole number of at least 1" in refused
    if value is None or isinstance(value, bool) or (type(value) is int and value < 1):
        assert refused


# Aliases


TOOLS = f"{ROLLOUT}.multi_turn.tool_config_path"
ALIAS = f"{ROLLOUT}.tool_config"


def both(config):
    rollout = config.actor_rollout_ref.rollout
    assert rollout.tool_config == rollout.multi_turn.tool_config_path
    return rollout.tool_config and list(rollout.tool_config)


def test_a_key_and_its_alias_are_one():
    assert both(compose("ppo_trainer")) is None
    assert both(compose("ppo_trainer", [f"{ALIAS}=a.yaml"])) == ["a.yaml"]
    assert both(compose("ppo_trainer", [f"{TOOLS}=a.yaml"])) == ["a.yaml"]
    assert both(compose("ppo_trainer", [f"{TOOLS}=[a.yaml,b.yaml]"])) == ["a.yaml", "b.yaml"]
    assert both(compose("ppo_trainer", [f"{TOOLS}=a.yaml", f"{ALIAS}=[a.yaml]"])) == ["a.yaml"]


def test_the_alias_overrides_a_roots_default():
    assert both(compose("quickstart", [f"{ALIAS}=mine.yaml"])) == ["mine.yaml"]
    assert both(compose("quickstart", [f"{ALIAS}=null"])) is None
    assert both(compose("quickstart", [f"{TOOLS}=null"])) is None


def test_the_alias_overrides_a_listed_roots_default(tmp_path):
    write(tmp_path, "mine.yaml", f"defaults: [quickstart, _self_]\n{OmegaConf.to_yaml(_nested(ALIAS, 'a.yaml'))}")
    assert both(compose("mine", [], tmp_path)) == [str(tmp_path / "a.yaml")]


def test_a_key_and_its_alias_set_apart_are_refused(tmp_path):
    text = refusal("ppo_trainer", [f"{ALIAS}=a.yaml", f"{TOOLS}=b.yaml"])
    assert ALIAS in text
    assert TOOLS in text
    write(tmp_path, "mine.yaml", OmegaConf.to_yaml(_nested(ALIAS, "a.yaml")))
    text = refusal("mine", [f"{TOOLS}=b.yaml"], tmp_path)
    assert str(tmp_path / "mine.yaml") in text
    assert "command line" in text


def test_a_file_is_overridden_under_the_same_name(tmp_path):
    write(tmp_path, "mine.yaml", OmegaConf.to_yaml(_nested(ALIAS, "a.yaml")))
    assert both(compose("mine", [f"{ALIAS}=b.yaml"], tmp_path)) == ["b.yaml"]
    assert both(compose("mine", [f"{TOOLS}=null"], tmp_path)) is None


def test_an_error_is_never_hydras_own(tmp_path):
    write(tmp_path, "mine.yaml", "defaults: [part@data: a]\n")
    with pytest.raises(ConfigError):
        compose("mine", ["part@data=b"], tmp_path)
    try:
        compose("ppo_trainer", ["critic=nothing"])
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        pytest.fail(f"leaked {error!r}")
    except ConfigError:
        pass


# Paths, and the folder of a run


def test_paths_in_a_yaml_are_relative_to_it(tmp_path, monkeypatch):
    mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for name in ("rows.parquet", "tools.yaml", "sub/reward.py", "agent.py", "json"):
        write(mine, name, "")
    (mine / "model").mkdir()
    write(elsewhere, "test.parquet", "")
    write(elsewhere, "tools.yaml", "")
    write(
        mine,
        "run.yaml",
        """
        plugins: [agent.py, json]
        data: {train_files: rows.parquet, val_files: [test.parquet, rows.parquet]}
        custom_reward_function: {path: sub/reward.py}
        actor_rollout_ref:
          model: {path: model}
          rollout:
            multi_turn: {tool_config_path: tools.yaml}
            agent: {openai_agent: {function: "agent.py:run"}}
        trainer: {default_local_dir: model, rollout_data_dir: model}
        """,
    )
    monkeypatch.chdir(elsewhere)
    config = compose("run", ["critic.model.path=model"], mine)
    assert config.data.train_files == (f"{mine}/rows.parquet",)
    assert config.data.val_files == ("test.parquet", f"{mine}/rows.parquet")
    assert config.plugins == (f"{mine}/agent.py", f"{mine}/json")
    assert config.custom_reward_function.path == f"{mine}/sub/reward.py"
    rollout = config.actor_rollout_ref.rollout
    assert rollout.multi_turn.tool_config_path == rollout.tool_config == (f"{mine}/tools.yaml",)
    assert rollout.agent.openai_agent.function == f"{mine}/agent.py:run"
    assert config.actor_rollout_ref.model.path == f"{mine}/model"
    assert config.critic.model.path == "model"  # from the command line
    assert config.trainer.default_local_dir == config.trainer.rollout_data_dir == "model"  # written to, not read


def test_an_environments_files_are_those_beside_the_yaml(tmp_path, monkeypatch):
    for name in ("mine/tasks/one/task.toml", "mine/sums.py", "mine/rival.py", "mine/train", "elsewhere/rows.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    mine = tmp_path / "mine"
    write(
        mine,
        "run.yaml",
        """
        env:
          - harbor:tasks
          - {id: "inspect:sums.py:sums", args: {split: train-set, n: 3}}
          - {id: "textarena:TicTacToe-v0", args: {opponent: "rival.py:play"}}
          - {id: "nemo_gym:http://127.0.0.1:8000", args: {dataset: rows.jsonl}}
        """,
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = compose("run", [], mine).env
    assert [each["id"] if isinstance(each, dict) else each for each in found] == [
        f"harbor:{mine}/tasks",
        f"inspect:{mine}/sums.py:sums",
        "textarena:TicTacToe-v0",
        "nemo_gym:http://127.0.0.1:8000",
    ]
    assert [each["args"] for each in found[1:]] == [
        {"split": "train-set", "n": 3},
        {"opponent": f"{mine}/rival.py:play"},
        {"dataset": "rows.jsonl"},  # in the folder of the command
    ]


def test_a_file_under_a_key_that_is_written_with_dots_is_an_unknown_key(tmp_path):
    write(tmp_path, "rows.jsonl", "")
    write(tmp_path, "run.yaml", "data.train_files: rows.jsonl\n")
    with pytest.raises(ConfigError) as raised:
        compose("run", [], tmp_path)
    assert str(raised.value).startswith("unknown key data.train_files")


def test_a_misspelt_file_is_looked_for_beside_the_yaml_that_names_it(tmp_path):
    """And nothing else is: a module or a model on a hub may be named like a file there."""
    for name in ("tools.yaml", "rewards.py", "gpt"):
        write(tmp_path, name, "")
    content = "custom_reward_function: {path: reward.score}\nactor_rollout_ref:\n  model: {path: gpt2}\n"
    write(tmp_path, "run.yaml", content + "  rollout: {multi_turn: {tool_config_path: tool.yaml}}\n")
    config = compose("run", [], tmp_path)
    assert config.custom_reward_function.path == "reward.score"
    assert config.actor_rollout_ref.model.path == "gpt2"
    with pytest.raises(ConfigError, match=r"did you mean 'tools\.yaml'\?"):
        compose("run", [], tmp_path, command="train")


def test_each_experiment_has_a_folder_and_the_same_one_its_own():
    def folder(*overrides, root="grpo_trainer"):
        return compose(root, ["data.train_files=a.parquet", *overrides]).trainer.default_local_dir

    same = folder()
    assert re.fullmatch(r"runs/etude/default-[0-9a-f]{8}", same)
    for override in ("trainer.total_training_steps=9", "actor_rollout_ref.actor.optim.lr=1", "trainer.save_freq=3"):
        assert folder(override) == same
    others = [
        "actor_rollout_ref.model.path=models/b",
        "data.train_files=b.parquet",
        "data.train_batch_size=2",
        "custom_reward_function.path=r.py",
        "reward_model.enable=false",
        "algorithm.adv_estimator=gae",
        "trainer.seed=2",
        "actor_rollout_ref.rollout.tool_config=tools.yaml",
    ]
    assert len({same, *map(folder, others)}) == 1 + len(others)
    assert folder("trainer.experiment_name=mine") == "runs/etude/mine"
    assert folder("data.train_files=${trainer.default_local_dir}/rows.parquet") != same  # no circle
    assert folder(root="gsm8k_tool").startswith("runs/etude/gsm8k_tool-")
    assert compose("sft", ["model.path=a"]).trainer.default_local_dir != compose("sft").trainer.default_local_dir


def test_one_seed_reaches_everything_random_that_has_none_of_its_own():
    seeds = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
    config = compose("grpo_trainer", ["trainer.seed=7"])
    assert [value_of(config, key) for key in seeds] == [7, 7, 7]
    for key in seeds:
        config = compose("grpo_trainer", ["trainer.seed=7", f"{key}=3"])
        assert sorted(value_of(config, each) for each in seeds) == [3, 7, 7]
        assert value_of(config, key) == 3
