"""Loading and saving models and tokenizers in the Hugging Face folder format.

Invariant: what is loaded is consistent (every weight is present, every token has an embedding row, the tokenizer can render
a chat), or one `ConfigError` names the folder and what to change. A loaded model computes the same in training mode as in
evaluation mode: see `zero_dropout`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import CheckpointError, ConfigError, one_line
from etude.models.lora import has_adapters, merged_weights
from etude.models.quantized import check_quantization, quantize
from etude.models.value import VALUE_HEAD_FILE, ValueModel
from etude.models.vision import KINDS
from etude.options.model_path import local_folder, read_config
from etude.registry import did_you_mean

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
_NOISE = re.compile("drop|jitter")  # in names of probabilities: attention_dropout, resid_pdrop, router_jitter_noise …
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a local folder or hub name `org/name`; without a pad token, it pads with its eos token.

    Raises:
        ConfigError: the folder, its tokenizer or its chat template is missing or broken, or the folder's model has fewer
            embedding rows than the tokenizer has tokens.
    """
    from transformers import AutoTokenizer

    folder = local_folder(path)
    if folder is not None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        below = next((path.parent for path in sorted(folder.glob("*/huggingface/tokenizer.json"))), None)
        advice = f"did you mean {below}?" if below else "copy the model's tokenizer files"
        raise ConfigError(f"{folder}: no tokenizer there (tokenizer.json is missing)", fix=advice)
    tokenizer = _from_pretrained(
        AutoTokenizer.from_pretrained, path, folder, "tokenizer", trust_remote_code=trust_remote_code
    )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{path}: the tokenizer has no chat template", fix="put a chat_template.jinja beside tokenizer.json"
        )
    if folder is not None and (folder / "config.json").is_file():
        _check_rows(len(tokenizer), _configured_rows(folder), str(folder))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Loads the causal language model of a local folder or hub name, in evaluation mode on `device` (on "meta", without its
    weights); for a supported vision-language model (see `etude.models.vision`), the whole model. It attends by "sdpa" where
    it supports that, else by "eager". `quantization`: see `etude.models.quantized`.

    Raises:
        ConfigError: the folder or its config.json is missing, weights are missing or broken, `dtype` or `device` is not
            available, or the model type is not supported.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as texts
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as images

    kind = model_config(path).get("model_type")
    if kind not in KINDS and kind in images.keys() - texts.keys():
        raise ConfigError(f"{path}: models of type '{kind}' are not supported (of those that see: {', '.join(KINDS)})")
    auto = AutoModelForImageTextToText if kind in KINDS else AutoModelForCausalLM
    return _load_model(auto, path, dtype, device, trust_remote_code, quantization)


def is_sequence_classifier(path: str | Path) -> bool:
    """Whether the model of a folder or hub name is a sequence classifier, not a language model."""
    return any(str(name).endswith("SequenceClassification") for name in model_config(path).get("architectures") or ())


