"""Warnings about problems in a step that are easy to overlook in its metrics; for the display and the report.

Invariant: pure functions of a step's metrics and rollouts; the kinds of warning are a fixed set, so that they can be counted
over a run. What the model or a tool wrote is only quoted, on one line of bounded length.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from etude.checks.step_hacks import find_alarms
from etude.trajectory import StopReason


class Problem(NamedTuple):
    """What is wrong, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} \N{RIGHTWARDS ARROW} {self.fix}"


_CUT = {  # stop reasons that the model did not choose, with the key that sets the limit
    StopReason.RESPONSE_LENGTH: "cut at data.max_response_length",
    StopReason.CONTEXT_LENGTH: "cut at rollout.max_model_len",
    StopReason.TURN_LENGTH: "cut at multi_turn.max_turn_tokens, or at the max_tokens of an agent's own request",
    StopReason.TRAJECTORY_LENGTH: "cut at multi_turn.max_trajectory_tokens",
    StopReason.MAX_ASSISTANT_TURNS: "ended at multi_turn.max_assistant_turns",
    StopReason.TOOL_RESPONSE_OVERFLOW: "had no room for what a tool or environment says",
    StopReason.TIME_LIMIT: "ran out of multi_turn.max_seconds",
    StopReason.MALFORMED_CALL: "ended by a malformed call",
    StopReason.MAX_MALFORMED_CALLS: "ended at multi_turn.max_consecutive_malformed_calls",
}
_CUT_SHARE = 0.1  # share of trajectories; no warning below it
_FAILED_SHARE = 0.1  # share of a tool's calls, likewise
_RARE = 0.05  # share of a step's rollouts, below which spoilt calls are a sampled policy's noise
_SOME = 0.25  # share of a step's rollouts, below which cut answers are a policy's that still learns to end them
_DOMINANT = 0.9  # share of the total reward's spread; an early sign of reward hacking
_SPREAD = "reward/spread/"
_STANDING = 2e-6  # relative change of weights; 1e-5 to 1e-3 is usual
_CHANCE = 0.9  # of log(vocabulary): the entropy of a model of random weights
_UNPAID = 0.1  # mean reward; noise is right now and then
FAR = 0.5  # nats that an update moves the policy; below 0.1 is usual
_QUOTED = 100  # characters of an error
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # in an error: others of its kind have another
_OPENING = re.compile(r"tool call \d+ was not read: |Error in the call of '[^']*': |Error executing tool '[^']*': ")
_RAISED = ("exception", "timeout", "infrastructure")  # errors of calls that are the tool's own; others are its refusals
_UNKNOWN = {"malformed": "rollout/malformed_calls", "unknown_tool": "rollout/unknown_tool_calls"}
_SHARES = {  # metric → (threshold, sentence)
    "rollout/equal_groups_share": (
        0.9,
        "of groups have equal rewards: a group-relative estimator learns {learned} from them",
    ),
    "rollout/unparsed_share": (0.1, "of answers were not found by the scorer"),
}
_PLURAL = re.compile(r"(?<=^1 )((?:malformed |infrastructure |greedy )?\w+?)(?:(ie)s|s)\b")
_SUPERVISED = ("sft/skipped_steps", "dpo/skipped_steps")
RAISE_TURN = (
    "raise multi_turn.max_turn_tokens, or the agent's own max_tokens, if the cut ones are on their way (etude view)"
)
_COUNTS = {  # metric → sentence, where it is above 0
    "rollout/unread_calls": "{:,.0f} answers with a call in a format that multi_turn.format does not read",
    "actor/skipped_steps": "actor update skipped: its gradient is not finite",
    "critic/skipped_steps": "critic update skipped: its gradient is not finite",
    **dict.fromkeys(_SUPERVISED, "update skipped: its gradient is not finite"),
    "rollout/dropped": "{:,.0f} trajectories dropped after failures of infrastructure or of the agent",
    "baseline/rollout/dropped": "{:,.0f} greedy answers dropped: their prompts are left out",
    "val/rollout/dropped": "{:,.0f} answers of the validation dropped: its metrics are without them",
    "rollout/infrastructure_failures": "{:,.0f} infrastructure failures, retried or dropped",
    "rollout/agent_errors": "{:,.0f} rollouts in which the agent raised an error",
    "rollout/prompt_too_long": "{:,.0f} prompts too long",
    "rollout/nothing_sampled": "{:,.0f} rollouts without a sampled token",
    "rollout/context_refused": "{:,.0f} trajectories that the chat template does not write",
    "rollout/unwritable_answers": "{:,.0f} answers that the chat template does not write",
    "rollout/malformed_calls": "{:,.0f} malformed calls",
    "rollout/unknown_tool_calls": "{:,.0f} calls of unknown tools",
}


