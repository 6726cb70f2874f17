"""Samplers: choose the rows of the next batch, instead of a new random order each epoch.

Invariant: what a sampler draws depends only on its state, which a checkpoint holds: a resumed run draws the same rows as
an uninterrupted one. `update` sees each training batch once, after it is scored and before the next one is drawn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from etude.errors import ConfigError, EtudeError, describe_error
from etude.options import DataOptions
from etude.registry import Registry, import_object
from etude.seeds import epoch_order

if TYPE_CHECKING:
    from etude.data.dataset import RLDataset
    from etude.protocol import DataProto

ROW_COLUMN = "dataset_row"
"""Column of a batch with each rollout's row index in the dataset, present if a sampler draws the rows."""


class Sampler:
    """Base class. `data_source` is the dataset and `data_config` the `data` section, as in verl."""

    def __init__(self, data_source: RLDataset, data_config: Any) -> None:
        self.data_source, self.data_config = data_source, data_config

    def draw(self, count: int) -> Sequence[int]:
        """Returns the row indices of the next batch."""
        raise NotImplementedError

    def update(self, batch: DataProto) -> None:
        """Learns from a scored batch; `row_success(batch)` gives the success rate of each of its rows."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what `draw` depends on, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores that state."""


SAMPLERS: Registry[type[Sampler]] = Registry("sampler")
register = SAMPLERS.register