def load_sequence_classifier(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Loads the sequence classifier of a local folder or hub name, in evaluation mode on `device`. Raises as
    `load_causal_lm`, and ConfigError unless it has exactly one label."""
    from transformers import AutoModelForSequenceClassification

    model = _load_model(AutoModelForSequenceClassification, path, dtype, device, trust_remote_code, None)
    if model.config.num_labels != 1:
        raise ConfigError(f"{path}: a reward model has one label, this classifier has {model.config.num_labels}")
    return model


def load_value_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> ValueModel:
    """Loads a value model from the folder of a causal LM (with a new head) or of a saved `ValueModel` (with its head).
    Raises as `load_causal_lm`."""
    from transformers import AutoModel

    backbone = _load_model(AutoModel, path, dtype, device, trust_remote_code, quantization)
    model = ValueModel(backbone)
    head = (local_folder(path) or Path(path)) / VALUE_HEAD_FILE
    if head.is_file():
        model.load_head(head)
    return model.eval()


def zero_dropout(model: Any) -> None:
    """Sets every probability of dropout, and the jitter of routers, to 0, in the modules and in the configurations that they
    read. The engine samples without it, so with it the ratios of an update would differ from 1 at unchanged weights, and by
    chance."""
    owners = {id(owner): owner for part in model.modules() for owner in (part, getattr(part, "config", None))}
    for owner in owners.values():
        own = getattr(owner, "__dict__", {})
        names = [name for name in own if _NOISE.search(name.lower())]
        if "p" in own and _NOISE.search(type(owner).__name__.lower()):  # torch's Dropout, and others of its kind
            names.append("p")
        for name in names:
            if isinstance(own[name], float) and own[name]:
                setattr(owner, name, 0.0)


def save_pretrained(
    model: PreTrainedModel | ValueModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
    folder: str | Path,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes model and tokenizer (or the processor that contains it) in Hugging Face format, with adapters merged into the
    weights. `weights`: written instead of the model's own `state_dict()`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    from safetensors import SafetensorError

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            weights = dict(merged_weights(model, weights)) if has_adapters(model) else weights
            model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot save the model: {one_line(error)}") from error


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype that configurations call `name`.

    Raises:
        ConfigError: the name is unknown.
    """
    import torch

    dtype = getattr(torch, _dtype_name(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _dtype_name(name: str) -> str:
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype '{name}'{did_you_mean(name, DTYPES)} (known: {', '.join(DTYPES)})")
    return DTYPES[name]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disables Transformers' progress bars, which would garble the run's display, and warnings of the hub's client: it says
    each of its tries, and the error says the last."""
    from transformers.utils import logging

    shown, hub = logging.is_progress_bar_enabled(), getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(level)
        if shown:
            logging.enable_progress_bar()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | ValueModel) -> None:
    """Checks that every token has an embedding row, for a tokenizer and a model from different folders.

    Raises:
        ConfigError: the tokenizer has more tokens than the model has embedding rows.
    """
    body = model.backbone if isinstance(model, ValueModel) else model
    _check_rows(len(tokenizer), body.get_input_embeddings().weight.shape[0], body.config.name_or_path or "the model")


def _check_rows(tokens: int, rows: int | None, name: str) -> None:
    if rows is not None and tokens > rows:
        raise ConfigError(
            f"{name}: the tokenizer has {tokens} tokens but the model's embedding only {rows} rows: "
            "use the tokenizer the model was trained with, or resize its embedding"
        )


def _configured_rows(folder: Path) -> int | None:
    config = read_config(folder)
    nested = config.get("text_config")
    rows = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return rows if isinstance(rows, int) else None


def model_config(path: str | Path) -> dict[str, Any]:
    """Reads the config.json of a local folder or hub name.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    from transformers import PretrainedConfig

    folder = local_folder(path)
    if folder is not None:
        return read_config(folder)
    return _from_pretrained(lambda name, **kw: PretrainedConfig.get_config_dict(name, **kw)[0], path, None, "model")


def _from_pretrained(load: Callable[..., Any], path: str | Path, folder: Path | None, noun: str, **options: Any) -> Any:
    target = str(path) if folder is None else str(folder)
    try:
        with no_progress_bars():
            return load(target, local_files_only=folder is not None, **options)
    except Exception as error:  # for a broken folder, transformers raises anything from OSError to TypeError
        where = "neither a local folder nor a model the hub gives" if folder is None else f"cannot load the {noun}"
        here = (
            "give a folder in model.path, or a model of `etude models list`, which needs no hub"
            if folder is None
            else ""
        )
        said = (
            one_line(error) if folder else one_line(error).partition(". ")[0]
        )  # the rest is advice for its own callers
        raise ConfigError(f"{target}: {where}: {said}", fix=here) from error


def _load_model(
    auto: Any,
    path: str | Path,
    dtype: str,
    device: str | torch.device,
    trust_remote_code: bool,
    quantization: str | None,
) -> PreTrainedModel:
    import torch

    precision = _dtype_name(dtype)
    if quantization is not None:
        check_quantization(quantization, device)
    folder = local_folder(path)
    if folder is not None:
        read_config(folder)
    if str(device) == "meta":
        from transformers import AutoConfig

        config = _from_pretrained(
            AutoConfig.from_pretrained, path, folder, "model", trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            empty = auto.from_config(
                config,
                dtype=getattr(torch, precision),
                attn_implementation=None,
                trust_remote_code=trust_remote_code,
            )
        zero_dropout(empty)
        return empty.eval()
    model, info = _from_pretrained(
        auto.from_pretrained,
        path,
        folder,
        "model",
        dtype=precision,
        attn_implementation=None,  # the default, whatever config.json names
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise ConfigError(f"{path}: {len(missing)} weights are missing, the first is {missing[0]}")
    zero_dropout(model)
    try:
        if quantization is not None:
            quantize(model, quantization, device)
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{path}: its weights in {precision} do not fit the free memory of '{device}'",
            fix="set actor.strategy=fsdp2 on several GPUs, a smaller model, or model.lora_rank with model.quantization=nf4",
        ) from error
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{device}' cannot be used: {one_line(error)}") from error
