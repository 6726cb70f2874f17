"""From padded batch columns to packed rows of tokens, and back.

Invariant: packing drops only padding and tokens that no scored token depends on; a scored token is one whose `response_mask`
is 1, and only the hidden states that predict scored tokens are multiplied with the output embedding. Rows without a scored
token are not computed, and a prefix shared by several rows is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.algorithms.distillation import ABSENT
from etude.chat.encoding import common_beginning
from etude.errors import DataError
from etude.models.image_positions import ImagePositions
from etude.models.packed import CausalSequences, packed_hidden
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.images import PackedImages, locate_images, pack_images
from etude.training.log_probs import Support
from etude.training.ulysses import SequenceTeam, TeamLayout
from etude.trajectory import KEPT_IDS, ROUTED_EXPERTS, Head, RoutedExperts


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch, packed end to end.

    `token_ids` (tokens,); `source` (scored,): packed position whose hidden state predicts each scored token; `labels`
    (scored,); `row`, `column` (scored,): the token's index in the (rows, response_len) matrix; `shared` (tokens,): the
    number of rows that contain the token; `images`: those among the tokens; `support`: the ids that the labels were sampled
    from, None for the whole vocabulary; `heads`: with score centering, ids and log-probs (scored, k) of the engine's most
    probable tokens at each label, `ABSENT` where there are fewer; `experts` (tokens, layers, k): the experts that the
    engine's routers chose, see `etude.models.experts.replay_experts`; `team`: the ranks that compute the rows together, of
    which this one has its own tokens alone.
    """

    token_ids: Tensor
    layout: CausalSequences | TeamLayout
    source: Tensor
    labels: Tensor
    row: Tensor
    column: Tensor
    shape: tuple[int, int]
    shared: Tensor
    images: PackedImages | None = None
    support: Support | None = None
    heads: tuple[Tensor, Tensor] | None = None
    experts: Tensor | None = None
    team: SequenceTeam | None = None

    def hidden(self, model: Any) -> Tensor:
        """Computes the final hidden states (scored, hidden) that predict the scored tokens, with the current weights."""
        shown, device = None, self.token_ids.device
        if self.images is None:
            positions = self.layout.position_ids(device)
        else:
            positions, shown = self.images.positions, self.images.encode(model)
        # Rows may share a source: the backward pass of index_select adds their gradients in a fixed order.
        return packed_hidden(model, self.token_ids, positions, self.layout, shown).index_select(0, self.source)

    def scatter(self, values: Tensor) -> Tensor:
        """Scatters (scored, …) values into a (rows, response_len, …) tensor of zeros, with those of the whole team;
        differentiable."""
        return self.total(values.new_zeros(self.shape + values.shape[1:]).index_put((self.row, self.column), values))

    def total(self, part: Tensor) -> Tensor:
        """Sums what each rank of the team has a part of; differentiable."""
        return part if self.team is None else self.team.sum(part)


def pack(
    batch: DataProto,
    rows: Sequence[int],
    device: torch.device,
    vision: Vision | None = None,
    team: SequenceTeam | None = None,
) -> PackedRows:
    """Packs the given rows; see `PackedRows`. Needs `input_ids`, `attention_mask`, `response_mask`.

    Args:
        vision: the model's image format, for the column `multi_modal_inputs`; None: it takes no images.
        team: ranks that all pack these rows, each to compute its own tokens.

    Raises:
        DataError: a row's very first token is scored, so nothing predicts it; or a row's images do not match its ids.
    """
    index = torch.as_tensor(list(rows))
    ids, mask = batch.batch["input_ids"][index], batch.batch["response_mask"][index].bool()
    attention = batch.batch["attention_mask"][index].bool()
    prompt_width = ids.shape[1] - mask.shape[1]
    prompts = attention[:, :prompt_width].sum(dim=1)
    row, column = mask.nonzero(as_tuple=True)
    orphans = (prompts[row] + column == 0).nonzero()
    if len(orphans):
        first = rows[int(row[orphans[0]])]
        raise DataError(f"row {first}: its first token is scored but nothing precedes it: give it a prompt")
    sequences, placed = _needed_rows(batch, rows, vision)
    laid_out, layout, flat = prefix_tree(sequences)
    experts = None
    if laid_out and isinstance(laid_out[0], tuple):
        laid_out, went = zip(*laid_out)
        known = next(each for each in batch.non_tensor_batch[ROUTED_EXPERTS] if each is not None)
        ids_of_experts = RoutedExperts(b"".join(went), known.layers, known.top_k).array()
        experts = torch.from_numpy(ids_of_experts.astype(np.int64)).to(device)
    token_ids, places = torch.tensor(laid_out, dtype=torch.long), torch.tensor(flat)
    offsets = torch.tensor([0, *accumulate(len(tokens) for tokens in sequences)])
    source = places[offsets[row] + prompts[row] + column - 1]
    shared = places.long().bincount(minlength=len(token_ids))
    own_layout: CausalSequences | TeamLayout = layout
    if team is not None:
        own_layout, mine = TeamLayout(layout, team, len(token_ids)), source % team.size == team.rank
        source, row, column = source[mine] // team.size, row[mine], column[mine]
        token_ids, shared = team.own(token_ids), team.own(shared)
        experts = None if experts is None else team.own(experts, -1)
    images = None
    if vision is not None and any(placed):
        token_ids.masked_fill_(token_ids < 0, vision.image_token_id)
        images = pack_images(placed, places.split([len(tokens) for tokens in sequences]), layout.position_ids(), device)
    labels = ids[row, prompt_width + column]
    support, heads = _distributions(batch, rows, row, column, labels, device)
    # A blocking upload would wait for all that the GPU has yet to compute.
    return PackedRows(
        token_ids=token_ids.to(device, non_blocking=True),
        layout=own_layout,
        source=source.to(device, non_blocking=True),
        labels=labels.to(device, non_blocking=True),
        row=row.to(device, non_blocking=True),
        column=column.to(device, non_blocking=True),
        shape=(len(index), mask.shape[1]),
        shared=shared.to(device, non_blocking=True),
        images=images,
        support=support,
        heads=heads,
        experts=experts,
        team=team,
    )