@register("curriculum")
class CurriculumSampler(Sampler):
    """Draws rows by how much is left to learn from them: weight p (1 - p), where p is the row's success rate.

    A row never drawn has the weight of p = 1/2; no weight is below `data.sampler.floor` of that, so that rows that have
    become easy, or were too hard, are drawn again. p is a moving average over the row's visits (the last one counts
    half). Each draw since the last visit that was scored halves a weight: a row that only fails would else stay the most
    attractive of all. A batch has no row twice. Foster et al., "Learning to Reason at the Frontier of Learnability" (2025).
    """

    def __init__(self, data_source: RLDataset, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._rates: dict[int, float] = {}
        self._unscored: Counter[int] = Counter()  # draws of each row since its rollouts were last scored
        self._draws = 0

    def draw(self, count: int) -> Sequence[int]:
        """Samples by weight without replacement (Efraimidis and Spirakis 2006)."""
        rng = np.random.default_rng([self.data_config.seed, self._draws])
        self._draws += 1
        keys = np.log(rng.random(len(self.data_source))) / self._weights()
        drawn: list[int] = np.argsort(-keys, kind="stable")[:count].tolist()
        self._unscored.update(drawn)
        return drawn

    def _weights(self) -> np.ndarray:
        weights = np.ones(len(self.data_source))
        for row, rate in self._rates.items():
            weights[row] = 4 * rate * (1 - rate)
        for row, draws in self._unscored.items():
            weights[row] *= 0.5**draws
        return np.maximum(weights, self.data_config.sampler.floor)

    def update(self, batch: DataProto) -> None:
        for row, rate in row_success(batch).items():
            self._rates[row] = (self._rates.get(row, rate) + rate) / 2
            del self._unscored[row]

    def state_dict(self) -> dict[str, Any]:
        """Returns the success rates, the number of draws, and for each row those that were not scored."""
        rates, unscored = ({str(row): n for row, n in each.items()} for each in (self._rates, self._unscored))
        return {"draws": self._draws, "rates": rates, "unscored": unscored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws = state["draws"]
        self._rates = {int(row): rate for row, rate in state["rates"].items()}
        self._unscored = Counter({int(row): draws for row, draws in state.get("unscored", {}).items()})


@register("mixture")
class MixtureSampler(Sampler):
    """Draws from each `data_source` in proportion to `data.sampler.weights`, whatever their sizes.

    After any number of rows, each source is within one row of its share. Each source has its own order of rows,
    reshuffled on every pass. A source without a weight has weight 1; 0 leaves it out.

    Raises:
        ConfigError: a weight is negative or names no source, or none is positive.
    """

    def __init__(self, data_source: RLDataset, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, source in enumerate(data_source.sources):
            self._rows[source].append(row)
        weights = {source: float(data_config.sampler.weights.get(source, 1.0)) for source in sorted(self._rows)}
        if unknown := sorted(set(data_config.sampler.weights) - set(weights)):
            raise ConfigError(f"data.sampler.weights names {', '.join(unknown)}; the rows are of {', '.join(weights)}")
        if min(weights.values()) < 0 or not sum(weights.values()) > 0:
            raise ConfigError(f"data.sampler.weights must not be negative, and one must be positive: {weights}")
        self._shares = {source: weight / sum(weights.values()) for source, weight in weights.items() if weight}
        self._drawn = dict.fromkeys(self._shares, 0)
        self._orders: dict[str, tuple[int, np.ndarray]] = {}  # source → (epoch, order)

    def draw(self, count: int) -> Sequence[int]:
        """Takes each row from the source with the earliest deadline among those below their share: the deadlines of
        Baruah et al., "Proportionate Progress" (1996), which are always met. (Taking the source furthest below its share
        lets several sources of similar weight, due at once, fall more than a row short.)"""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        total = sum(self._drawn.values()) + 1
        behind = (each for each, share in self._shares.items() if self._drawn[each] < share * total)
        source = min(behind, key=lambda each: ((self._drawn[each] + 1) / self._shares[each], each))
        rows, number = self._rows[source], self._drawn[source]
        self._drawn[source] += 1
        epoch, place = divmod(number, len(rows))
        if self._orders.get(source, (-1, None))[0] != epoch:
            seed = self.data_config.seed + 1 + list(self._shares).index(source)
            self._orders[source] = (epoch, epoch_order(seed, epoch, len(rows)))
        return rows[self._orders[source][1][place]]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = dict(state["drawn"])


class IteratedSampler(Sampler):
    """Adapts a sampler written for verl: it is iterated epoch after epoch, and may have `update(batch)`, `state_dict`
    and `load_state_dict`. One without a state is fast-forwarded on resume."""

    def __init__(self, data_source: RLDataset, data_config: Any, made: Any) -> None:
        super().__init__(data_source, data_config)
        self._made, self._drawn = made, 0
        self._rows = self._endless()

    def _endless(self) -> Iterator[int]:
        while True:
            drawn = self._drawn
            for row in self._made:
                self._drawn += 1
                yield int(row)
            if self._drawn == drawn:
                raise ConfigError(f"data.sampler: {type(self._made).__name__} gave no row")

    def draw(self, count: int) -> Sequence[int]:
        return [next(self._rows) for _ in range(count)]

    def update(self, batch: DataProto) -> None:
        if hasattr(self._made, "update"):
            self._made.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped sampler's state, if it has one, and how many rows it has drawn."""
        own = self._made.state_dict() if hasattr(self._made, "state_dict") else None
        return {"drawn": self._drawn, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the wrapped sampler's state, or fast-forwards it."""
        if state["own"] is not None:
            self._made.load_state_dict(state["own"])
            self._drawn = state["drawn"]
        else:
            self.draw(state["drawn"])


def open_sampler(options: DataOptions, dataset: RLDataset) -> Sampler | None:
    """Creates the configured sampler over `dataset`; None if rows come in file order or in a random order each epoch.

    Raises:
        ConfigError: there is no such sampler, or its constructor fails; names the key.
    """
    given = options.sampler
    if given.class_name is None:
        return None
    config = OmegaConf.create(asdict(options))
    if given.class_path is None:
        return SAMPLERS.get(given.class_name)(dataset, config)
    cls = import_object(f"{given.class_path}:{given.class_name}")
    try:
        made = cls(data_source=dataset, data_config=config)
    except EtudeError:
        raise
    except Exception as error:
        raise ConfigError(f"data.sampler.class_name={given.class_name}: {describe_error(error)}") from error
    if isinstance(made, Sampler):
        return made
    if not hasattr(made, "__iter__"):
        raise ConfigError(f"data.sampler.class_name: {given.class_name} is neither a Sampler nor an iterable of rows")
    return IteratedSampler(dataset, config, made)


def row_success(batch: DataProto) -> dict[int, float]:
    """Returns the share of successes (`Rewards.succeeded`) among the rollouts of each dataset row in a scored batch; a row
    whose rollouts were all dropped is not there."""
    found: dict[int, list[bool]] = defaultdict(list)
    totals, columns = batch.batch["token_level_scores"].sum(dim=1).tolist(), batch.non_tensor_batch
    for row, total, rollout in zip(columns[ROW_COLUMN].tolist(), totals, columns["rollout"].tolist()):
        if rollout.trajectory is not None:
            found[row].append(rollout.trajectory.rewards.succeeded(total))
    return {row: sum(each) / len(each) for row, each in found.items()}
