"""The report: one page that asks for nothing, inert, bounded, honest about what is missing."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from etude.checks.step_warnings import find_problems
from etude.cli.report import report
from etude.dumps import rollout_record, write_rollouts
from etude.errors import DataError, EtudeError
from etude.run_folder import run_lock, run_record
from etude.trainer.tracking import Tracking
from etude.trajectory import Provenance, Rewards, StopReason, ToolCallRecord, Trajectory
from etude.viewer import answers
from etude.viewer.before_after import choose_trajectories
from etude.viewer.conversations import MAX_BLOCKS, MAX_TEXT, parse_conversation
from etude.viewer.curves import MAX_POINTS, draw_charts, series
from etude.viewer.page import REPORT_TRAJECTORIES, write_report
from etude.viewer.progress import split_time
from etude.viewer.runs import RunView
from tests.viewer.index_stage import opened, write_run

MARKUP = "</pre></script><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>"
EVIL = f"{MARKUP}\x1b[31m\u202e&amp;{{{{ 7*7 }}}}$x$"


def record(step: int, prompt: str, answer: str, score: float = 1.0, tool: str = "72") -> dict:
    trajectory = Trajectory("r", [1])
    texts = ["call", "<tool>", tool, answer]
    kinds = [Provenance.SAMPLED, Provenance.TEMPLATE, Provenance.TOOL, Provenance.SAMPLED]
    for kind, text in zip(kinds, texts):
        trajectory.append([ord(c) for c in text[:100]], kind)
        trajectory.assistant_turns += kind is Provenance.SAMPLED
    trajectory.rewards = Rewards([(0, "calculator", 0.25)], {"calculator": 0.5}, score)
    row = {"reward_model": {"ground_truth": "72"}}
    return rollout_record(trajectory, row, step=step, input=prompt, output="".join(texts), score=score, texts=texts)


def make_run(folder: Path) -> Path:
    tracking = Tracking(["jsonl"], folder, "e")
    for step in range(1, 50):
        share = step / 50
        metrics = {
            "reward/total/mean": share * 1.5,
            "reward/score/mean": share,
            "reward/step/mean": 0.0,
            "reward/success/mean": share,
            "rollout/tool_use_rate": share,
            "response_length/mean": 100.0,
            "response_length/min": 90.0,
            "response_length/max": 110.0,
            "actor/ppo_kl": float("nan") if step == 3 else 0.001,
            "actor/entropy": 1 - share,
            "actor/grad_norm": 0.5,
            "timing_s/step": 4.0,
            "timing_s/gen": 3.0,
            "perf/time_per_step": 4.0,
            "perf/total_num_tokens": 1000,
        }
        if step % 24 == 1:
            name = "val-core/$<b>gsm8k/reward/mean@1"
            metrics |= {name: share, f"{name}/ci95_low": share / 2, f"{name}/ci95_high": 1.0}
        tracking.log(metrics, step)
    tracking.close()
    for step, answer in ((0, "no idea"), (49, EVIL)):
        write_rollouts(folder / "validation", step, [record(step, f"prompt {i}", answer, tool=EVIL) for i in range(5)])
    (folder / "config.yaml").write_text("trainer:\n  experiment_name: <b>quickstart</b>\n")
    summary = {
        "before": {"success": {"value": 0.1, "low": 0.05, "high": 0.2}, "reward": 0.1},
        "after": {"success": 0.9},
    }
    (folder / "summary.json").write_text(json.dumps(summary | {"model": "tiny", "training_minutes": 5.25}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "quickstart")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("report") / "quickstart")
    return write_report(run, title=f"My run {EVIL}").read_text(encoding="utf-8")


def embedded(html: str) -> dict:
    """What the page's script draws, by address."""
    [data] = re.findall(r'<script type="application/json" id="data"[^>]*>(.*?)</script>', html, re.S)
    return json.loads(data)


def pages(run: Path, **given) -> dict:
    return embedded(write_report(run, **given).read_text(encoding="utf-8"))


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_the_list_counts_what_the_page_holds(tmp_path):
    for step in range(1, 7):
        write_rollouts(tmp_path / "rollouts", step, [record(step, f"question {n}", "72") for n in range(32)])
    found = embedded(write_report(tmp_path).read_text())["trajectories"]  # of the 192; 64 of them were read
    assert found["all"] == found["total"] == len(found["rows"]) <= 40
    assert found["part"]


def test_a_caption_names_the_line_that_it_is_of():
    records = [{"step": n, "rollout/truncated_share": 1.0, "rollout/equal_groups_share": 0.0} for n in range(1, 5)]
    [chart] = draw_charts(records)
    assert (chart["title"], len(chart["lines"])) == ("Nothing to learn from", 1)  # and so there is no legend
    assert chart["summary"] == "cut for length: First 2 steps: 100 %; last 2: 100 %."


