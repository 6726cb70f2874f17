"""The display: harmless to training, honest on a pipe, whole on a terminal."""

import io
import logging
import math
import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.checks.step_warnings import find_problems
from etude.options import RunOptions, TrainerOptions
from etude.trainer.events import Event, Notice, RolloutProgress, RunEnded, RunStarted, StepFinished, UpdateProgress
from etude.viewer import display as module
from etude.viewer.display import Display, RolloutBar, RunConsole
from etude.viewer.progress import (
    ROWS,
    RunState,
    braille_curve,
    format_duration,
    format_lines,
    render_panel,
    resample,
    sparkline,
    split_time,
)

METRICS = {
    "reward/total/mean": 0.625,
    "reward/success/mean": 0.5,
    "rollout/tool_use_rate": 0.97,
    "response_length/mean": 143.2,
    "actor/ppo_kl": 1e-5,
    "actor/entropy": 0.5,
    "actor/grad_norm": 0.8,
    "timing_s/step": 4.0,
    "timing_s/gen": 3.0,
    "timing_s/update_actor": 0.5,
    "val-core/gsm8k/reward/mean@1": 0.71,
    "val-core/gsm8k/reward/mean@1/ci95_low": 0.6,
}


def pipe() -> RunConsole:
    return RunConsole(file=io.StringIO(), width=120, force_terminal=False)


def terminal() -> RunConsole:
    return RunConsole(file=io.StringIO(), width=100, height=50, force_terminal=True, _environ={"TERM": "xterm"})


def output(console: RunConsole) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def show(console: RunConsole, *events: Event, options: RunOptions | None = None) -> None:
    """A run of ten steps with `events`."""
    display = Display(console)
    for event in (RunStarted("demo", 10, options or RunOptions()), *events, RunEnded()):
        display(event)


def at_times(monkeypatch: pytest.MonkeyPatch, sink: Display | RolloutBar, *events: tuple[float, Event]) -> None:
    """Gives the sink each event at its time."""
    for now, event in events:
        monkeypatch.setattr(module.time, "monotonic", lambda now=now: now)
        sink(event)


def printed(monkeypatch: pytest.MonkeyPatch, *events: tuple[float, Event]) -> list[str]:
    """The lines of a pipe for a run of ten steps that begins at 0, with each event at its time."""
    console = pipe()
    at_times(monkeypatch, Display(console), (0.0, RunStarted("demo", 10, RunOptions())), *events)
    return output(console).splitlines()


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    console = pipe()
    show(
        console,
        RolloutProgress(1, 8),
        StepFinished(1, 10, METRICS),
        StepFinished(2, 10, METRICS | {"rollout/dropped": 3}),
        Notice("checkpoint\nwritten"),
    )
    first, second, problem, fix, note = output(console).splitlines()
    for part in (
        "step 1/10",
        "reward 0.625",
        "success 50 %",
        "tools 97 %",
        "length 143",
        "KL 1.0e-05",
        "0.710",
        "left",
    ):
        assert part in first
    assert "ci95" not in first
    show(console, StepFinished(1, 10, METRICS | {"reward/success/mean": 0.0}))
    assert "success 0 % (none has acc or a reward of 1)" in output(console)
    show(console, StepFinished(1, 10, METRICS | {"role/white/score/mean": 0.625, "role/black/score/mean": -0.625}))
    assert "reward 0.625 (white 0.625, black -0.625) · " in output(console)
    assert "dropped" not in first
    assert "dropped 3" in second
    assert problem == "  ! 3 trajectories dropped after failures of infrastructure or of the agent"
    assert fix.startswith("    → ")
    assert note == "checkpoint written"


def test_a_signal_while_a_line_is_written_prints_it_once() -> None:
    """A Ctrl-C that answers a step's line may arrive before the write returned; its handler prints a notice."""

    class Interrupted(io.StringIO):
        def flush(self) -> None:
            if "step 1/10" in self.getvalue() and not asked:
                asked.append(True)
                display(Notice("stopping after this step"))

    asked: list[bool] = []
    display = Display(RunConsole(file=Interrupted(), width=120, force_terminal=False))
    display(RunStarted("demo", 10, RunOptions(logger=("console",))))
    display(StepFinished(1, 10, METRICS))
    step, notice = output(display._console).splitlines()
    assert step.startswith("step 1/10")
    assert notice == "stopping after this step"


