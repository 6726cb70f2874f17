"""From a GGUF file to a model folder: `python -m etude.models.gguf FILE FOLDER`.

Invariant: the folder is complete or absent. Of two processes that convert to one folder, the second waits for the first. A
failure is one line on stdout, for the process that started this one.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from etude.errors import EtudeError, describe_error
from etude.scratch import locked, write_whole

ADVICE = "free space, or set ETUDE_CACHE to another folder"


def convert(file: Path, folder: Path) -> None:
    """Writes the dequantised weights in float32, the configuration and the tokenizer of `file` to `folder`, which may exist.

    Raises:
        CheckpointError: the folder cannot be written.
        Exception: whatever Transformers raises for a file that it cannot read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with locked(folder):
        if folder.is_dir():
            return
        sys.stderr.write(f"converting {file.name} ({file.stat().st_size / 1e6:,.0f} MB) to {folder}\n")
        source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **source)
        # Transformers takes a dequantised model for a quantised one, and does not save it.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        with write_whole(folder, ADVICE) as whole:
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)


def main() -> int:
    """Converts, quietly; returns the exit status."""
    from transformers.utils import logging as transformers_logging

    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        convert(file, folder)
    except KeyboardInterrupt:
        return 130
    except EtudeError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    except Exception as error:  # a broken file fails as it likes, in gguf, NumPy or Transformers
        sys.stdout.write(f"cannot be read as GGUF: {describe_error(error)}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
