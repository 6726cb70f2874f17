"""Reward models: a language model that answers everything with 7, and random classifiers."""

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from etude.chat import ChatTemplate
from etude.models import load_causal_lm, load_tokenizer, save_pretrained


def rig_judge(model_path, folder):
    """A model like that of `model_path` which answers everything with 7."""
    model, tokenizer = load_causal_lm(model_path), load_tokenizer(model_path)
    weights = model.state_dict()
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # so that the last token alone is seen
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.config.tie_word_embeddings = False
    asked = ChatTemplate(tokenizer).initial_ids([{"role": "user", "content": "?"}])[-1]
    seven = tokenizer.convert_tokens_to_ids("7")
    embedding = model.get_input_embeddings().weight.data
    for token, follows in ((asked, seven), (seven, tokenizer.eos_token_id)):
        model.lm_head.weight.data[follows] = 100 * embedding[token] / embedding[token].norm()
    save_pretrained(model, tokenizer, folder)
    return str(folder)


def as_classifier(model_path, folder, pad, labels=1):
    """A random reward model with the tokenizer of `model_path`; `pad`: its padding token, if any."""
    tokenizer, config = AutoTokenizer.from_pretrained(model_path), AutoConfig.from_pretrained(model_path)
    config.num_labels = labels
    config.pad_token_id = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data *= 20  # scores of the size of real ones
    save_pretrained(model, tokenizer, folder)
    return str(folder)