def test_rollouts_after_the_last_step_are_of_no_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = RolloutProgress(4, 8, 100), RolloutProgress(8, 8, 200)
    lines = printed(monkeypatch, (2.0, rollouts[0]), (3.0, StepFinished(10, 10, METRICS)), (9.0, rollouts[1]))
    assert [line.partition(" · ")[0] for line in lines] == ["4/8 rollouts", "step 10/10"]


def test_disabled_shows_nothing() -> None:
    events = (RolloutProgress(1, 8), StepFinished(1, 10, METRICS), Notice("x"))
    for console in (pipe(), terminal()):
        show(console, *events, options=RunOptions(logger=("jsonl",)))
        assert output(console) == ""


def test_a_terminal_gets_a_panel_with_everything() -> None:
    console = terminal()
    steps = [StepFinished(step, 10, METRICS) for step in (1, 2)]
    show(console, RolloutProgress(3, 8), *steps, Notice("checkpoint written"))
    text = output(console)
    for part in ("Étude", "demo", "2/10", "3/8", "reward", "success", "entropy", "gen 75 %", "other 12 %", "gsm8k"):
        assert part in text
    assert "checkpoint written" in text


def test_log_records_go_through_the_view_and_back_afterwards() -> None:
    console = terminal()
    root = logging.getLogger()
    before = logging.StreamHandler(sys.stderr)
    root.addHandler(before)
    try:
        display = Display(console)
        display(RunStarted("demo", 10, RunOptions()))
        assert before not in root.handlers
        logging.getLogger("etude.test").warning("[bold]tool raised[/bold]")
        display(RunEnded())
        assert before in root.handlers
    finally:
        root.removeHandler(before)
    assert "[bold]tool raised[/bold]" in output(console)