def test_the_page_asks_for_nothing_and_runs_one_script(html: str) -> None:
    page = Page()
    page.feed(html)
    assert page.tags.count("script") == 3  # two of data, and the page's own, which the policy names by its hash
    assert not {"img", "iframe", "object", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "style")
        assert name != "href" or value.startswith(("#", "data:"))
    assert "default-src 'none'; script-src 'sha256-" in html
    assert "unsafe" not in html.split("<style>")[0]
    assert "@import" not in html


def test_what_a_model_wrote_cannot_leave_its_script(html: str) -> None:
    markup = re.sub(r"<script[^>]*>.*?</script>", "", html, flags=re.S)
    assert "alert(1)" not in markup
    assert "<img" not in html
    assert "\x1b" not in html
    texts = [block["text"] for block in embedded(html)[TRAJECTORY]["sequences"][-1]["blocks"]]
    assert any(text.startswith("</pre></script><script>alert(1)") for text in texts)
    assert not any("\x1b" in text or "\u202e" in text for text in texts)


TRAJECTORY = "trajectory?place=validation%2F49.jsonl%3A1"


def test_headlines_facts_and_every_chart_are_there(html: str) -> None:
    data = embedded(html)
    assert data["overview"]["title"] == f"My run {EVIL}"
    assert data["results"]["headlines"] == [
        {"name": "success", "before": {"value": 0.1, "low": 0.05, "high": 0.2}, "after": {"value": 0.9}},
        {"name": "reward", "before": {"value": 0.1}, "after": None},
    ]
    assert data["results"]["facts"] == {"model": "tiny", "training minutes": "5.25"}
    assert "49,000 tokens" in data["overview"]["facts"]["totals"]
    assert "<b>quickstart</b>" in data["results"]["config"]
    titles = [chart["title"] for chart in data["curves"]["charts"]]
    for title in ("Reward", "Success", "Tool use", "Response length", "KL divergence", "Entropy", "Gradient norm"):
        assert title in titles
    assert "other 25 %" in data["curves"]["time"]["summary"]
    assert "First 5 steps: 6 %; last 5: 94 %." in data["curves"]["charts"][titles.index("Success")]["summary"]


def test_success_is_no_mean_reward() -> None:
    """A reward of 1.5 for a right answer and -1 for a wrong one is no share of those that were solved."""
    core, step = "val-core/sums/reward/mean@1", {"step": 1, "reward/total/mean": 0.25, "reward/success/mean": 0.5}
    reward, success = draw_charts([{**step, core: 0.5, "val/reward/success/mean": 0.6}])
    assert [(line["label"], line["values"]) for line in reward["lines"]] == [
        ("total", [0.25]),
        ("validation: sums", [0.5]),
    ]
    assert [(line["label"], line["values"]) for line in success["lines"]] == [
        ("training", [0.5]),
        ("validation", [0.6]),
    ]
    assert "low" not in success["lines"][1]
    assert "95 %" not in success["note"]
    bounds = {f"{core}/ci95_low": 0.3, f"{core}/ci95_high": 0.8}
    _, success = draw_charts([{**step, core: 0.6, **bounds, "val/reward/success/mean": 0.6}])
    assert (success["lines"][1]["low"], success["lines"][1]["high"]) == ([0.3], [0.8])
    assert success["note"].endswith("Bars are 95 % intervals.")


def test_without_a_summary_the_validations_are_the_headline(run: Path) -> None:
    (run / "summary.json").unlink()
    [headline] = pages(run)["results"]["headlines"]
    assert headline["name"] == "validation: $<b>gsm8k"
    assert headline["after"] == {"value": 0.98, "low": 0.49, "high": 1.0}


@pytest.mark.parametrize("kept", ["metrics.jsonl", "validation", "config.yaml", "summary.json"])
def test_each_missing_part_is_left_out(run: Path, kept: str) -> None:
    for path in list(run.iterdir()):
        if path.name != kept:
            path.rename(run.parent / path.name)
    data = pages(run)
    there = {
        "metrics.jsonl": bool(data["curves"]["charts"]),
        "validation": data["results"]["samples"] is not None,
        "config.yaml": bool(data["results"]["config"]),
        "summary.json": bool(data["results"]["facts"]),
    }
    assert there == {name: name == kept for name in there}


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run folder not found"):
        write_report(tmp_path / "none")
    with pytest.raises(DataError, match="is it a run's folder"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"before": [1]}', "'before' must map"),
        ('{"after": {"success": "high"}}', "after.success must be a number"),
        ('{"after": {"success": {"low": 0}}}', "after.success must be a number"),
    ],
)
def test_a_broken_summary_is_named(run: Path, text: str, reason: str) -> None:
    (run / "summary.json").write_text(text)
    with pytest.raises(DataError, match=rf"summary\.json.*{reason}"):
        write_report(run)


