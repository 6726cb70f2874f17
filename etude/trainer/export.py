"""`export_model`: exports the model of a run or checkpoint as a folder for any Hugging Face program.

Invariant: the folder is written atomically, and nothing is overwritten. Adapters need no special handling: they are merged
when a checkpoint is saved (`merged_weights` in `models/lora.py`), so its `huggingface` folder is a whole model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from etude.errors import ConfigError
from etude.models import load_causal_lm, load_processor, load_tokenizer, save_pretrained, torch_dtype
from etude.scratch import write_whole
from etude.trainer.checkpoints import LATEST, Checkpoints
from etude.workers.checkpoint import MODEL, STATE, read_state


def export_model(source: Path, target: Path, dtype: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """Writes the model of `source` to `target`, and returns the folder it was read from.

    Args:
        source: a run's folder (its result, else its newest checkpoint), a checkpoint, or a model's folder.
        dtype: None copies the files unchanged; otherwise weights are rounded to it, from the optimizer's float32 weights if
            the checkpoint has them.

    Raises:
        ConfigError, CheckpointError: `source` holds no model, or `target` exists and is not an empty folder; one line that
            names the folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name a new folder")
    folder = find_model(source)
    with write_whole(target, "free space or name another folder") as temporary:
        if dtype is None:
            shutil.copytree(folder, temporary, dirs_exist_ok=True)
        else:
            _convert(folder, temporary, dtype, trust_remote_code)
    return folder


def find_model(source: Path) -> Path:
    """Returns the model folder that `source` is or contains.

    Raises:
        ConfigError, CheckpointError: there is none.
    """
    if (source / LATEST).is_file() and not (source / MODEL).is_dir():
        source = Checkpoints(source, None).latest() or source
    places = (source, source / MODEL, source / "actor" / MODEL)
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        reason = "neither a run, nor a checkpoint, nor a model" if source.is_dir() else "no such folder"
        raise ConfigError(f"{source}: {reason}; name a run's folder, a global_step_N in it, or a model's folder")
    return found


def _convert(folder: Path, target: Path, dtype: str, trust_remote_code: bool) -> None:
    kind = torch_dtype(dtype)
    model = load_causal_lm(folder, dtype="float32", trust_remote_code=trust_remote_code)
    if (state := folder.parent / STATE).is_dir():
        exact = {name.removeprefix("model."): tensor for name, tensor in read_state(state, "model.").items()}
        if exact.keys() <= dict(model.named_parameters()).keys():  # otherwise adapters, which are already merged
            model.load_state_dict(exact, strict=False)
    tokenizer = load_processor(folder, trust_remote_code=trust_remote_code) or load_tokenizer(
        folder, trust_remote_code=trust_remote_code
    )
    save_pretrained(model.to(kind), tokenizer, target)