class BrokenFile(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("force_terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError("gone"), OSError("disk full")])
def test_a_broken_output_never_reaches_the_training(
    force_terminal: bool, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    console = RunConsole(file=BrokenFile(error), force_terminal=force_terminal, _environ={"TERM": "xterm"})
    show(console, *[RolloutProgress(1, 2), StepFinished(1, 10, METRICS), Notice("x")] * 3)
    assert sum("training continues" in record.message for record in caplog.records) == 1


def test_a_fault_while_drawing_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(state: RunState, width: int, height: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "render_panel", broken)
    console = terminal()
    show(console, StepFinished(1, 10, METRICS))
    assert "the view failed: ZeroDivisionError" in output(console)


anything = st.none() | st.floats() | st.integers() | st.text(max_size=3)
keys = st.sampled_from([key for row in ROWS for key in row.keys] + list(METRICS)) | st.text(max_size=5)


@given(
    st.lists(st.tuples(st.integers(-1, 50), st.dictionaries(keys, anything, max_size=8)), max_size=6),
    st.integers(1, 200),
    st.integers(-1, 50),
)
def test_whatever_the_numbers_the_view_can_be_drawn(steps: list, width: int, total: int) -> None:
    state = RunState("t", total)
    console = RunConsole(file=io.StringIO(), width=width, force_terminal=True)
    for step, metrics in steps:
        state.add(step, metrics, 1.0)
        console.print(render_panel(state, width))
        assert not any("\n" in line for line in format_lines(state))


@pytest.mark.parametrize("values", [[0.0, 1e307], [1.7e308] * 100 + [-1.7e308] * 100])
def test_numbers_near_the_largest_there_are_make_a_curve(values: list[float]) -> None:
    assert [len(row) for row in braille_curve(values, 22, 5, 0.0, 1.0)] == [22] * 5
    assert len(sparkline(values, 8)) <= 8


def test_time_left_is_the_mean_of_recent_steps() -> None:
    state = RunState("t", 10)
    assert state.eta() is None
    state.add(0, {"val-core/x/reward/mean@1": 0.1}, 100.0)
    assert state.eta() is None
    state.add(1, METRICS, 2.0)
    state.add(2, METRICS, 4.0)
    assert state.eta() == 24.0


def test_a_small_terminal_has_no_curves_and_a_resumed_run_no_first_step() -> None:
    state = RunState("t", 10, 4, resumed=True)
    for step in (5, 6):
        state.add(step, METRICS | {"reward/total/mean": 0.1 * step}, 1.0)
    console = terminal()
    console.print(render_panel(state, 80, 24))
    assert "┤" not in (shown := output(console))
    assert "at resume" in shown
    console.print(render_panel(state, 80, 50))
    assert "┤" in output(console)


def test_time_left_counts_steps_without_a_reward() -> None:
    """A supervised run that tries its model every 25 steps, which takes twenty times as long as a step."""
    state = RunState("t", 600)
    for step in range(1, 301):
        tried = step % 25 == 0
        state.add(step, {"sft/loss": 1.0} | ({"reward/total/mean": 0.1} if tried else {}), 2.0 if tried else 0.1)
    assert state.eta() == pytest.approx(300 * (2.0 + 24 * 0.1) / 25)


def test_what_is_wrong_is_said_on_the_panel_and_the_line() -> None:
    wrong = {
        "actor/skipped_steps": 1.0,
        "rollout/dropped": 2.0,
        "rollout/malformed_calls": 7.0,
        "critic/score/min": 0.0,
        "critic/score/max": 0.0,
        "rollout/stop_reason/response_length": 0.4,
        "tool/search/calls": 40.0,
        "tool/search/errors": 10.0,
        "tool/search/timeouts": 3.0,
        "tool/search/latency_p95": 2.5,
    }
    sentences = {
        "actor update skipped: its gradient is not finite",
        "2 trajectories dropped after failures of infrastructure or of the agent",
        "7 malformed calls",
        "all rewards equal (0): a group-relative estimator learns nothing",
        "40 % of trajectories cut at data.max_response_length",
        "tool search: 10 of 40 calls failed, 3 timed out",
    }
    assert {problem.what for problem in find_problems(METRICS | wrong).values()} == sentences
    assert find_problems(METRICS) == {}
    state = RunState("t", 10, validated="sampled")
    state.add(1, METRICS | wrong, 1.0, {"tool/search": (", 7 with: no index", "mend the tool")})
    line, *lines = format_lines(state)
    assert all(any(f"  ! {sentence}" in each for each in lines) for sentence in sentences)
    assert [each.partition("→")[1] for each in lines] == ["", "→"] * len(sentences)
    at = lines.index("  ! tool search: 10 of 40 calls failed, 3 timed out, 7 with: no index")
    assert lines[at + 1] == "    → mend the tool"
    assert "!" not in line
    assert len(line) <= 160
    assert "val-core/gsm8k/reward/mean@1 0.710 (sampled)" in line
    state.metrics["val-core/gsm8k/reward/missing"] = 12
    assert "val-core/gsm8k/reward/mean@1 0.710 (sampled, 12 dropped)" in " ".join(format_lines(state))
    console = terminal()
    state.metrics |= {"rollout/malformed_calls": 0.0, "rollout/dropped": 0.0}
    console.print(render_panel(state, 60))
    shown = " ".join(output(console).replace("│", " ").split())
    assert "tool search: 10 of 40 calls failed, 3 timed out, 7 with: no index" in shown  # whole, on several lines
    console.print(render_panel(state, 110))
    shown = output(console)
    assert "! actor update skipped" in shown
    assert "→ lower optim.lr" in shown
    assert "search 40 calls, 10 failed, 95 % within 2.500 s" in shown
    assert "validation, sampled" in shown


def test_only_noise_that_earns_nothing_is_of_an_untrained_model() -> None:
    noise = {"actor/entropy": 5.84, "actor/entropy_share": 0.997, "critic/score/mean": 0.06}  # now and then by chance
    [problem] = find_problems(noise).values()
    assert problem.what.endswith("untrained model: entropy 5.84 of log(vocabulary) 5.86")
    for other in ({"critic/score/mean": 0.4}, {"actor/entropy_share": 0.8}):
        assert find_problems(noise | other) == {}


def test_rewards_that_differ_without_an_advantage_are_told():
    still = {"critic/score/min": -1.0, "critic/score/max": 1.0, "rollout/equal_groups_share": 0.25}
    still |= {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    assert list(find_problems(still)) == ["no advantage"]
    for other in ({"critic/advantages/max": 0.1}, {"rollout/equal_groups_share": 1.0}):
        assert "no advantage" not in find_problems(still | other)


def test_a_problem_that_stays_is_said_again_after_ten_steps() -> None:
    console = pipe()
    failing = METRICS | {"rollout/malformed_calls": 7.0}
    show(console, *(StepFinished(step, 30, failing) for step in range(1, 22)))
    lines = output(console).splitlines()
    assert [number for number, line in enumerate(lines) if line == "  ! 7 malformed calls"] == [1, 13, 25]
    assert sum("→" in line for line in lines) == 3
    assert max(map(len, lines)) <= 160


def test_every_validation_that_lost_answers_is_said() -> None:
    console = pipe()
    lossy = METRICS | {"val/rollout/dropped": 36.0}
    show(console, *(StepFinished(step, 30, METRICS if step % 5 else lossy) for step in range(1, 21)))
    assert output(console).count("  ! 36 answers of the validation dropped") == 4


def test_prompts_left_out_for_want_of_a_greedy_answer_are_said() -> None:
    [problem] = find_problems(METRICS | {"baseline/rollout/dropped": 2.0}).values()
    assert problem.what == "2 greedy answers dropped: their prompts are left out"


def test_a_problem_that_grows_is_said_again_at_once() -> None:
    console = pipe()
    counts = (1.0, 3.0, 1_100.0, 1_200.0)
    show(
        console, *(StepFinished(n, 30, METRICS | {"rollout/malformed_calls": each}) for n, each in enumerate(counts, 1))
    )
    told = [line.removeprefix("  ! ") for line in output(console).splitlines() if "malformed" in line]
    assert told == ["1 malformed call", "1,100 malformed calls"]


def test_validations_that_do_not_fit_have_a_line_of_their_own() -> None:
    state = RunState("t", 10)
    state.add(1, METRICS | {f"val-core/set-{number}/reward/mean@1": 0.5 for number in range(4)}, 1.0)
    line, validations = format_lines(state)
    assert len(line) <= 160
    assert validations.count("val-core/") == 5


def test_the_kl_to_the_reference_is_not_that_of_a_step() -> None:
    state = RunState("x", 9)
    state.add(3, {"actor/ppo_kl": 0.002, "actor/kl_loss": 0.71}, 1.0)
    assert "KL 0.0020 · KL to ref 0.7100" in format_lines(state)[0]


def test_a_validation_stays_until_the_next() -> None:
    state = RunState("t", 10)
    state.add(1, METRICS, 1.0)
    state.add(2, {"reward/total/mean": 1.0}, 1.0)
    assert state.validation == {"val-core/gsm8k/reward/mean@1": 0.71}


def test_time_split_adds_up_to_the_step() -> None:
    assert split_time(METRICS) == [("gen", 0.75), ("update_actor", 0.125), ("other", 0.125)]
    assert split_time({}) == []
    overlapping = split_time({"timing_s/step": 1.0, "timing_s/gen": 2.0, "timing_s/ref": 2.0})
    assert overlapping == [("gen", 0.5), ("ref", 0.5)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(values, st.integers(1, 50))
def test_resampling_keeps_mean_and_bounds(numbers: list[float], count: int) -> None:
    shown = resample(numbers, count)
    assert len(shown) == min(len(numbers), count)
    assert min(numbers) - 1e-6 <= min(shown)
    assert max(shown) <= max(numbers) + 1e-6
    if len(numbers) % len(shown) == 0:
        assert math.isclose(sum(shown) / len(shown), sum(numbers) / len(numbers), abs_tol=1e-3)


@given(values, st.integers(1, 30), st.integers(1, 6))
def test_curves_have_the_asked_size_and_every_column_a_dot(numbers: list[float], width: int, rows: int) -> None:
    drawn = braille_curve(numbers, width, rows, min(numbers), max(numbers))
    assert [len(row) for row in drawn] == [width] * rows
    assert all(0x2800 <= ord(cell) <= 0x28FF for row in drawn for cell in row)
    for column in zip(*drawn):
        bits = [ord(cell) - 0x2800 for cell in column]
        assert any(bit & 0x47 for bit in bits)
        assert any(bit & 0xB8 for bit in bits)
    assert len(sparkline(numbers, width)) == min(width, len(numbers))


def test_curves_by_eye() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2, 2, 2], 8) == "▄▄▄"
    assert sparkline([], 8) == ""
    assert braille_curve([0, 1, 2, 3], 2, 1, 0, 3) == ["⡠⠊"]
    assert braille_curve([], 2, 1, 0, 1) == ["⠀⠀"]


def test_rollouts_are_a_line_now_and_then_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first after a second, also before one has ended; the next batch begins anew."""
    console = pipe()
    bar = RolloutBar(console)
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    bar(RunStarted("evaluating", 0, RunOptions()))
    events = [(0.5, 0, 20), (1.0, 0, 40), (3.0, 1, 90), (6.0, 3, 240), (11.5, 8, 460), (13.0, 1, 500), (15.0, 2, 560)]
    at_times(monkeypatch, bar, *((now, RolloutProgress(done, 8, tokens)) for now, done, tokens in events))
    bar(RunEnded())
    assert output(console).splitlines() == [
        "evaluating: 0/8 rollouts · 40 tokens/s",
        "evaluating: 3/8 rollouts · 40 tokens/s · 10.0 s left",
        "evaluating: 8/8 rollouts · 40 tokens/s · 0.0 s left",
        "evaluating: 2/8 rollouts · 50 tokens/s · 6.0 s left",
    ]


@pytest.mark.parametrize("console", [pipe(), terminal()], ids=["pipe", "terminal"])
def test_an_evaluation_says_what_it_loads(console: RunConsole) -> None:
    bar = RolloutBar(console)
    for event in (RunStarted("evaluating", 0, RunOptions()), Notice("loading [/m]"), RolloutProgress(1, 8), RunEnded()):
        bar(event)
        if isinstance(event, Notice) and bar._live is not None:
            bar._live.refresh()
    assert "loading [/m]" in output(console)


def test_a_resumed_runs_panel_begins_where_it_goes_on() -> None:
    console = terminal()
    display = Display(console)
    display(RunStarted("demo", 8, RunOptions(), step=4))
    display(RunEnded())
    assert "4/8" in output(console)


def test_a_step_shows_its_rollouts_where_stdout_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, (2.0, RolloutProgress(0, 64, 100)), (7.0, RolloutProgress(32, 64, 700))) == [
        "0/64 rollouts · 50 tokens/s",
        "32/64 rollouts · 100 tokens/s · 7.0 s left",
    ]


def test_a_long_update_is_told_where_stdout_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [(40.0, 3), (41.0, 0), (46.0, 1), (56.0, 3), (66.0, 5), (91.0, 8)]
    assert printed(monkeypatch, *((now, UpdateProgress(done, 8)) for now, done in times)) == [
        "step 1: update: 3/8 micro-batches · 25.0 s left",
        "step 1: update: 8/8 micro-batches · 0.0 s left",
    ]


@pytest.mark.parametrize("error", [OSError("no room for a page"), ZeroDivisionError()])
def test_a_report_that_cannot_be_written_is_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("etude.viewer.page.write_report", broken)
    console = pipe()
    show(console, options=TrainerOptions(default_local_dir=str(tmp_path)))
    assert output(console).startswith("no report: ")


def test_a_run_that_ends_while_nothing_is_shown_has_its_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    show(terminal(), options=TrainerOptions(default_local_dir=str(tmp_path), logger=("jsonl",)))
    assert (tmp_path / "report.html").is_file()


def test_the_end_of_a_run_says_how_to_read_its_conversations(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    console = pipe()
    show(console, options=TrainerOptions(default_local_dir=str(tmp_path), rollout_data_dir=str(tmp_path / "rollouts")))
    assert output(console) == f"report: {tmp_path}/report.html; its conversations: `etude view {tmp_path}`\n"
    (run := tmp_path / "my run").mkdir()
    (run / "config.yaml").write_text("a: 1")
    show(console, options=TrainerOptions(default_local_dir=str(run), rollout_data_dir=str(run / "rollouts")))
    assert output(console).endswith(f"`etude view '{run}'`\n")  # as a shell takes it


def test_events_cross_processes() -> None:
    events = [RunStarted("demo", 10, TrainerOptions()), RolloutProgress(1, 2), StepFinished(1, 10, METRICS)]
    for event in [*events, Notice("x"), RunEnded()]:
        assert pickle.loads(pickle.dumps(event)) == event