WHY = "`etude report RUN --why` says what stands in the way, with rollouts"
_DIFFER = f"take easier or harder rows, or more answers to each (actor_rollout_ref.rollout.n); {WHY}"
LENGTH = "data.max_response_length"
SHOW = "put a worked example (or another one) into the prompt, or warm up with `etude sft`"
_LOGGED = "the run's log names the service, tool or line"
_READ = "`etude view RUN` finds such rollouts"
_LOWER = "lower optim.lr"
UNTRAINED = "actor/entropy_share"
TRY_REWARD = "`etude check` and `etude reward try` tell: mend {scorer}; if the model solves the rows, take harder ones"
MEND = "mend the tool"
ALLOW = "tell the model what is allowed: in the tool's schema, or by a worked example of it in the prompt"
_NOTHING = "so few need nothing, if they do not become more"
_FIXES = {  # kind → what to do; of others `_READ`
    "rollout/equal_groups_share": _DIFFER,
    "rollout/unparsed_share": "tell the model in the prompt the form that the scorer reads",
    "rollout/unread_calls": "set multi_turn.format to that of the model's calls",
    "rollout/malformed_calls": SHOW,
    "rollout/unknown_tool_calls": SHOW,
    "rollout/dropped": _LOGGED,
    "baseline/rollout/dropped": _LOGGED,
    "val/rollout/dropped": _LOGGED,
    "rollout/infrastructure_failures": _LOGGED,
    "rollout/agent_errors": _LOGGED,
    "rollout/prompt_too_long": "raise data.max_prompt_length",
    StopReason.CONTEXT_LENGTH.value: "raise rollout.max_model_len, as far as the model goes",
    StopReason.TURN_LENGTH.value: RAISE_TURN,
    StopReason.TRAJECTORY_LENGTH.value: "raise multi_turn.max_trajectory_tokens",
    StopReason.MAX_ASSISTANT_TURNS.value: "raise multi_turn.max_assistant_turns, if what was missing is a turn to answer",
    StopReason.TOOL_RESPONSE_OVERFLOW.value: f"raise {LENGTH}",
    StopReason.TIME_LIMIT.value: "raise multi_turn.max_seconds, or mend what is slow (timing_s/ in the metrics)",
    StopReason.MALFORMED_CALL.value: SHOW,
    StopReason.MAX_MALFORMED_CALLS.value: SHOW,
    "actor/skipped_steps": _LOWER,
    "critic/skipped_steps": _LOWER,
    **dict.fromkeys(_SUPERVISED, _LOWER),
}


def find_problems(
    metrics: Mapping[str, float], evidence: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, Problem]:
    """Returns kind → problem, most serious first; continued by its `evidence`, see `find_evidence`. Of a supervised step,
    whose samples are of a model that is still learning the form, only what is wrong with the update."""
    supervised = chain(_counted(metrics, *_SUPERVISED), _unmoved_weights(metrics))
    problems = dict(supervised if "sft/loss" in metrics else _find_problems(metrics))
    for kind, (said, fix) in (evidence or {}).items():
        if kind in problems:
            problems[kind] = Problem(problems[kind].what + said, fix or problems[kind].fix)
    return dict(sorted(problems.items(), key=lambda item: item[1].fix == _NOTHING))


