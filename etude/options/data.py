"""Options of data: `data` of reinforcement and of supervised runs."""

from __future__ import annotations

from typing import Literal

from etude.options.declare import When, key, options
from etude.options.types import Count, CountOrOff, Flag, FreeForm, Natural, Number, Share, Text, Texts

TRIED = When("where target_success.data_files is set", lambda own, run: bool(own.data_files))
SHUFFLED = When("with shuffle=true", lambda own, run: own.shuffle)
SEEDED = When("with shuffle=true or a sampler", lambda own, run: own.shuffle or own.sampler.class_name is not None)
UNSAMPLED = When("where sampler.class_name is null", lambda own, run: own.sampler.class_name is None)


@options
class SamplerOptions:
    """Which rows a batch has, by a class of Étude's or of yours."""

    class_path: Text | None = key(
        "File (path/to/file.py) or dotted module of a sampler of yours. Null: one that is registered.",
        default=None,
        path="code",
        when=When("where class_name is set", lambda own, run: own.class_name is not None),
    )
    class_name: Text | None = key(
        "curriculum: rows by what is left to learn from them; mixture: by data source; or the class in class_path. Null: "
        "see `shuffle`.",
        default=None,
    )
    floor: Share = key(
        "Smallest weight of a row, relative to one that succeeds half of the time.",
        default=0.1,
        when=When("with class_name=curriculum", lambda own, run: own.class_name == "curriculum"),
    )
    weights: FreeForm = key(
        "data_source: weight. A source without one has 1; 0 leaves it out.",
        default_factory=dict,
        when=When("with class_name=mixture", lambda own, run: own.class_name == "mixture"),
    )


@options
class CustomClassOptions:
    """A dataset class of yours, called as verl does: (data_files, tokenizer, config, processor). Its items are rows."""

    path: Text | None = key(
        "File (path/to/file.py) or dotted module that defines it. Null: the rows of the files.",
        default=None,
        path="code",
    )
    name: Text | None = key(
        "The class's name in that file.",
        default=None,
        when=When("where custom_cls.path is set", lambda own, run: own.path is not None),
    )

    def __post_init__(self) -> None:
        if self.path is not None and self.name is None:
            raise ValueError("name is missing: the class in path")


@options
class DataOptions:
    """Rows for training and validation (.parquet, .jsonl or .json)."""

    train_files: Texts = key(
        "Training files: a path or a list of paths.",
        default=(),
        path="file",
        verl_default="~/data/rlhf/gsm8k/train.parquet",
    )
    val_files: Texts = key(
        "Validation files: a path or a list of paths. Empty: no validation.",
        default=(),
        path="file",
        verl_default="~/data/rlhf/gsm8k/test.parquet",
    )
    train_batch_size: Count = key(
        "Prompts per training step; each is answered rollout.n times.",
        default=64,
        unit="prompts",
        verl_default="1024",
    )
    val_batch_size: Count | None = key(
        "Prompts per validation batch. Null: all at once; the engine queues them.",
        default=None,
        unit="prompts",
    )
    val_max_samples: CountOrOff = key("Use only the first rows for validation. -1: all.", default=-1)
    max_prompt_length: Count = key(
        "Max prompt length, tool schemas included.",
        default=1024,
        unit="tokens",
        verl_default="512",
        verl_meaning="up to 0.5, tool schemas do not count",
    )
    max_response_length: Count = key(
        "Max response length: everything after the prompt, tool responses included.",
        default=2048,
        unit="tokens",
        verl_default="512",
    )
    filter_overlong_prompts: Flag = key(
        "Skip rows whose prompt is too long (counted and reported). False: see `truncation`.",
        default=True,
        verl_default="false",
    )
    truncation: Literal["error", "drop"] = key(
        "What to do with an overlong prompt that was not filtered. Prompts are never truncated: the start is the task.",
        default="error",
        when=When("with filter_overlong_prompts=false", lambda own, run: not own.filter_overlong_prompts),
        verl_meaning="left, right and middle truncate prompts; agent loops do so whatever is set",
    )
    shuffle: Flag = key("Visit rows in a new random order each epoch.", default=True, when=UNSAMPLED)
    seed: Natural = key(
        "Seed of that order, and of a sampler's.",
        default=1,
        written="${trainer.seed}",
        when=SEEDED,
        verl_default="null",
    )
    sampler: SamplerOptions = key("", default_factory=SamplerOptions)
    custom_cls: CustomClassOptions = key("", default_factory=CustomClassOptions)
    prompt_key: Text = key("Column with the messages.", default="prompt")
    image_key: Text | None = key(
        "Column with the prompt's images, one for each <image> in its texts. Null: no row has images.",
        default="images",
    )
    apply_chat_template_kwargs: FreeForm = key(
        "Extra arguments of the chat template (for example enable_thinking: false); any keys.", default_factory=dict
    )

    @property
    def drops_overlong(self) -> bool:
        """Whether an over-long prompt is left out rather than an error."""
        return self.filter_overlong_prompts or self.truncation == "drop"


@options
class SFTDataOptions:
    """Conversations to imitate (files with a `messages` column and, optionally, `tools`), or rollout dumps."""

    train_files: Texts = key("Training files: a path or a list of paths.", default=(), path="file")
    train_batch_size: Count = key("Conversations (sequences of rollouts, or pairs) per step.", default=32)
    min_score: Number | None = key(
        "Of rollout dumps: leave out rollouts with a lower score, or with loss.name=dpo pairs whose better one has. Null: "
        "none.",
        default=None,
    )
    max_per_prompt: Count | None = key(
        "Of rollout dumps: at most so many rollouts of a prompt, the best; with loss.name=dpo, pairs. Null: all.",
        default=None,
    )
    max_length: Count = key(
        "Max conversation length; a longer row is an error that names it.", default=1024, unit="tokens"
    )
    shuffle: Flag = key("Visit rows in a new random order each epoch.", default=True)
    seed: Natural = key("Seed of that order.", default=1, written="${trainer.seed}", when=SHUFFLED)
    image_key: Text | None = key(
        "Column with the conversation's images, one for each <image> in its texts. Null: no row has images.",
        default="images",
    )
    apply_chat_template_kwargs: FreeForm = key("Extra arguments of the chat template; any keys.", default_factory=dict)


@options
class TargetSuccessOptions:
    """Keep the last snapshot whose sampled rollouts succeed at the target rate: a start that RL can improve on."""

    data_files: Texts | None = key(
        "Rows (as for `etude train`) to roll out on: a path or a list. Null: train to the last step.",
        default=None,
        path="file",
    )
    low: Share = key("Lowest success rate of a snapshot worth keeping.", default=0.2, when=TRIED)
    high: Share = key("Highest success rate: above it the model leaves too little to learn.", default=0.4, when=TRIED)
    every: Count = key("Steps between measurements.", default=25, unit="steps", when=TRIED)
    samples: Count = key("Rollouts per measurement; 64 give a standard error of about 0.06.", default=64, when=TRIED)
    max_response_length: Count = key(
        "Max response length of such a rollout, tool responses included.", default=512, unit="tokens", when=TRIED
    )