def test_a_broken_dump_is_named_and_does_not_block_the_report(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "rew')
    assert write_report(run).is_file()
    dump = run / "validation" / "0.jsonl"
    dump.write_text("{\n" + dump.read_text() + "[]\n")
    said = pages(run)["overview"]["facts"]["lines that are no trajectories"]
    assert said.startswith("2; validation/0.jsonl:1: not JSON")
    dump.write_bytes(b"\xff\x00")
    assert write_report(run).is_file()


def test_dump_folders_may_be_elsewhere(run: Path, tmp_path: Path) -> None:
    (run / "validation").rename(tmp_path / "elsewhere")
    assert pages(run)["results"]["samples"] is None
    assert pages(run, rollouts=tmp_path / "elsewhere")["results"]["samples"] is not None


def test_the_same_files_make_the_same_page(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_report_of_many_rollouts_is_bounded_and_has_those_it_names(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        records = [record(step, f"prompt {n}", "a", score=float(step == 3 and n == 199)) for n in range(200)]
        write_rollouts(tmp_path / "rollouts", step, records)
    data = pages(tmp_path)
    held = [address for address in data if address.startswith("trajectory?")]
    assert 20 < len(held) <= REPORT_TRAJECTORIES
    assert data["results"]["change"] == ["rollouts/1.jsonl:200", "rollouts/3.jsonl:200"]
    for place in data["results"]["change"]:
        assert f"trajectory?place={place.replace('/', '%2F').replace(':', '%3A')}" in held
    assert not any("2.jsonl" in address for address in held)


def chosen(folder: Path) -> dict:
    return choose_trajectories(opened(folder).rows)


def test_a_prompt_is_shown_beside_itself(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 0, [record(0, "a", "1"), record(0, "b", "2", score=0.0), record(0, "gone", "3")])
    write_rollouts(tmp_path, 9, [record(9, "b", "first b"), record(9, "b", "second b"), record(9, "a", "a")])
    assert chosen(tmp_path) == {
        "change": ("0.jsonl:2", "9.jsonl:1"),
        "samples": {
            "pairs": [["0.jsonl:1", "9.jsonl:3"], ["0.jsonl:2", "9.jsonl:1"], ["0.jsonl:3", None]],
            "files": ["0.jsonl", "9.jsonl"],
        },
        "failures": [],
    }


def test_prompts_that_never_return_are_shown_in_file_order(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [record(1, "a", "1"), record(1, "b", "2")])
    write_rollouts(tmp_path, 2, [record(2, "c", "3", score=0.0)])
    found = chosen(tmp_path)
    assert found["samples"]["pairs"] == [["1.jsonl:1", "2.jsonl:1"], ["1.jsonl:2", None]]
    assert (found["change"], found["failures"]) == (None, ["2.jsonl:1"])
    assert choose_trajectories([]) == {"change": None, "samples": None, "failures": []}


def test_samples_are_of_three_prompts_however_many_answers_each_has(tmp_path: Path) -> None:
    prompts = ["a", "a", "b", "a", "b", "c", "d"]
    for step in (1, 2):
        write_rollouts(tmp_path, step, [record(step, each, "1") for each in prompts])
    assert [then for then, _ in chosen(tmp_path)["samples"]["pairs"]] == ["1.jsonl:1", "1.jsonl:3", "1.jsonl:6"]


def test_a_single_dump_has_samples_but_no_after(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts", 1, [record(1, "a", "1")])
    assert chosen(tmp_path)["samples"] == {"pairs": [["rollouts/1.jsonl:1", None]], "files": ["rollouts/1.jsonl"]}


def test_blocks_follow_provenance_and_rewards_their_turn() -> None:
    shown = parse_conversation(record(3, "question", "answer"))
    assert [(block.kind, block.text) for block in shown.blocks] == [
        ("prompt", "question"),
        ("sampled", "call"),
        ("template", "<tool>"),
        ("tool", "72"),
        ("reward", "+0.25"),
        ("sampled", "answer"),
    ]
    assert dict(shown.facts)["reward of calculator, at the end"] == "0.5"
    assert dict(shown.facts)["expected"] == "72"


def test_a_record_without_segment_texts_shows_its_response_as_one_block() -> None:
    blocks = parse_conversation({"input": "q", "output": "a", "messages": []}).blocks
    assert [(block.kind, block.text) for block in blocks] == [("prompt", "q"), ("template", "a")]


def test_text_and_blocks_are_bounded() -> None:
    long = parse_conversation({"input": "x" * (MAX_TEXT + 5), "output": ""})
    assert (len(long.blocks[0].text), long.blocks[0].omitted) == (MAX_TEXT, 5)
    many = [{"text": str(n), "provenance": "tool", "turn": 0} for n in range(1000)]
    assert len(parse_conversation({"segments": many}).blocks) <= MAX_BLOCKS + 1


@pytest.mark.parametrize("junk", [{}, {"segments": 3}, {"rewards": {"steps": 4, "final": 5}}, {"response_mask": "x"}])
def test_an_odd_record_is_still_shown(junk: dict) -> None:
    assert parse_conversation(junk).blocks


def test_a_long_run_makes_a_short_line() -> None:
    records = [{"step": step, "reward/total/mean": float(step % 7)} for step in range(20_000)]
    [chart] = draw_charts(records)
    assert len(chart["lines"][0]["steps"]) <= MAX_POINTS
    assert chart["lines"][0]["steps"][-1] == 19_999


def titles(records: list[dict]) -> list[str]:
    return [chart["title"] for chart in draw_charts(records)]


def test_one_step_makes_charts_and_no_numbers_make_none() -> None:
    assert titles([{"step": 1, "reward/total/mean": 0.0}]) == ["Reward"]
    assert titles([{"step": 1, "reward/total/mean": None, "timing_s/step": "x"}]) == []
    assert titles([{"step": 1, "reward/total/mean": 10**400}]) == []  # JSON holds it, a float does not
    sequences = [{"step": step, "rollout/sequences/mean": 1.0} for step in (1, 2)]
    assert titles(sequences) == []  # as in every run whose agents keep their history
    sequences[1]["rollout/sequences/mean"] = 1.5
    assert titles(sequences) == ["Sequences"]
    assert series([{"step": 1, "a": True}, {"step": 2, "a": 3}, {"step": 3, "a": float("inf")}], "a") == ([2], [3.0])


def test_the_command_writes_and_prints_the_path(run: Path) -> None:
    result = CliRunner().invoke(report, [str(run), "--title", "T"])
    assert result.exit_code == 0
    assert result.output.strip() == str(run / "report.html")
    failed = CliRunner().invoke(report, [str(run / "none")])
    assert isinstance(failed.exception, EtudeError)
    assert "\n" not in str(failed.exception)


LOOK = """
import importlib, pkgutil, sys
from pathlib import Path
import etude.viewer

run = Path(sys.argv[1])
for module in pkgutil.iter_modules(etude.viewer.__path__):
    importlib.import_module(f"etude.viewer.{module.name}")
etude.viewer.page.write_report(run)
record = etude.viewer.explain.read_row(run / "validation" / "0.jsonl", 0)
assert len(etude.viewer.explain.check_sequence(record)) == 5
assert list(etude.viewer.explain.list_tokens(record))
heavy = {"torch", "ray", "transformers", "matplotlib"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("etude.trainer.")} - {"etude.trainer.events"}
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""


def test_looking_at_a_run_needs_neither_torch_nor_a_trainer(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(run)], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_aborted_run_says_so_and_what_was_wrong(tmp_path):
    run = make_run(tmp_path / "run")
    with run_record(run):
        assert "killed" in pages(run)["overview"]["why"]
    with pytest.raises(OSError, match="full"), run_record(run):
        raise OSError(f"the disk is full {EVIL}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 50, "critic/score/min": 0.0, "critic/score/max": 0.0}) + "\n")
    cut = record(98, "p", "a", score=0.0) | {"stop_reason": "response_length"}
    write_rollouts(run / "validation", 98, [record(98, "q", "fine"), cut])
    data = pages(run)
    assert data["overview"]["status"] == "failed"
    assert data["overview"]["why"].startswith("the disk is full")
    assert "in 1 of 50 steps, last in step 50: all rewards equal (0)" in "".join(data["overview"]["problems"])
    assert data["results"]["failures"] == ["validation/98.jsonl:2"]
    assert f"python {sys.version.split()[0]}" in data["overview"]["facts"]["versions"]
    with run_record(run):
        pass
    assert (pages(run)["overview"]["status"], pages(run)["overview"]["why"]) == ("ended", "")


def rollouts(folder: Path) -> None:
    """Two prompts: one whose rewards are equal and one whose differ; one answer not found, one cut, one tried twice."""
    records = []
    for number, (uid, score, pred) in enumerate([("a", 0.0, "5"), ("a", 0.0, None), ("b", 0.0, "7"), ("b", 1.0, "8")]):
        made = Trajectory(f"r{number}", [1], rewards=Rewards(score=score, score_info={"pred": pred}))
        made.append([65], Provenance.SAMPLED)
        made.stop_reason = StopReason.RESPONSE_LENGTH if number == 2 else StopReason.COMPLETED
        row = {"uid": uid, "attempt": int(number == 3)}
        records.append(rollout_record(made, row, step=7, input="q", output="A", score=score))
    write_rollouts(folder / "rollouts", 7, records)
    Tracking(["jsonl"], folder, "e").log({"rollout/infrastructure_failure_share": 0.25}, 7)


def test_why_says_first_whether_the_reward_rose(tmp_path):
    records = [{"step": n, "reward/total/mean": n / 8} for n in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    [first, second, third] = CliRunner().invoke(report, [str(tmp_path), "--why"]).output.splitlines()
    assert first == "The reward rose: 0.312 in the first 4 steps, 0.812 in the last 4."
    assert second.startswith("step 8: ")
    assert third.startswith("→ set trainer.rollout_data_dir")  # there are no rollouts to look at


def test_the_time_of_validations_is_beside_that_of_steps(tmp_path):
    """That of the first one too, and it takes nothing from what a step spends otherwise."""
    lines = [{"step": 0, "timing_s/testing": 4.0}, {"step": 1, "timing_s/step": 8.0, "timing_s/gen": 4.0}]
    lines.append({"step": 2, "timing_s/step": 8.0, "timing_s/gen": 4.0, "timing_s/testing": 4.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    time = answers.curves(RunView("", tmp_path))["time"]
    assert time["summary"] == "Over the whole run: gen 33 %, testing 33 %, other 33 %."
    assert time["parts"] == {"gen": [4.0, 4.0], "testing": [0.0, 4.0], "other": [4.0, 4.0]}
    shares = {name: round(share, 3) for name, share in split_time(lines[2])}
    assert shares == {"gen": 0.333, "testing": 0.333, "other": 0.333}


def test_what_was_measured_otherwise_is_not_compared(tmp_path):
    """After other rows were validated and trained on: no fall, no rise and no price of one."""
    reward, success = "val-core/a/reward/mean@1", "val/reward/success/mean"
    values = [0.0, 0.1, 0.1, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    lines = [
        {"step": n, reward: v, success: v, "reward/total/mean": v, "perf/cpu_seconds": 1.0}
        for n, v in enumerate(values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    run = RunView("", tmp_path)
    [whole] = answers.results(run)["headlines"]
    assert (whole["before"]["value"], whole["after"]["value"]) == (0.0, 0.4)
    assert "per point of success" in answers.overview(run)["facts"]
    (tmp_path / "run.json").write_text('{"ended": null, "changed_at": 3, "validation_changed_at": 3}')
    found = answers.results(run)
    [since] = found["headlines"]
    assert (since["before"]["value"], since["after"]["value"]) == (0.9, 0.4)
    assert found["facts"] == {"compared since": "step 3, when what is validated changed"}
    assert "per point of success" not in answers.overview(run)["facts"]
    assert (
        answers.why(run)["verdict"]["trend"] == "The reward did not rise: 0.8 in the first 3 steps, 0.5 in the last 3."
    )
    assert answers.why(run, 2)["verdict"]["trend"] == ""  # as of then


def test_an_answer_that_another_reward_pays_more_for_is_no_change_of_the_model(tmp_path):
    for step, score in ((0, 0.5), (2, 0.5), (4, 1.0), (6, 1.0)):
        write_rollouts(tmp_path / "validation", step, [record(step, "p", "the same", score=score)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    (tmp_path / "run.json").write_text("{}")
    assert answers.results(RunView("", tmp_path))["change"] == ("validation/0.jsonl:1", "validation/6.jsonl:1")
    (tmp_path / "run.json").write_text('{"ended": null, "changed_at": 2, "validation_changed_at": 2}')
    found = answers.results(RunView("", tmp_path))
    assert found["change"] is None
    assert found["samples"]["pairs"] == [["validation/4.jsonl:1", "validation/6.jsonl:1"]]


def test_a_reward_that_scatters_did_not_rise(tmp_path):
    lines = [{"step": n, "reward/total/mean": r} for n, r in enumerate((0.0, 0.0, 0.0, 0.0, 0.0, 0.055), 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    printed = CliRunner().invoke(report, [str(tmp_path), "--why"]).output
    assert "The reward did not rise clearly: 0 in the first 3 steps, 0.0183 in the last 3." in printed


def test_why_names_answers_that_became_noise(tmp_path):
    rollouts(tmp_path)
    steps = {1: (0.2, 0.07), 2: (0.41, 0.25), 3: (0.4, 0.5), 7: (0.0, 1.03)}
    lines = [{"step": n, "reward/total/mean": r, "actor/entropy": e} for n, (r, e) in steps.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    verdict = answers.why(RunView("", tmp_path))["verdict"]
    noise = (
        "the reward fell from 0.41 in step 2 to 0, and the entropy rose from 0.25 to 1.03 nats: answers became noise"
    )
    assert verdict["text"] == noise
    assert "lower actor_rollout_ref.actor.entropy_coeff" in verdict["fix"]


def test_why_names_answers_that_became_noise_and_then_alike(tmp_path):
    """One update a step, whose KL is 0 by definition: what is left at the end are answers that repeat themselves."""
    rollouts(tmp_path)
    rewards, entropies = (0.9, 0.0, 0.1, 0.0, 0.0), (0.03, 0.3, 0.63, 0.3, 0.16)
    lines = [
        {"step": n, "reward/total/mean": r, "actor/entropy": e, "actor/ppo_kl": 0.0}
        for n, (r, e) in enumerate(zip(rewards, entropies, strict=True), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    verdict = answers.why(RunView("", tmp_path))["verdict"]
    assert verdict["text"] == (
        "the reward fell from 0.9 in step 1 to 0, and the entropy rose from 0.03 to 0.63 nats: answers became noise"
    )
    low = [each | {"actor/entropy": each["actor/entropy"] / 2} for each in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in low))
    assert "from 0.015 to 0.315 nats" in answers.why(RunView("", tmp_path))["verdict"]["text"]
    lines[-1]["reward/total/mean"] = 0.5  # it came back
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert "noise" not in answers.why(RunView("", tmp_path))["verdict"]["text"]


def test_why_is_asked_about_one_step_as_of_then(tmp_path):
    write_run(tmp_path, steps=3)
    lines = [{"step": n, "reward/total/mean": n / 8} for n in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    printed = CliRunner().invoke(report, [str(tmp_path), "--why", "--step", "2"])
    assert printed.output.startswith("step 2: ")
    assert "The reward rose" not in printed.output  # that of the whole run, which nobody knew then
    assert f"read one: etude explain {tmp_path}/rollouts/2.jsonl --row 1" in printed.output
    assert "step 7 has no dump of rollouts; these have: 1, 2, 3" in str(
        CliRunner().invoke(report, [str(tmp_path), "--why", "--step", "7"]).exception
    )
    assert "--why" in str(CliRunner().invoke(report, [str(tmp_path), "--step", "2"]).exception)


def wrong_step(
    folder: Path,
    *,
    scores=(0.0,),
    call=None,
    flags=(),
    metrics=(),
    has_tools=False,
    says="A",
    called=4,
    size=8,
    stop=None,
    alike=0,
    tools_pay=0.0,
) -> str:
    """The first two lines of Why for a step of `size` rollouts, the first `called` of which made the `call`, and the last
    `alike` groups of which say the same throughout; `tools_pay` the first `called`."""
    records = []
    for number in range(size):
        made = Trajectory(f"r{number}", [1], rewards=Rewards(score=scores[number % len(scores)]))
        made.append([65, number], Provenance.SAMPLED)
        made.assistant_turns = 1
        made.tool_calls = [call] if call and number < called else []
        made.metrics = dict.fromkeys(flags, 1.0) if number < called else {}
        made.stop_reason = stop if stop and number < called else made.stop_reason
        row, text = {"uid": f"u{number // 4}"}, f"A{number // 4 * 4 if number >= size - 4 * alike else number}"
        score = made.rewards.score + tools_pay * (number < called)
        records.append(rollout_record(made, row, step=1, input="q", output=says, score=score, texts=[text]))
    write_rollouts(folder / "rollouts", 1, records)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict(metrics)}) + "\n")
    config = {"rollout": {"multi_turn": {"tool_config_path": "tools.yaml" if has_tools else None}}}
    (folder / "config.yaml").write_text(
        json.dumps({"custom_reward_function": {"path": "my/pay.py"}, "actor_rollout_ref": config})
    )
    return " ".join(CliRunner().invoke(report, [str(folder), "--why"]).output.splitlines()[:2])


def test_why_opens_with_the_cause_and_what_to_do(tmp_path):
    raised = ToolCallRecord(0, "shop", "{}", "KeyError: 'fig'", error="exception")
    unread = {"call": replace(raised, error="malformed"), "flags": ["unread_calls"]}
    standing = {"actor/weight_change": 1e-9, "actor/grad_norm": 1.0}
    few = {"size": 32, "called": 8, "scores": [0.0] * 31 + [1.0], "has_tools": True}  # most have not found the tool
    for given, words in (
        ({}, ("earned nothing", "etude check", "pay.py: compute_score")),
        ({"tools_pay": 0.25}, ("earned nothing from pay.py: compute_score", "etude check")),
        ({"has_tools": True}, ("without a tool call", "say in the prompt when to call; put a worked example")),
        (
            {"call": replace(raised, error=None), "scores": [0.0] * 4 + [1.0] * 4},
            ("whose calls were answered, and whose answer earned nothing", "the arguments were wrong"),
        ),
        (
            {"call": replace(raised, response="it costs 7", error=None), "scores": [0.0] * 4 + [1.0] * 4, "says": "7."},
            (
                "answer earned nothing",
                "4 of these 4 answer what the tool said: where that is right, the ground truth in",
            ),
        ),
        (
            few | {"call": replace(raised, response="it costs 7", error=None), "says": "7."},
            ("25\N{NO-BREAK SPACE}% (8 of 32)", "answer earned nothing", "8 of these 8 answer what the tool said"),
        ),
        (
            {
                "call": replace(raised, response="it costs 7", error=None),
                "says": "7.",
                "size": 32,
                "called": 8,
                "alike": 3,
            },
            ("answer earned nothing", "8 of these 8 answer what the tool said"),
        ),
        ({"size": 32, "alike": 5}, ("word for word", "on which the model is less sure")),
        (
            few | {"call": replace(raised, error="not_executed"), "stop": StopReason.RESPONSE_LENGTH},
            (
                "rollouts cut for length",
                "raise data.max_response_length: 8 of 8 are cut within a tool call, or have no",
            ),
        ),
        (
            few | {"call": replace(raised, error=None), "stop": StopReason.MAX_ASSISTANT_TURNS},
            ("ended before they could say what the tool said", "max_assistant_turns"),
        ),
        (
            few | unread | {"flags": ["malformed_calls"], "stop": StopReason.RESPONSE_LENGTH},
            ("rollouts cut for length", "raise data.max_response_length: 8 of 8 are cut within a tool call"),
        ),
        (
            {"call": replace(raised, error=None), "called": 8, "stop": StopReason.TOOL_RESPONSE_OVERFLOW},
            ("no room for what a tool or environment said", "raise data.max_response_length"),
        ),
        ({"called": 8, "stop": StopReason.CONTEXT_LENGTH}, ("rollouts cut for length", "rollout.max_model_len")),
        (
            {"call": raised},
            ("calls were all read, and in which one failed", "tool_config_path); shop, 4 with: KeyError: 'fig'"),
        ),
        (unread, ("in a format that", "set actor_rollout_ref.rollout.multi_turn.format")),
        ({"scores": (0.0, 1.0), "metrics": standing}, ("weights hardly move", "actor.optim.lr")),
    ):
        shown = wrong_step(tmp_path, **given)
        assert [word for word in words if word not in shown] == [], shown
    assert "earned nothing" not in wrong_step(tmp_path, scores=(-1.0, -0.5))  # the best may be 0
    wrong_step(tmp_path, call=raised, scores=[0.0] * 6 + [1.0] * 2)
    fixes = {cause["what"][:6]: cause["fix"] for cause in answers.why(RunView("", tmp_path))["causes"]}
    assert fixes["groups"] == "mend the above first: these mostly come of it"
    solved = wrong_step(tmp_path, scores=(1.0,), metrics={"critic/score/min": 0.5, "critic/score/max": 1.0})
    assert "groups whose rewards are all equal, 2 of them the highest of the step: most likely solved" in solved
    assert "take harder rows" in solved
    paid = wrong_step(tmp_path, scores=(1.0,), metrics={"critic/score/min": 1.0, "critic/score/max": 1.0})
    assert "of rollouts earned 1, as all since step 1 (does the reward pay whatever the answer?)" in paid
    assert "pay.py: compute_score; if the model solves the rows, take harder ones" in paid


INFRASTRUCTURE = "rollouts that met an infrastructure failure"


def test_why_names_the_step_that_threw_the_policy_too_far(tmp_path):
    rollouts(tmp_path)
    rewards = {1: (0.2, 6.2), 2: (0.05, 0.01), 7: (0.0, 0.0)}
    lines = [{"step": n, "reward/total/mean": r, "actor/ppo_kl": kl} for n, (r, kl) in rewards.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    verdict = answers.why(RunView("", tmp_path))["verdict"]
    assert verdict["text"] == "step 1 changed the policy by KL 6.2; the reward fell from 0.2 to 0.05 at most"
    anew = "trainer.resume_mode=disable, or another trainer.default_local_dir"
    assert verdict["fix"] == f"lower actor_rollout_ref.actor.optim.lr, and start anew: {anew}"
    assert {each["fix"] for each in answers.why(RunView("", tmp_path))["causes"] if each["what"] != INFRASTRUCTURE} == {
        "mend the above first: these mostly come of it"
    }
    lines[1]["actor/ppo_kl"], lines[0]["actor/ppo_kl"] = 6.2, 0.01
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / "trainer.json").touch()
    assert f"`etude reproduce {tmp_path} --from-step 1 actor" in answers.why(RunView("", tmp_path))["verdict"]["fix"]
    lines[0]["actor/ppo_kl"] = 6.2
    assert "lower optim.lr" in find_problems({"actor/ppo_kl": 6.2})["actor/ppo_kl"]
    lines[2]["reward/total/mean"] = 0.15  # it came back
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert "KL" not in answers.why(RunView("", tmp_path))["verdict"]["text"]


@pytest.mark.parametrize(("loss", "told"), [("sft/loss", False), ("dpo/loss", False), ("actor/loss", True)])
def test_why_asks_only_runs_that_sample_for_dumps(tmp_path, loss, told):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, loss: 0.7}) + "\n")
    verdict = answers.why(RunView("", tmp_path))["verdict"]
    assert ("trainer.rollout_data_dir" in verdict["fix"]) == told


def test_a_folder_of_runs_is_told_as_one(tmp_path):
    wrong_step(tmp_path / "seed-1")
    for asked in (["--why"], []):
        told = str(CliRunner().invoke(report, [str(tmp_path), *asked]).exception)
        assert told == f"{tmp_path} is a folder of runs: name one, such as {tmp_path}/seed-1"


def test_why_the_loss_may_be_zero(tmp_path):
    rollouts(tmp_path)
    printed = CliRunner().invoke(report, [str(tmp_path), "--why"])
    assert answers.why(RunView("", tmp_path))["verdict"]["trend"] == ""
    first, *causes = printed.output.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    shown = int(answers.why(RunView("", tmp_path))["verdict"]["examples"][0]["name"].removeprefix("r"))
    assert first.startswith("step 7: 100 % of rollouts have the form of an answer and nothing in it")
    assert causes[0].startswith("→ read some, and let the reward function pay nothing")
    assert causes[1] == f"read one: etude explain {tmp_path}/rollouts/7.jsonl --row {shown}"
    assert [cause for cause in causes if "→" not in cause and cause[0] != "!" and "read one" not in cause] == [
        "25 % (1 of 4) of answers that the scorer did not find; such as --row 1",
        "25 % (1 of 4) of rollouts cut for length; such as --row 2",
        "25 % of rollouts that met an infrastructure failure; such as --row 3",
        "50 % (1 of 2) of groups whose rewards are all equal; such as --row 0",
    ]
    assert "  → raise data.max_response_length if the cut ones are on their way to an answer" in printed.output
    data = pages(tmp_path)
    assert data["why"]["causes"] == answers.why(RunView("", tmp_path))["causes"]
    examples = [example["place"] for cause in data["why"]["causes"] for example in cause["examples"]]
    assert {f"trajectory?place={place.replace('/', '%2F').replace(':', '%3A')}" for place in examples} <= set(data)


def test_a_report_written_before_the_run_lets_go_of_its_folder_says_how_it_ended(tmp_path):
    run = make_run(tmp_path / "run")
    with run_lock(run):
        with run_record(run):
            assert pages(run)["overview"]["status"] == "running"
        assert pages(run)["overview"]["status"] == "ended"
        with pytest.raises(OSError, match="full"), run_record(run):
            raise OSError("the disk is full")
        assert (pages(run)["overview"]["status"], pages(run)["overview"]["why"]) == ("failed", "the disk is full")


def test_answers_that_the_validation_before_the_run_lost_are_a_problem_of_the_run(tmp_path):
    lines = [
        {"step": 0, "val-core/a/reward/mean@1": 0.5, "val/rollout/dropped": 3.0},
        {"step": 1, "rollout/dropped": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    before, first = answers.overview(RunView("", tmp_path))["problems"]
    assert before.startswith("in 1 of 2 steps, last in step 0: 3 answers of the validation dropped")
    assert first.startswith("in 1 of 1 steps, last in step 1: 2 trajectories dropped")
    assert "\N{RIGHTWARDS ARROW}" not in before + first  # the rollouts of a step decide what is to be done


@pytest.mark.parametrize("told", ["gts", "tools_kwargs", "extra_info"])
def test_the_same_words_with_another_truth_tool_or_game_are_another_question(tmp_path, told):
    """The first answer is wrong throughout, the second right: nothing changed, and each is compared with itself."""
    for run in ("one", "other"):
        for step in (0, 6):
            rows = [record(step, f"{n}", "It costs 50.", score=float(n)) for n in (1, 0)]
            for each, price in zip(rows, (50, 60)):
                each |= {"input": "What does a pear cost?", told: {"task": price}}
            write_rollouts(tmp_path / run / "validation", step, rows)
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 6}\n')
    one, other = (RunView(run, tmp_path / run) for run in ("one", "other"))
    assert answers.results(one)["change"] is None
    assert [means(pair) for pair in answers.compare(one, other)["prompts"]] == [(1.0, 1.0), (0.0, 0.0)]


def means(pair):
    return pair["left"]["mean"], pair["right"]["mean"]