def find_evidence(rollouts: Iterable[Mapping[str, Any]]) -> dict[str, Problem]:
    """Returns kind of problem → what the rollouts of a step say about it: how its sentence goes on, and what to do, if
    that is known better: the commonest error of each tool's calls, whether a longer answer would help, and what is so
    rare that it needs nothing. Reads `tool_calls`, `stop_reason`, `response_ids` and `metrics` of dump records, or of what
    has these keys."""
    errors, raised = defaultdict[str, list[str]](list), Counter[str]()
    total = unread = fitting = ran = 0
    cut, ended, calling = list[Sequence[int]](), list[int](), 0
    answered, ended_answered = 0, list[int]()  # of these, after a call that worked
    for rollout in rollouts:
        total, unread = total + 1, unread + bool(rollout["metrics"].get("unread_calls"))
        fitting += any(call.get("error") != "malformed" for call in rollout["tool_calls"])
        ran += any(call.get("error") not in ("malformed", "not_executed") for call in rollout["tool_calls"])
        worked = any(not call.get("error") for call in rollout["tool_calls"])
        for call in rollout["tool_calls"]:
            if (error := call.get("error")) and error != "not_executed":
                kind = _UNKNOWN.get(error, f"tool/{call.get('name')}")
                errors[kind].append(" ".join(map(str.strip, str(call.get("response")).splitlines())))
                raised[kind] += error in _RAISED
        if rollout["stop_reason"] == StopReason.RESPONSE_LENGTH.value:
            cut.append(rollout["response_ids"])
            answered += worked
            calling += [call.get("error") for call in rollout["tool_calls"]][-1:] in (["malformed"], ["not_executed"])
        elif rollout["stop_reason"] == StopReason.COMPLETED.value:
            ended.append(len(rollout["response_ids"]))
            ended_answered += ended[-1:] if worked else []
    evidence = {}
    for kind, texts in errors.items():
        fix = (MEND if 2 * raised[kind] > len(texts) else ALLOW) if kind.startswith("tool/") else ""
        few = kind in _UNKNOWN.values() and len(texts) < _RARE * total
        evidence[kind] = Problem(_quote_commonest(texts), _NOTHING if few else fix)
    if 0 < unread < _RARE * total:
        evidence["rollout/unread_calls"] = Problem(f", of {total} rollouts", _NOTHING)
    elif 0 < unread < fitting:  # the format is the right one
        evidence["rollout/unread_calls"] = Problem(
            f", while {fitting} of {total} rollouts have some that it reads", SHOW
        )
    if cut:  # a guess ends early: answers with a tool's help are compared with such alone
        like = ended_answered if 2 * answered > len(cut) else ended
        evidence[StopReason.RESPONSE_LENGTH.value] = Problem(
            "", _explain_cuts(cut, like, calling if calling > ran else 0, total)
        )
    return evidence


def _quote_commonest(texts: Sequence[str]) -> str:
    """The commonest kind of `texts`, which may differ in quoted words, numbers and what follows."""
    kinds = [_VALUE.sub("…", _OPENING.sub("", text))[:24] for text in texts]
    kind, count = Counter(kinds).most_common(1)[0]
    example, same = Counter(text for each, text in zip(kinds, texts) if each == kind).most_common(1)[0]
    if len(example) > _QUOTED:  # what the model wrote is shortened first, so that what was wrong with it is left
        example = _VALUE.sub(
            lambda found: found[0] if len(found[0]) < 24 else f"{found[0][:16]}…{found[0][-1]}", example
        )
    shown = example if len(example) <= _QUOTED else example[: _QUOTED - 1] + "…"
    return f", {count} with: {shown}" if same == count else f", {count} like: {shown}"


