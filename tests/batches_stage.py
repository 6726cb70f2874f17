"""Mini-batches without a trainer."""

from etude.trainer.minibatches import count_updates, update_parts


def update_batches(data, options, *, shuffle, seed, ranks):
    """The parts of `ranks`, of each optimizer step on `data`."""
    for number in range(count_updates(len(set(data.non_tensor_batch["uid"].tolist())), options)):
        yield update_parts(data, options, shuffle, seed, ranks, number)
