"""Batches as a rollout leaves them: padded on both sides, gaps in the mask, a dropped row, a row nobody sampled."""

import pytest
import torch

from etude.protocol import DataProto

PROMPTS = [3, 6, 2, 5, 4]
RESPONSES = [7, 0, 5, 9, 3]
MASKS = ["1110011", "", "00000", "011010110", "100"]
"""Rows 1 (dropped: no response) and 2 (nothing sampled) carry nothing to learn; row 4 ends in a tool's answer."""


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(7)
    rows, before, after = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    ids = torch.full((rows, before + after), 0)
    attention, mask = torch.zeros_like(ids), torch.zeros(rows, after, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        real = slice(before - prompt, before + response)
        ids[i, real] = torch.randint(1, 97, (prompt + response,), generator=generator)
        attention[i, real] = 1
        mask[i, :response] = torch.tensor([int(c) for c in MASKS[i]], dtype=torch.long)
    return DataProto.from_single_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "response_mask": mask,
            "advantages": torch.randn(rows, after, generator=generator),
            "values": torch.randn(rows, after, generator=generator) * mask,
            "returns": torch.randn(rows, after, generator=generator) * mask,
            "old_log_probs": -5 + 0.3 * torch.randn(rows, after, generator=generator),
        }
    )


@pytest.fixture
def row_ids(batch):
    """The ids of row i without padding, and the length of its prompt."""

    def ids_of(i):
        return batch.batch["input_ids"][i][batch.batch["attention_mask"][i].bool()], PROMPTS[i]

    return ids_of