def _explain_cuts(cut: Sequence[Sequence[int]], ended: Sequence[int], calling: int, total: int) -> str:
    """What to do about answers that were cut, `calling` of them within a call where most calls are, beside those that ended
    after so many tokens; of `total` rollouts."""
    if 2 * sum(map(_repeats, cut)) > len(cut):
        remedy = "show how an answer ends, or warm up (etude sft)"
        return f"do not raise {LENGTH}, most of these repeat themselves: {remedy}"
    if 2 * calling > len(cut):
        return f"raise {LENGTH}: {calling} of {len(cut)} are cut within a tool call, or have no room left after it"
    if ended and 2 * max(ended) < min(map(len, cut)):
        return f"do not raise {LENGTH}, those that end take {max(ended)} at most: read what the cut ones write (etude view)"
    if ended and len(cut) < _SOME * total:
        return _NOTHING
    known = f"those that end take up to {max(ended)}" if ended else "none ends before"
    return f"raise {LENGTH} if the cut ones are on their way to an answer (etude view): {known}"


def _repeats(ids: Sequence[int]) -> bool:
    """Whether the last tokens are mostly the same few, again and again."""
    last = ids[-64:]
    runs = [tuple(last[start : start + 4]) for start in range(len(last) - 3)]
    return len(last) >= 24 and 2 * len(set(runs)) < len(runs)


Found = Iterator[tuple[str, Problem]]
"""Kind and problem."""


def _counted(metrics: Mapping[str, float], *kinds: str) -> Found:
    for kind in kinds:
        if (count := metrics.get(kind, 0.0)) > 0:
            what = _PLURAL.sub(lambda word: word[1] + ("y" if word[2] else ""), _COUNTS[kind].format(count))
            yield kind, Problem(what, _FIXES.get(kind, _READ))


def _find_problems(metrics: Mapping[str, float]) -> Found:
    yield from _untrained(metrics)
    yield from _counted(metrics, *_COUNTS)
    # a penalty in the reward makes equal rewards differ, and a group's standard deviation scales it up to full advantages
    kept = metrics.get("training/filter_groups/kept", 1.0)
    learned = "only the KL penalty" if kept and metrics.get("actor/reward_kl_penalty") else "nothing"
    if equal := _equal_rewards(metrics, kept, learned):
        yield "equal rewards" if "critic/score/min" in metrics else "nothing left", equal
    elif metrics.get("rollout/equal_groups_share", 1.0) < 1 and not _any_advantage(metrics):
        what = "rewards differ, and no answer has an advantage: nothing is learned"
        yield "no advantage", Problem(what, "algorithm.adv_estimator=max_rl, for one, takes rewards of 0 and 1 alone")
    for ending, words in _CUT.items():
        share = metrics.get(f"rollout/stop_reason/{ending.value}", 0.0)
        if share >= _CUT_SHARE:
            what = f"{100 * share:.0f} % of trajectories {words}"
            yield ending.value, Problem(what, _FIXES.get(ending.value, _READ))
    for name, (threshold, words) in _SHARES.items():
        if (share := metrics.get(name, 0.0)) >= threshold and not (equal and "critic/score/min" in metrics):
            yield name, Problem(f"{100 * share:.0f} % {words.format(learned=learned)}", _FIXES[name])
    for kind, what in find_alarms(metrics).items():
        yield kind, Problem(what, "look at some (etude view)")
    yield from _unmoved_weights(metrics)
    if (moved := metrics.get("actor/ppo_kl", 0.0)) >= FAR:
        yield (
            "actor/ppo_kl",
            Problem(f"KL {moved:.3g}: one update changed the policy beyond what its rewards say", _LOWER),
        )
    yield from _tool_problems(metrics)
    parts = {name.removeprefix(_SPREAD): value for name, value in metrics.items() if name.startswith(_SPREAD)}
    if not any(name.startswith("final/") for name in parts):
        parts.pop("score", None)  # the task itself, beside what tools pay or cost on the way
    for name, value in parts.items():
        if value > _DOMINANT:
            much, others = (f"{100 * value:.0f} %", "") if value <= 1 else ("all", ", against the other parts")
            what = f"{much} of the spread of rewards comes from '{name}' alone{others}"
            yield f"{_SPREAD}{name}", Problem(what, "see what it rewards")


