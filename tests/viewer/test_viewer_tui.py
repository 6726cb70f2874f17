"""`etude view` under Textual's pilot: what stands on the screen after keys, while a run writes, and of hostile text.

With ETUDE_SCREENSHOTS=docs/images (make screenshots) the test of each page also writes its screen there as SVG.
"""

import json
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from index_stage import make_record, make_records, verl_line, write_run

pytest.importorskip("textual", reason="etude view needs the extra 'viewer'")

from textual.worker import WorkerCancelled

from etude.cli.view import view
from etude.dumps import write_rollouts
from etude.errors import ConfigError
from etude.jsonl import json_line
from etude.trajectory import StopReason
from etude.viewer.index import RolloutIndex
from etude.viewer.query import Filter, parse_query, quote_term
from etude.viewer.runs import find_decoder
from etude.viewer.tui import ViewApp, help_text
from etude.viewer.tui_pages import clean, clean_line, diff_texts


class Seat:
    """A user at the terminal: presses keys, and reads the screen."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    async def settle(self):
        """Waits until no thread reads or searches, and the screen shows what they found."""
        await self.pilot.pause()
        while busy := [worker for worker in self.app.workers if not worker.is_finished]:
            with suppress(WorkerCancelled):  # another one took its place
                await self.app.workers.wait_for_complete(busy)
            await self.pilot.pause()

    async def press(self, *keys):
        for key in keys:
            await self.pilot.press(key)
        await self.settle()
        return self.text()

    async def search(self, query):
        await self.press("slash")
        self.app.query_one("#query").value = query
        return await self.press("enter")

    def lines(self):
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip) for strip in strips]

    def text(self):
        return "\n".join(self.lines())

    def screenshot(self, name):
        svg = self.app.export_screenshot()
        assert len(svg) < 150_000
        if folder := os.environ.get("ETUDE_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.svg").write_text(svg)


@asynccontextmanager
async def seat(path, query="", size=(80, 24)):
    app = ViewApp(RolloutIndex(path), query, every=3600.0)  # the tests say when to read again
    async with app.run_test(size=size) as pilot:
        user = Seat(app, pilot)
        await user.settle()
        yield user


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "mine", steps=3, groups=4, n=4)


async def test_the_first_screen_lists_steps_and_trajectories(run):
    async with seat(run) as user:
        lines = user.lines()
        assert (len(lines), {len(line) for line in lines}) == (24, {80})
        assert "mine · 49 of 49 · step ↑" in lines[0]
        assert [line.split()[:3] for line in lines[2:8]] == [
            ["all", "49", "1.02│"],
            ["train", "48", "1.00│"],
            ["1", "16", "1.00│"],
            ["2", "16", "1.00│"],
            ["3", "16", "1.00│"],
            ["validation", "1", "1.75│"],
        ]
        assert "1   1.75 completed   2  1     7     I compute." in lines[2]
        assert "response l  2  1     7 T" in lines[3]
        user.screenshot("view-lists")


async def test_search_filters_and_sorts_change_the_list(run):
    async with seat(run) as user:
        assert "12 of 49 · step ↑ · stop:completed step:2.." not in user.text()
        assert "9 of 49" in await user.search("stop:completed step:2..")
        assert "4 of 49" in await user.search("question 1 step:3")
        assert "13 of 49" in await user.search("/is 72\\.$/")
        assert "49 of 49" in await user.press("c")
        assert "stop: response_length (36)" in await user.press("f")
        assert "36 of 49" in await user.press("enter")
        await user.press("c", "s", "down", "enter", "r")
        assert "score ↓" in user.lines()[0]
        assert user.app._selection.rows[0].score == 1.75
        assert user.app._selection.rows[-1].score == 0.75


async def test_a_query_that_is_refused_says_so_and_keeps_the_list(run):
    async with seat(run) as user:
        assert "not a range" in await user.search("score:high")
        await user.press("escape")
        assert "49 of 49" in user.text()
        assert "search pattern" in await user.search("/(/")


async def test_a_step_restricts_the_list_together_with_the_query(run):
    async with seat(run) as user:
        text = await user.press("tab", "down", "down", "down")
        assert "16 of 49" in text
        assert {row.step for row in user.app._selection.rows} == {2}
        assert "4 of 49" in await user.search("stop:completed")


async def test_a_trajectory_shows_its_messages_calls_and_results(run):
    async with seat(run, size=(80, 40)) as user:
        text = await user.press("down", "enter")
        for part in (
            "rollouts/1.jsonl:2 · 2 of 49 · 0.75 response_length · 7 tokens · 1 calls ·",
            "── prompt ──",
            "Question 0: 12 * 6?",
            "── model ──",
            "I compute.",
            "── tool ──",
            "reward of calculator",
            "It is 27.",
            "── call calculator turn 0 · 0.01 s · 0.5 reward ──",
            '{"expression": "12 * 6"}',
        ):
            assert part in text, part
        user.screenshot("view-trajectory")
        assert "rollouts/1.jsonl:3" in await user.press("n")
        assert "rollouts/1.jsonl:2" in await user.press("p")
        assert "49 of 49" in await user.press("escape")


async def test_tokens_have_the_trainers_numbers_where_a_dump_has_them(tmp_path):
    values = {"advantages": [0.5, 0.5, None, None, -0.25, -0.25, -0.25], "entropys": [1.5] * 7}
    write_rollouts(tmp_path, 1, [make_record() | {"token_values": values}])
    async with seat(tmp_path) as user:
        lines = (await user.press("enter", "t")).splitlines()
        assert lines[1].split()[4:8] == ["advantage", "entropy", "reward", "version"]
        assert lines[2].split()[:7] == ["0", "4", "1", "-0.1000", "0.5000", "1.5000", "3"]
        assert lines[4].split()[:4] == ["2", "6", "0", "1.5000"]


async def test_the_tokens_have_mask_log_prob_reward_and_version(run):
    async with seat(run) as user:
        lines = (await user.press("enter", "t")).splitlines()
        assert lines[1].split() == ["position", "id", "mask", "log-prob", "reward", "version", "text"]
        assert [line.split()[:4] for line in lines[2:9]] == [
            ["0", "4", "1", "-0.1000"],
            ["1", "5", "1", "-0.2500"],
            ["2", "6", "0", "\\n"],
            ["3", "7", "0", "72"],
            ["4", "8", "1", "-0.5000"],
            ["5", "9", "1", "-1.0000"],
            ["6", "10", "1", "-2.0000"],
        ]
        assert lines[8].split() == ["6", "10", "1", "-2.0000", "1.25", "4"]
        user.screenshot("view-tokens")
        assert "── model ──" in await user.press("t")


def test_a_models_tokenizer_in_the_run_gives_each_token_its_text(run, tmp_path):
    from tokenizers import Tokenizer, models

    folder = run / "global_step_1" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    assert find_decoder(run) is None
    Tokenizer(models.WordLevel({"twelve": 4, "?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    assert find_decoder(run)([4]) == "twelve"
    (folder / "tokenizer.json").write_text("{")
    assert find_decoder(run) is None


async def test_the_rollouts_of_a_prompt_stand_side_by_side_with_their_differences(run):
    async with seat(run, size=(120, 24)) as user:
        text = await user.press("g")
        assert "prompt 1-0 · step 1 · 4 rollouts · scores 1.75 0.75 0.75 0.75" in text
        assert text.count("I compute.") == 3
        assert "Question 0" in text
        text = await user.press("d")
        marked = {
            segment.text.strip(): str(segment.style.bgcolor.name)
            for strip in user.app.screen._compositor.render_strips()
            for segment in strip
            if segment.text.strip() in ("72.", "27.")
        }
        assert marked == {"72.": "#870000", "27.": "#005f00"}
        user.screenshot("view-group")
        assert "rollouts/1.jsonl:2" in await user.press("right", "enter")


async def test_a_killed_run_is_not_called_live(run):
    async with seat(run) as user:
        await user.press("l")
        assert "live" not in user.text()
        assert "nothing is running" in user.text()


async def test_a_running_job_is_followed(run, monkeypatch):
    monkeypatch.setattr("etude.viewer.tui.is_locked", {run}.__contains__)
    async with seat(run) as user:
        assert "● running (l follows)" in user.text()
        await user.press("l")
        assert user.app._selection.rows[-1].step == 3
        write_rollouts(run / "rollouts", 4, make_records(4, 4, 4))
        user.app._read_more()
        await user.settle()
        text = user.text()
        assert "● live" in text
        assert {row.step for row in user.app._selection.rows} == {4}
        assert user.app._rows.current is user.app._selection.rows[-1]
        write_rollouts(run / "rollouts", 5, make_records(5, 4, 4))
        await user.press("l")
        user.app._read_more()
        await user.settle()
        assert user.app._steps.current.step == 4  # the list no longer moves by itself
        assert "of 81" in user.text()


async def test_the_help_lists_every_key(run):
    async with seat(run, size=(80, 60)) as user:
        text = await user.press("question_mark")
        for description in (
            "Search",
            "Filter",
            "Sort",
            "Live",
            "Tokens",
            "Diff with the first",
            "Page down",
            "flag:no_answer",
        ):
            assert description in text, description
        assert "49 of 49" in await user.press("escape")
    assert help_text().plain.count("Back") == 2


HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]markup[/bold] [/] [@click=app.quit]x[/] \u202egnp.exe \ud800 \r\b zero\0 [link=file:///]"


async def test_hostile_text_is_inert_on_every_page(tmp_path):
    records = [
        make_record(1, n, words=HOSTILE, source=f"[red]{HOSTILE}", tool_error=HOSTILE, row={"uid": HOSTILE})
        for n in range(2)
    ]
    records[0]["stop_reason"] = HOSTILE
    records[1]["tool_calls"][0] |= {"name": HOSTILE, "arguments": HOSTILE, "response": HOSTILE}
    (tmp_path / "1.jsonl").write_bytes(b"".join(map(json_line, records)) + b'{"\\u001b[31m[red]": 1}\n')
    async with seat(tmp_path, size=(160, 50)) as user:
        for keys in ("f", "escape", "b", "escape", "enter", "n", "t", "t", "g", "d", "escape", "escape"):
            text = await user.press(keys)
            assert not set(text) & {chr(code) for code in [*range(10), *range(11, 32), *range(127, 160), 0x202E]}, keys
            text.encode()
            if keys in ("t", "g"):
                assert "[bold]markup[/bold]" in text
        assert "of 2" in user.text()
        await user.search("[/bold]")
        assert "2 of 2" in user.lines()[0]


async def test_a_long_answer_is_shown_to_its_end(tmp_path):
    write_rollouts(tmp_path, 1, [make_record(words=" word" * 10_000 + " last")])
    async with seat(tmp_path) as user:
        assert "word last" in await user.press("enter", "end")


async def test_records_of_any_shape_open(tmp_path):
    lines = [verl_line(), verl_line(1, 1, segments="no", messages=3, tool_calls=[7, {"name": 3}], rewards=[], gts=None)]
    lines += [json.dumps({"output": "x" * 100_000 + "\n" * 50_000, "score": 1e308, "step": 10**30}) + "\n"]
    (tmp_path / "1.jsonl").write_text("".join(lines))
    async with seat(tmp_path) as user:
        await user.press("enter")
        for _ in lines:
            assert "rollout record" in await user.press("t")
            assert "response" in await user.press("t", "n")
        await user.press("g", "d", "end", "escape", "escape")
        assert "3 of 3" in user.text()


async def test_bad_lines_are_counted_and_listed(tmp_path):
    (tmp_path / "1.jsonl").write_text(verl_line() + "nonsense\n")
    async with seat(tmp_path) as user:
        assert "1 bad lines (b)" in user.lines()[0]
        assert "1.jsonl:2 not JSON" in await user.press("b")


async def test_a_dump_replaced_while_it_is_looked_at_is_said(run):
    async with seat(run) as user:
        (run / "rollouts" / "1.jsonl").write_text("[]\n")
        assert "expected a JSON object, found list" in await user.press("enter")


async def test_tens_of_thousands_are_listed_without_rendering_them(tmp_path, monkeypatch):
    for step in range(1, 21):
        (tmp_path / f"{step}.jsonl").write_text(verl_line(step) * 1000)
    rendered = []
    original = ViewApp._row_text
    monkeypatch.setattr(ViewApp, "_row_text", lambda *given: rendered.append(1) or original(*given))
    async with seat(tmp_path) as user:
        assert "20,000 of 20,000" in user.text()
        await user.press("end")
        assert user.app._rows.current is user.app.index.rows[-1]
        await user.press("pageup", "home")
    assert len(rendered) < 2000


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", Filter()),
        ("score>=0.5 score<=1", Filter(min_score=0.5, max_score=1.0)),
        ("score:1 step:3..5", Filter(min_score=1.0, max_score=1.0, min_step=3, max_step=5)),
        ("step:..5", Filter(max_step=5)),
        ("score>0", Filter(min_score=5e-324)),
        ("stop:completed tool:search flag:truncated", Filter(stop_reason="completed", tool="search", flag="truncated")),
        ('source:"my data" split:validation', Filter(data_source="my data", split="validation")),
        ("score:1 two words", Filter(min_score=1.0, max_score=1.0, text="two words")),
        ("/a+b/ step:1", Filter(min_step=1, max_step=1, text="a+b", regex=True)),
        ("http://a:1 answer:5", Filter(text="http://a:1 answer:5")),
    ],
)
def test_a_query_is_a_filter(query, wanted):
    assert parse_query(query) == wanted


@pytest.mark.parametrize("query", ["score:x", "score:1..2..3", "step:..", "score:nan", "score>"])
def test_a_malformed_range_is_refused(query):
    if query == "score>":  # nothing to compare with: words
        assert parse_query(query) == Filter(text="score>")
        return
    with pytest.raises(ConfigError, match="not a range"):
        parse_query(query)


def test_a_quoted_term_means_its_value():
    for value in ("search", "my tool", "a:b"):
        assert parse_query(quote_term("tool", value)) == Filter(tool=value)


def test_text_is_shown_without_what_a_terminal_would_obey():
    assert clean(HOSTILE).startswith("\ufffd[31mred")
    assert "\n" not in clean_line("a\nb")


def test_a_difference_is_marked_on_both_sides_and_bounded():
    one, other = diff_texts("a b c", "a x c")
    assert [(one.plain[s.start : s.end], s.style) for s in one.spans if "red" in str(s.style)] == [
        ("b", "bold white on dark_red")
    ]
    assert [other.plain[s.start : s.end] for s in other.spans if "green" in str(s.style)] == ["x"]
    assert len(diff_texts("w " * 50_000, "v " * 50_000)[0]) <= 8000


def test_the_command_wants_a_terminal_and_an_existing_folder(run):
    result = CliRunner().invoke(view, [str(run)])
    assert isinstance(result.exception, ConfigError)
    assert "needs a terminal" in str(result.exception)
    result = CliRunner().invoke(view, [str(run / "absent")])
    assert "no such file or folder" in str(result.exception)
    result = CliRunner().invoke(view, [str(run), "--filter", "score:x"])
    assert "not a range" in str(result.exception)


def test_every_stop_reason_of_a_trajectory_can_be_filtered(tmp_path):
    write_rollouts(tmp_path, 1, [make_record(1, n, stop=stop) for n, stop in enumerate(StopReason)])
    index = RolloutIndex(tmp_path)
    index.refresh()
    for stop in StopReason:
        assert len(index.select(parse_query(f"stop:{stop.value}")).rows) == 1
