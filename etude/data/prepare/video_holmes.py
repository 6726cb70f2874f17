"""Video-Holmes (questions on short films) as rows for the video tools.

Invariant: the files keep their questions and order; a row's video is a file that exists, and its answer is the letter of
one of its options. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import find_split_files, make_tables, training_row, write_tables
from etude.errors import DataError

DATA_SOURCE = "TencentARC/Video-Holmes"
SPLITS = ("train", "test")
SYSTEM = (
    "You answer questions on a film that you cannot see as a whole. Look at frames with `execute_frame_extraction`, find "
    "objects in them with `execute_object_detection`, have them described with `execute_frame_caption`, and check your "
    "answer with `calc_video_reward`. End with the letter of your answer between <answer> and </answer>."
)
_ENDINGS = ("_Video-Holmes.json", ".json", ".jsonl", ".parquet")


def make_row(videos: Path, example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row of the RL row contract from `{"video ID", "Question", "Options", "Answer"}`.

    Raises:
        DataError: a field is missing or of another type, or the video does not exist; names `where`.
    """
    name, question = example.get("video ID"), example.get("Question")
    options, answer = example.get("Options"), example.get("Answer")
    if not isinstance(name, str) or not isinstance(question, str) or not isinstance(options, Mapping):
        raise DataError(f"{where}: needs 'video ID', 'Question' and 'Options' (columns: {', '.join(example)})")
    choices = {str(letter): text for letter, text in options.items() if text is not None}
    if answer not in choices:
        raise DataError(f"{where}: the answer {answer!r} is none of the options {', '.join(choices) or 'none'}")
    if "/" in name or "\\" in name:
        raise DataError(f"{where}: the video ID {name!r} must be a plain name")
    video = videos / f"{name}.mp4"
    if not video.is_file():
        raise DataError(f"{where}: there is no video {video}")
    listed = "\n".join(f"{letter}. {text}" for letter, text in choices.items())
    return training_row(
        DATA_SOURCE,
        [("system", SYSTEM), ("user", f"{question}\n{listed}")],
        answer,
        {
            "execute_frame_extraction": {"video_path": str(video.resolve()), "num_frames": 4, "resolution": 224},
            "execute_object_detection": {"resolution": 448},
            "execute_frame_caption": {"resolution": 448},
            "calc_video_reward": {"ground_truth": answer},
        },
        ability="video",
        extra={"split": split, "index": index, "answer": answer, "question": question},
    )


def write(inputs: Sequence[str | Path], videos: str | Path, output_dir: str | Path) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split found in `inputs`; `videos` holds `<video ID>.mp4`. Raises DataError."""
    films, files = Path(videos).expanduser(), find_split_files(inputs, SPLITS, endings=_ENDINGS)
    return write_tables(make_tables(files, partial(make_row, films)), output_dir)