def _untrained(metrics: Mapping[str, float]) -> Found:
    entropy, share = metrics.get("actor/entropy", 0.0), metrics.get("actor/entropy_share", 0.0)
    if share < _CHANCE or metrics.get("critic/score/mean", 0.0) >= _UNPAID:
        return
    chance = entropy / share
    what = f"answers are noise, as of an untrained model: entropy {entropy:.3g} of log(vocabulary) {chance:.3g}"
    fix = "warm it up (`etude sft`) or set model.path to a pretrained one, such as that of `etude models get smollm2`"
    yield UNTRAINED, Problem(what, f"{fix}; if it wrote sense before, {_LOWER}")


def _equal_rewards(metrics: Mapping[str, float], kept: float, learned: str) -> Problem | None:
    low, high = metrics.get("critic/score/min"), metrics.get("critic/score/max")
    if low is not None and low == high and math.isfinite(low):
        fix = WHY
        if low > 0:
            fix = f"does the reward pay whatever the answer? {TRY_REWARD.format(scorer='it')}; {WHY}"
        return Problem(f"all rewards equal ({low:.3g}): a group-relative estimator learns {learned}", fix)
    if kept == 0.0:
        what = "no trajectory was left to train on" if low is None else "all groups filtered out: nothing is learned"
        return Problem(what, WHY)
    return None


def _any_advantage(metrics: Mapping[str, float]) -> bool:
    if "distillation/reverse_kl" in metrics:  # a teacher's loss needs none
        return True
    return any(metrics.get(f"critic/advantages/{end}", 1.0) for end in ("min", "max"))


def _unmoved_weights(metrics: Mapping[str, float]) -> Found:
    for role in ("actor", "critic", "sft", "dpo"):
        change = metrics.get(name := f"{role}/weight_change", 1.0)
        if change < _STANDING and metrics.get(f"{role}/grad_norm", 0.0) > 0:
            rate = metrics.get(f"{role}/lr")
            what = f"{name}={change:.1g}: the gradient is not 0, but weights hardly move"
            what += "" if rate is None else f" at a rate of {rate:.1g}"
            yield name, Problem(what, "look at optim.lr and clip_grad, unless a warm-up begins or a decay ends here")


def count_tool_calls(metrics: Mapping[str, float]) -> dict[str, float]:
    """Maps each tool to its number of calls."""
    return {
        name.split("/")[1]: calls
        for name, calls in metrics.items()
        if name.startswith("tool/") and name.endswith("/calls") and name.count("/") == 2
    }


def _tool_problems(metrics: Mapping[str, float]) -> Found:
    for tool, calls in count_tool_calls(metrics).items():
        failed, late, broken = (
            metrics.get(f"tool/{tool}/{what}", 0.0) for what in ("errors", "timeouts", "infrastructure")
        )
        told = failed - broken  # to the model: of the others, infrastructure's, a line of their own is shown
        if calls and (told / calls >= _FAILED_SHARE or late):
            lost = f", {broken - late:,.0f} lost to infrastructure" if broken > late else ""
            timed_out = f", {late:,.0f} timed out" if late else ""
            fix = f"{MEND}, or {ALLOW}" if told else f"{MEND}, or raise its config.timeout"
            what = f"tool {tool}: {failed:,.0f} of {calls:,.0f} calls failed{lost}{timed_out}"
            yield f"tool/{tool}", Problem(what, fix)
        if (cut := metrics.get(f"tool/{tool}/cut", 0.0)) >= _CUT_SHARE * calls > 0:
            what = f"{cut:,.0f} of {calls:,.0f} answers of {tool} were cut"
            yield f"tool/{tool}/cut", Problem(what, f"raise {LENGTH}")
