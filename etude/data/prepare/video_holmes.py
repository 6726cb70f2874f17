"""Video-Holmes (questions on short films) as rows for the video tools.

Invariant: the files keep their questions and order; a row's video is a file that exists, and its answer is the letter of
one of its options. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row, located_rows, write_parquet
from etude.data.prepare.splits import find_split_files
from etude.errors import DataError

DATA_SOURCE = "TencentARC/Video-Holmes"
SPLITS = ("train", "test")
SYSTEM = (
    "You answer questions on a film that you cannot see as a whole. Look at frames with `execute_frame_extraction`, find "
    "objects in them with `execute_object_detection`, have them described with `execute_frame_caption`, and check your "
    "answer with `calc_video_reward`. End with the letter of your answer between <answer> and </answer>."
)
_ENDINGS = ("_Video-Holmes.json", ".json", ".jsonl", ".parquet")


def make_row(example: Mapping[str, Any], where: str, videos: Path, split: str, index: int) -> Row:
    """One row of the RL row contract from `{"video ID", "Question", "Options", "Answer"}`.

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
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{question}\n{listed}"},
        ],
        "ability": "video",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "execute_frame_extraction": {
                    "create_kwargs": {"video_path": str(video.resolve()), "num_frames": 4, "resolution": 224}
                },
                "execute_object_detection": {"create_kwargs": {"resolution": 448}},
                "execute_frame_caption": {"create_kwargs": {"resolution": 448}},
                "calc_video_reward": {"create_kwargs": {"ground_truth": answer}},
            },
        },
    }


def write(inputs: Sequence[str | Path], videos: str | Path, output_dir: str | Path) -> dict[str, Path]:
    """Writes `<split>.parquet` for each split found in `inputs`; `videos` holds `<video ID>.mp4`. Raises DataError."""
    folder, films = Path(output_dir).expanduser(), Path(videos).expanduser()
    tables = {
        split: [
            make_row(example, where, films, split, index) for index, (where, example) in enumerate(located_rows(path))
        ]
        for split, path in find_split_files(inputs, SPLITS, endings=_ENDINGS).items()
    }
    return {split: write_parquet(rows, folder / f"{split}.parquet") for split, rows in tables.items()}