def _distributions(
    batch: DataProto, rows: Sequence[int], row: Tensor, column: Tensor, labels: Tensor, device: torch.device
) -> tuple[Support | None, tuple[Tensor, Tensor] | None]:
    """Returns the support of each label and the heads of the distributions that they were sampled from."""
    given = batch.non_tensor_batch.get(KEPT_IDS)
    if given is None:
        return None, None
    known = [(of_row := given[rows[r]]) and of_row[c] for r, c in zip(row.tolist(), column.tolist())]
    kept = [each.kept if isinstance(each, Head) else each or None for each in known]
    support = Support.of(kept, device) if any(kept) else None
    width = max((len(each.ids) for each in known if isinstance(each, Head)), default=0)
    if not width:
        return support, None
    ids, log_probs = labels[:, None].repeat(1, width), torch.full((len(labels), width), ABSENT)
    for place, each in enumerate(known):
        if isinstance(each, Head):
            ids[place, : len(each.ids)] = torch.tensor(each.ids)
            log_probs[place, : len(each.ids)] = torch.tensor(each.log_probs)
    return support, (ids.to(device), log_probs.to(device))


MIN_SHARED = 8  # tokens; sharing a shorter run costs more in attention calls than it saves


def prefix_tree(sequences: Sequence[Sequence[Any]]) -> tuple[Sequence[Any], CausalSequences, list[int]]:
    """Packs sequences as a prefix tree, in which every shared prefix of at least `MIN_SHARED` tokens appears once.

    Returns the packed tokens, their layout, and the packed index of each token of the concatenated sequences.
    """
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    shared = [common_beginning(sequences[a], sequences[b]) for a, b in pairwise(order)]
    tokens: list[Any] = []
    lengths: list[int] = []
    ancestors: list[tuple[int, ...]] = []
    places: list[list[int]] = [[] for _ in sequences]

    def add(members: Sequence[int], run: Sequence[Any], up: tuple[int, ...]) -> tuple[int, ...]:
        for member in members:
            places[member] += range(len(tokens), len(tokens) + len(run))
        tokens.extend(run)
        lengths.append(len(run))
        ancestors.append(up)
        return (*up, len(lengths) - 1)

    # Work items: the sorted sequences [low, high), whose first `depth` tokens are already packed, in the runs `up`.
    work: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while work:
        low, high, depth, up = work.pop()
        first = sequences[order[low]]
        common = min(shared[low : high - 1], default=len(first))
        if common > depth and (high - low == 1 or common >= depth + MIN_SHARED):
            up, depth = add(order[low:high], first[depth:common], up), common
        if high - low > 1:
            cuts = [low, *(i + 1 for i in range(low, high - 1) if shared[i] < depth + MIN_SHARED), high]
            work += [(a, b, depth, up) for a, b in reversed(list(pairwise(cuts)))]
    return tokens, CausalSequences(lengths, ancestors), [place for row in places for place in row]


def _needed(attention: Tensor, mask: Tensor) -> Tensor:
    """(rows, width) bool mask of the tokens before each row's last scored one, which is only a label, never a context."""
    prompt_width = attention.shape[1] - mask.shape[1]
    last = (mask * torch.arange(mask.shape[1])).amax(dim=1)
    return attention & (torch.arange(attention.shape[1]) < prompt_width + last[:, None])


def scored_rows(batch: DataProto) -> list[int]:
    """Returns the indices of rows with at least one scored token."""
    return batch.batch["response_mask"].any(dim=1).nonzero().squeeze(1).tolist()


def needed_tokens(batch: DataProto, rows: Sequence[int], vision: Vision | None = None) -> list[list[Any]]:
    """Returns for each of `rows` the tokens that `pack` packs, before shared prefixes are merged.

    Image placeholders are keyed by image, and tokens by their experts: equal keys may be shared. Raises DataError as `pack`.
    """
    return _needed_rows(batch, rows, vision)[0]


def _needed_rows(
    batch: DataProto, rows: Sequence[int], vision: Vision | None
) -> tuple[list[list[Any]], list[ImagePositions | None]]:
    index = torch.as_tensor(list(rows), dtype=torch.long)
    attention, mask = batch.batch["attention_mask"][index].bool(), batch.batch["response_mask"][index].bool()
    needed = [ids[kept].tolist() for ids, kept in zip(batch.batch["input_ids"][index], _needed(attention, mask))]
    placed = locate_images(batch, rows, vision)
    keyed: list[list[Any]] = [ids if images is None else images.keyed(ids) for ids, images in zip(needed, placed)]
    experts = batch.non_tensor_batch.get(ROUTED_EXPERTS)
    known = [] if experts is None else [went for row in rows if (went := experts[row]) is not None]
    if (
        experts is not None and known
    ):  # tokens routed to different experts give different hidden states, so they must not be shared
        nothing = known[0].first(0)
        each = [nothing if experts[row] is None else experts[row] for row in rows]
        keyed = [list(zip(ids, went.per_token(len(ids)))) for ids, went in zip(keyed, each)]
    return keyed, placed
