"""The benchmark's own model: 1.05 million parameters in Qwen3's format, warmed up on demonstrations by Étude's own trainer.

    python -m side_by_side.checkpoint FOLDER
    python -m side_by_side.checkpoint FOLDER --base $(etude models path smollm2)    a pretrained model, taught the format

Invariant: everything follows from the seed. The model is left where it calls the tool nearly always and is right about a
third of the time (a pretrained one mostly), so that trajectories have two tool turns and groups have spread.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from side_by_side import etude_run, task

_SEED = 5
_DEMONSTRATIONS, _BATCH = 4640, 16
_OF_A_BASE, _RATE = 160, 1e-4  # demonstrations and learning rate of a pretrained model
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def make(folder: Path, base: str | None = None) -> None:
    """Writes the checkpoint to `folder`, unless it exists; `base`: folder of a pretrained model to start from."""
    if (folder / task.SYSTEM_FILE).exists():
        return
    work = folder.with_name(f"{folder.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    rows = _demonstrations(_DEMONSTRATIONS if base is None else _OF_A_BASE, work)
    if base is None:
        _untrained(work, rows)
        _warm_up(work, len(rows))
    else:
        _pretrained(work, base)
        _warm_up(work, len(rows), f"optim.lr={_RATE}", "optim.lr_warmup_steps=2")
    (work / "run" / "huggingface" / task.SYSTEM_FILE).write_text(json.dumps({"system": task.SYSTEM}))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "run" / "huggingface", folder)
    shutil.rmtree(work)


def _demonstrations(count: int, work: Path) -> list[dict[str, Any]]:
    from etude.data import write_parquet

    rng = random.Random(_SEED)
    rows = [{"messages": task.demonstration(question, rng, task.SYSTEM)} for question in task.questions(count, _SEED)]
    work.mkdir(parents=True)
    write_parquet(rows, work / "demonstrations.parquet")
    write_parquet(etude_run.rows(64, _SEED + 1, task.SYSTEM), work / "trial.parquet")
    return rows


def _untrained(work: Path, rows: list[dict[str, Any]]) -> None:
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained

    # Includes ordinary text: a vocabulary of arithmetic alone would be a few hundred tokens.
    texts = [json.dumps(row, ensure_ascii=False) for row in rows[:500]] + [
        path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))[:60]
    ]
    tokenizer = build_tiny_tokenizer(texts, 2048)
    tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    spec = TinyModelSpec(num_layers=4, vocab_size=2048, max_position_embeddings=4096, seed=_SEED)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, work / "model")


def _pretrained(work: Path, base: str) -> None:
    from etude.models import load_causal_lm, load_tokenizer, save_pretrained

    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    save_pretrained(load_causal_lm(base), tokenizer, work / "model")


def _warm_up(work: Path, demonstrations: int, *overrides: str) -> None:
    from etude.config import compose
    from etude.trainer.run import fine_tune

    fine_tune(
        compose(
            "quickstart_sft",
            [
                f"plugins=[{etude_run.AGENT}]",
                f"data.train_files={work}/demonstrations.parquet",
                f"data.train_batch_size={_BATCH}",
                "data.max_length=512",
                f"model.path={work}/model",
                "multi_turn.tool_config_path=null",
                f"multi_turn.function_tool_path={etude_run.AGENT}",
                f"trainer.default_local_dir={work}/run",
                f"trainer.total_training_steps={demonstrations // _BATCH}",
                f"trainer.seed={_SEED}",
                *overrides,
            ],
            root="sft",
        )
    )


def main() -> None:
    """Makes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", help="folder of a pretrained model to start from")
    options = parser.parse_args()
    make(options.folder, options.base)


if __name__ == "__main__":
    main()
