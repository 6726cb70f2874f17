"""Run folders with dumps as a trainer writes them, for the tests of what reads them."""

import json
from pathlib import Path

from etude.dumps import rollout_record, write_rollouts
from etude.trajectory import Provenance, Rewards, StopReason, ToolCallRecord, Trajectory
from etude.viewer.index import RolloutIndex


def make_trajectory(number=0, *, answer="72", tool_error=None, stop=StopReason.COMPLETED, score=1.0, words=""):
    """One tool call, its answer and a closing turn: 7 response tokens, 5 of them sampled."""
    trajectory = Trajectory(f"r{number}", [1, 2, 3])
    trajectory.append([4, 5], Provenance.SAMPLED, log_probs=[-0.1, -0.25], weight_versions=[3, 3])
    trajectory.assistant_turns = 1
    trajectory.append([6], Provenance.TEMPLATE)
    trajectory.append([7], Provenance.TOOL)
    trajectory.user_turns = 1
    trajectory.append([8, 9, 10], Provenance.SAMPLED, log_probs=[-0.5, -1.0, -2.0], weight_versions=[3, 3, 4])
    trajectory.assistant_turns = 2
    call = ToolCallRecord(0, "calculator", '{"expression": "12 * 6"}', "72", 0.5, 0.01, tool_error)
    trajectory.tool_calls.append(call)
    trajectory.rewards = Rewards([(0, "calculator", 0.5)], {"calculator": 0.25}, score, {"pred": answer})
    trajectory.stop_reason = stop
    trajectory.timings = {"generate_sequences": 1.5, "tool_calls": 0.5}
    trajectory.messages = [
        {"role": "user", "content": "12 * 6?"},
        {
            "role": "assistant",
            "content": "I compute.",
            "tool_calls": [
                {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12 * 6"}}}
            ],
        },
        {"role": "tool", "content": "72"},
        {"role": "assistant", "content": f"It is {answer}.{words}"},
    ]
    return trajectory


def make_record(step=1, number=0, *, group=0, source="gsm8k", row=None, **given):
    """A line of a dump: rollout `number` of prompt `group`."""
    trajectory = make_trajectory(number, **given)
    texts = ["I compute.", "\n", "72", f"It is {given.get('answer', '72')}.{given.get('words', '')}"]
    return rollout_record(
        trajectory,
        {"uid": f"{step}-{group}", "data_source": source, "reward_model": {"ground_truth": "72"}} | (row or {}),
        step=step,
        input=f"Question {group}: 12 * 6?",
        output="".join(texts),
        score=trajectory.rewards.total(),
        texts=texts,
    )


def write_run(folder: Path, steps=2, groups=2, n=2) -> Path:
    """A run of `steps` dumps, each with `n` rollouts of `groups` prompts, and one dump of validation."""
    for step in range(1, steps + 1):
        write_rollouts(folder / "rollouts", step, make_records(step, groups, n))
    write_rollouts(folder / "validation", steps, make_records(steps, 1, 1))
    return folder


def make_records(step, groups=2, n=2):
    """The first rollout of each prompt is right, the others are wrong and end at the length limit."""
    for number in range(groups * n):
        right = number % n == 0
        ending = {} if right else {"answer": "27", "score": 0.0, "stop": StopReason.RESPONSE_LENGTH}
        yield make_record(step, number, group=number // n, **ending)


def opened(path):
    index = RolloutIndex(path)
    index.refresh()
    return index


def verl_line(step=1, number=0, **extra):
    """As verl's trainer writes one."""
    record = {"input": f"user\nHow many {number // 2}?", "output": f"They are {number}.", "gts": "3", "score": 0.5}
    return json.dumps(record | {"step": step, "acc": True} | extra, ensure_ascii=False) + "\n"


MALFORMED = [
    (("tool_calls",), -1),
    (("tool_calls", 0, "seconds"), 10**400),
    (("segments", 0, "provenance"), [{}]),
    (("segments", 0, "turn"), [1]),
    (("rewards", "steps", 0, 0), []),
    (("rewards", "steps", 0, 2), 10**400),
    (("rewards", "score"), 10**400),
    (("rewards", "final", "calculator"), 10**400),
    (("score",), 10**400),
    (("messages", 0), 1e308),
    (("prompt_ids", 0), 10**30),
    (("reward_weights",), 0.5),
    (("reward_weights", "tool"), None),
]
"""Values, by their place in a record, that no trainer writes there."""


def write_malformed(folder: Path, place, value) -> Path:
    """A dump of one rollout with `value` at `place`."""
    record = make_record()
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "1.jsonl").write_text(json.dumps(record) + "\n")
    return folder
