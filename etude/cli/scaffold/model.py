"""Makes `model/` beside this file: an untrained model of half a megabyte, so that every command runs at once and offline.

It writes noise and learns nothing worth having. Put the folder of a small instruction-tuned model that calls tools in its
place (actor_rollout_ref.model.path) for a real run.
"""

from pathlib import Path

from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained

TEXTS = [
    "You are at a shop. Ask for prices with the tool; answer with a number.",
    "What do 3 pears and 2 melons cost together?",
    '<tool_call>\n{"name": "price", "arguments": {"item": "pear"}}\n</tool_call>',
]

tokenizer = build_tiny_tokenizer(TEXTS, 512)
spec = TinyModelSpec(hidden_size=64, num_layers=2, intermediate_size=128, seed=1)
save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, Path(__file__).parent / "model")
