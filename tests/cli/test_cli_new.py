"""`etude new agent`: what it writes passes its own tests and is checked without a finding, as it is. That it trains, too, is
tested with the page that says so, docs/check.md."""

import runpy

import pytest
from house_stage import one_line_error

from etude.checks.findings import Level
from etude.cli.main import cli, run
from etude.config import compose
from etude.registry import import_module
from etude.testing import inspect_run


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The folder above a new agent `shop`, with its model."""
    folder = tmp_path_factory.mktemp("new")
    assert run(cli, ["new", "agent", "shop", "--output-dir", str(folder)]) == 0
    runpy.run_path(str(folder / "shop" / "model.py"))
    return folder


@pytest.fixture
def there(shop, monkeypatch):
    monkeypatch.chdir(shop)
    return shop


def test_its_own_tests_pass(shop):
    module = import_module(str(shop / "shop" / "test_agent.py"))
    tests = [function for name, function in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 3
    for function in tests:
        function()


def test_there_is_nothing_to_be_found(there):
    found = inspect_run("agent", ["trainer.total_training_steps=2"], "shop")  # as the pages start it
    assert [each for each in found.all if each.level is not Level.OK] == []


def test_a_second_run_in_a_folder_of_its_own_keeps_its_dumps_there(there):
    options = compose("agent", ["trainer.default_local_dir=runs/second"], "shop")
    assert options.trainer.rollout_data_dir == "runs/second/rollouts"


def test_where_pytest_is_not_installed_its_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("etude.cli.new.find_spec", lambda name: None)
    assert run(cli, ["new", "agent", "shop", "--output-dir", str(tmp_path)]) == 0
    assert f"pip install pytest && python -m pytest {tmp_path}/shop\n" in capsys.readouterr().out


def test_no_file_keeps_the_placeholder(shop):
    assert run(cli, ["new", "agent", "roads", "--pretrained", "--output-dir", str(shop)]) == 0
    for file in [*(shop / "shop").glob("*.*"), *(shop / "roads").glob("*.*")]:
        assert "AGENT_NAME" not in file.read_text(), file


@pytest.mark.parametrize("name", ["Shop", "9lives", "a-b", "../up", "import", "tests", "", "a" * 41])
def test_a_name_that_is_none(name, tmp_path, capsys):
    assert "cannot name an agent" in one_line_error(capsys, ["new", "agent", "--output-dir", tmp_path, "--", name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["null", "on", "true", "yes"])
@pytest.mark.parametrize("kind", [[], ["--pretrained"]])
def test_a_name_that_yaml_reads_as_something_else(name, kind, tmp_path, capsys):
    assert run(cli, ["new", "agent", name, *kind, "--output-dir", str(tmp_path)]) == 0
    capsys.readouterr()
    folder = str(tmp_path / name)
    assert run(cli, ["config", "trainer.experiment_name", "--config-path", folder, "--config-name", "agent"]) == 0
    assert f"trainer.experiment_name={name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_what_exists_is_not_touched(kind, tmp_path, capsys):
    place = tmp_path / "shop"
    {"folder": place.mkdir, "file": place.touch, "broken link": lambda: place.symlink_to("nowhere")}[kind]()
    assert "exists already: give another name" in one_line_error(
        capsys, ["new", "agent", "shop", "--output-dir", tmp_path]
    )
    assert [each.name for each in tmp_path.iterdir()] == ["shop"]


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    line = one_line_error(capsys, ["new", "agent", "shop", "--output-dir", tmp_path / "file"])
    assert "cannot be written" in line
