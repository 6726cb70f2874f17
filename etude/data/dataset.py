"""`RLDataset`: the prompts that rollouts start from.

Invariant: every prompt that the dataset holds fits `data.max_prompt_length` tokens, counted with the schemas of the
tools that its row may use and the tokens of its images, exactly as the rollout will send it; prompts are never
truncated. All errors in the files are found when the dataset is built, before any model is loaded, except corrupt pixels
of an image, which are found when it is first read. Images in rows are kept on disk, not in memory.

Batching and resuming are left to `loader`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.blobs import Blobs
from etude.data.files import Row, file_list, located_rows, plain
from etude.data.images import image_tokens, place_images, refuse_other_media
from etude.data.rows import active_tools, check_ground_truth, check_row
from etude.errors import DataError
from etude.options import DataOptions

if TYPE_CHECKING:
    from etude.chat import ChatTemplate
    from etude.models import ImageReader

Schema = dict[str, Any]
_OWN_LOOPS = (None, "tool_agent", "env_agent", "single_turn_agent")  # a user's may write the tools itself

_ADDRESS = re.compile(r" at 0x\w+")

logger = logging.getLogger(__name__)


class RLDataset:
    """The rows of one or more files as rollout prompts.

    An item has the row's own columns plus `raw_prompt` (messages), `raw_prompt_ids` (token ids), `full_prompts` (text),
    `index` (extra_info.index, else the row's index over all files), `data_source`, `reward_model`, `extra_info`,
    `tools_kwargs`, `interaction_kwargs` and, if the row has them, `agent_name` and `images` (as `load_image` takes
    them). Items are copies: changing one does not change the dataset. `fingerprints` has a digest for each file: of all
    columns of its rows, ground truths included. `describes_tools`: whether every row that was checked for its tools
    (`shows_tools`) tells the model what they take. `locations`: where each row stands, if `problems` are collected.

    Args:
        files: .parquet, .jsonl or .json, one or several.
        chat: renders prompts.
        tool_schemas: OpenAI dictionaries of the configured tools by name; None if tools are turned off.
        interactions: names of the configured interactions.
        agent_loops: names of the registered agent loops; None: unknown, any name is accepted.
        environments: names of those of `env`, of which a row picks one; None: there are none to pick from.
        options: the `data` section.
        images: counts the tokens of an image; None for a text-only model, whose rows may have no images.
        max_samples: stop after this many rows; -1 for all.
        rows: used instead of the rows of the files.
        scored: whether a row's built-in scorer must be able to read its ground truth.
        shows_tools: reject rows of the package's own agent loops whose prompt does not show the model its tools.
        problems: if given, invalid rows are skipped and their errors are appended to it.

    Raises:
        DataError: a file or row is invalid, a prompt is too long and overlong prompts are not filtered, or no row is left.
        ConfigError: no scorer is registered for the data source of a `scored` row.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        chat: ChatTemplate,
        tool_schemas: Mapping[str, Schema] | None,
        options: DataOptions,
        *,
        interactions: Sequence[str] = (),
        agent_loops: Sequence[str] | None = None,
        environments: Sequence[str] | None = None,
        images: ImageReader | None = None,
        max_samples: int = -1,
        rows: Iterable[Row] | None = None,
        scored: bool = False,
        shows_tools: bool = False,
        problems: list[DataError] | None = None,
    ) -> None:
        self.files = file_list(files)
        self.chat = chat
        self.tool_schemas = tool_schemas
        self._interactions = list(interactions)
        self._agent_loops, self._shows_tools, self._environments = agent_loops, shows_tools, environments
        self.options = options
        self.overlong, self._longest = 0, 0
        self.describes_tools = True
        self._scored = scored
        self._images = images
        self._blobs = Blobs()
        self._any_images = False
        self._rows: list[Row] = []
        self._image_tokens: list[tuple[int, ...]] = []
        self._indices: list[object] = []
        self.locations: list[str] = []
        located = ((file, where, row) for file in self.files for where, row in located_rows(file))
        if rows is not None:
            first = self.files[0] if self.files else "."
            located = ((first, f"data.custom_cls: item {number}", row) for number, row in enumerate(rows))
        self._read(located, max_samples, problems)

    def _read(self, rows: Iterable[tuple[str, str, Row]], max_samples: int, problems: list[DataError] | None) -> None:
        if not self.files:
            raise DataError("no data file is named", fix="set data.train_files or data.val_files")
        digests: dict[str, hashlib._Hash] = {}
        for number, (file, where, raw) in enumerate(rows):
            try:
                row, image_tokens, fits = self._check(raw, Path(file).expanduser().parent, where)
            except DataError as error:
                if problems is None:
                    raise
                problems.append(error)
                fits = False
            if fits:
                index = row["extra_info"].get("index")
                row = self._blobs.store(row)
                self._rows.append(row)
                self._image_tokens.append(image_tokens)
                self._indices.append(number if index is None else index)
                if problems is not None:
                    self.locations.append(where)
                self._any_images |= bool(image_tokens)
                # as written in the file
                content = row | {"extra_info": self._blobs.store(plain(raw.get("extra_info")))}
                text = _ADDRESS.sub("", repr(content))  # a dataset class may give objects
                digests.setdefault(file, hashlib.sha256()).update(text.encode("utf-8", "surrogatepass"))
            if len(self._rows) + len(problems or ()) == max_samples:
                break
        self.fingerprints = {file: digest.hexdigest()[:16] for file, digest in digests.items()}
        if self._rows or not problems:
            self._report_overlong()

    def _check(self, raw: Row, folder: Path, where: str) -> tuple[Row, tuple[int, ...], bool]:
        """Validates a row; returns it, the tokens of each of its images, and whether its prompt fits."""
        names, key = None if self.tool_schemas is None else list(self.tool_schemas), self.options.prompt_key
        row = check_row(raw, where, names, key, self._interactions, self._agent_loops, self._environments)
        if self._scored:
            check_ground_truth(row, where)
        refuse_other_media(row, where)
        pictures = place_images(row, self.options.image_key, key, folder, where)
        tokens = image_tokens(self._images, pictures, where)
        return row, tokens, self._fits(row, tokens, where)

    @property
    def sources(self) -> list[str]:
        """The `data_source` of each row."""
        return [row["data_source"] for row in self._rows]

    @property
    def data_sources(self) -> set[str]:
        """The data sources of the rows."""
        return set(self.sources)

    def _fits(self, row: Row, image_tokens: tuple[int, ...], where: str) -> bool:
        limit = self.options.max_prompt_length
        messages, schemas = row[self.options.prompt_key], self._schemas(row)
        try:
            self.chat.require_whole(messages, schemas)
            if self._shows_tools and row.get("agent_name") in _OWN_LOOPS:
                self.chat.require_tools_shown(messages, schemas)
                self.describes_tools &= self.chat.describes_tools(messages, schemas)
            length = self.chat.prompt_length(messages, schemas, image_tokens)
        except DataError as error:
            raise error.at(where) from error
        if length <= limit:
            return True
        if not self.options.drops_overlong:
            fix = "raise data.max_prompt_length, or set data.filter_overlong_prompts=true to leave such rows out"
            size = f"{length} tokens, tool schemas included"
            raise DataError(f"{where}: the prompt has {size}; data.max_prompt_length is {limit}", fix=fix)
        self.overlong += 1
        self._longest = max(self._longest, length)
        return False

    def _report_overlong(self) -> None:
        kept, limit = len(self._rows), self.options.max_prompt_length
        names = ", ".join(self.files)
        if not kept:
            problem = f"{names}: every prompt is longer than data.max_prompt_length={limit} tokens"
            raise DataError(problem, fix=f"raise data.max_prompt_length: the longest prompt has {self._longest}")
        if self.overlong:
            total = kept + self.overlong
            line = "%s: left out %d of %d prompts, longer than data.max_prompt_length=%d tokens with their tool schemas"
            logger.warning(line, names, self.overlong, total, limit)

    def _schemas(self, row: Row) -> list[Schema] | None:
        schemas = self.tool_schemas or {}
        return [schemas[name] for name in active_tools(row, list(schemas))] or None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        row = self._blobs.restore(copy.deepcopy(self._rows[number]))
        if self._any_images:
            row.setdefault("images", None)  # all items of a dataset have the same columns
        messages, schemas = row[self.options.prompt_key], self._schemas(row)
        ids, extra_info = self.chat.initial_ids(messages, schemas, self._image_tokens[number]), row["extra_info"]
        return row | {
            "raw_prompt": messages,
            "raw_prompt_ids": ids,
            "full_prompts": self.chat.tokenizer.decode(ids, skip_special_tokens=False),
            "index": self._indices[number],
            "tools_kwargs": extra_info.get("tools_kwargs", {}),
            "interaction_kwargs": extra_info.get("interaction_kwargs", {}),
        }

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))
