"""On Ray batches stay where they were made: what the driver sends and receives does not grow with their length."""

import json

import pytest
from house_stage import ACTOR, ROLLOUT
from ray_stage import LONG_LOOP, counted_bytes, ray_cluster

from etude.trainer.run import train

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEYS = (
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.ppo_mini_batch_size=1",
    "trainer.total_training_steps=1",
    "data.max_response_length=600",
)


def long_answers(tiny, folder, length, *keys):
    (folder / "loops.py").write_text(LONG_LOOP)
    name = f"long_answers_{length}"
    (folder / "loops.yaml").write_text(f"- {{name: {name}, _target_: 'loops.py:LongAnswers', length: {length}}}")
    agent = f"{ROLLOUT}.agent={{default_agent_loop:{name},agent_loop_config_path:{folder}/loops.yaml}}"
    return tiny.config(folder, agent, *KEYS, *keys)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2) as nodes:
        yield nodes


def test_the_drivers_bytes_do_not_grow_with_the_answers(tiny, tmp_path, cluster):
    found = {}
    for length in (32, 512):
        folder = tmp_path / str(length)
        folder.mkdir()
        with counted_bytes() as counts:
            train(long_answers(tiny, folder, length, "trainer.backend=ray"))
        found[length] = counts
        dumped = [json.loads(line) for line in (folder / "rollouts" / "1.jsonl").read_text().splitlines()]
        assert {len(record["response_ids"]) for record in dumped} == {length}
    short, long = (sum(counts.values()) for counts in found.values())
    assert "fetch" not in found[32]
    assert long < 1.02 * short, found  # of the batch itself, 16 times as many
