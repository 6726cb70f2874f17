"""The web viewer: what its server answers, and its pages in Chromium."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from etude.cli.main import cli, run
from etude.dumps import write_rollouts
from etude.errors import DataError
from etude.run_folder import run_lock
from etude.viewer import answers
from etude.viewer.conversations import HIDDEN
from etude.viewer.curves import MAX_POINTS
from etude.viewer.page import PAGES as PAGES_FOLDER
from etude.viewer.page import write_page, write_report
from etude.viewer.query import Filter
from etude.viewer.runs import Runs, RunView
from tests.viewer.index_stage import MALFORMED, make_record, verl_line, write_malformed, write_run
from tests.viewer.web_stage import (
    EVIL,
    PATIENCE,
    ask,
    browsing,
    metrics_line,
    needs_chromium,
    serving,
    with_token_values,
    write_hostile_run,
    write_large_run,
    write_tokenizer,
)

PAGES = ("overview", "why", "trajectories", "trajectories?group=1", "timeline", "compare")
TRAJECTORY = "trajectory?run=big&place=rollouts/50.jsonl:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs: `big` of 5,000 trajectories, the last step's first with the trainer's numbers; `other`, which did better;
    `live`, which grows; `hostile`."""
    place = tmp_path_factory.mktemp("runs")
    big = write_large_run(place / "big")
    write_tokenizer(big)
    other = write_large_run(place / "other", steps=2, better=1.0)
    for dump in (big / "rollouts" / "50.jsonl", other / "rollouts" / "2.jsonl"):
        lines = dump.read_text().splitlines(keepends=True)
        lines[0] = json.dumps(with_token_values(json.loads(lines[0]))) + "\n"
        dump.write_text("".join(lines))
    write_large_run(place / "live", steps=2, groups=2, n=2)
    write_hostile_run(place / "hostile")
    return place


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    needs_chromium()
    with browsing() as browser:
        yield browser


class Tab:
    """A page of the browser that fails a test where a script, the policy or a request did."""

    def __init__(self, browser, url, **options):
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.wrong, self.requests = [], []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.wrong.append(message.text)
        )
        self.page.on("dialog", lambda dialog: self.wrong.append("a dialog"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, where):
        """Goes to a page of the viewer, and waits until it is drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{'' if self.url.startswith('file:') else '/'}#/{where}")
        self.page.wait_for_selector("main[data-page]")
        assert self.page.query_selector('main > [role="alert"]') is None, self.text("main")

    def text(self, selector):
        return self.page.text_content(selector)

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()

    def until(self, expression):
        """Waits until a JavaScript expression is true. (The pages' policy forbids Playwright's own waiting.)"""
        for _ in range(PATIENCE // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")


@pytest.fixture
def tab(browser, server):
    tab = Tab(browser, server)
    yield tab
    tab.context.close()
    assert tab.wrong == []
    assert all(url.startswith((server, "data:", "about:")) for url in tab.requests)


def test_pages_and_terminal_replace_the_same_characters():
    [body] = re.findall(r"const HIDDEN = /\[(.*)\]/g;", (PAGES_FOLDER / "dom.js").read_text())
    hidden = re.compile(f"[{body}]")
    assert [code for code in range(0x3000) if hidden.match(chr(code))] == sorted(HIDDEN)


# -- the server --------------------------------------------------------------------------------------------------


def test_pages_may_run_nothing_but_their_own_files(server):
    status, headers, body = ask(server)
    policy = headers["Content-Security-Policy"]
    assert status == 200
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb"https?:|<script>|style=| on\w+=", body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(server, method):
    assert {ask(server + path, method)[0] for path in ("/", "/api/runs", "/style.css")} == {405}


@pytest.mark.parametrize(
    "path",
    [
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/server.py",
        "/docs",
        "/openapi.json",
        "/api/overview?run=..",
        "/api/overview?run=/etc",
        "/api/trajectory?run=big&place=../../../etc/passwd:1",
        "/api/tokens?run=big&place=../../../etc/passwd:1",
        "/api/trajectory?run=big&place=/etc/passwd:1",
        "/api/trajectory?run=big&place=rollouts/../config.yaml:1",
    ],
)
def test_no_address_leads_to_another_file(server, path):
    status, _, body = ask(server + path)
    assert status in (404, 422)
    assert b"root:" not in body
    assert b"import" not in body


def test_another_hosts_name_is_refused(server):
    assert ask(server, headers={"Host": "evil.example"})[0] == 400
    assert ask(server, headers={"Host": server.replace("127.0.0.1", "localhost").removeprefix("http://")})[0] == 200


@pytest.mark.parametrize("name", ["[::1]", "localhost", "192.0.2.7"])
def test_an_address_and_localhost_are_the_servers_own_names(server, name):
    assert ask(server, headers={"Host": f"{name}:{server.rpartition(':')[2]}"})[0] == 200


def test_a_server_that_others_reach_asks_for_the_token_that_its_url_has(folder):
    with serving(folder, "--host", "0.0.0.0") as url:
        base, token = url.split("/?token=")
        assert len(token) >= 32
        base = base.replace("0.0.0.0", "127.0.0.1")
        for path in (
            "",
            "/",
            "/app.js",
            "/api/runs",
            "/?token=",
            "/?token=x",
            f"/?token={token[:-1]}",
            "/?token=%C3%A9",
        ):
            assert ask(base + path)[0] == 401, path
        assert ask(base, headers={"Cookie": "etude-view=x"})[0] == 401
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{base}/?token={token}", timeout=60) as page:
            assert page.url == f"{base}/"  # the token is out of the address
        with opener.open(f"{base}/api/runs", timeout=60) as answer:
            assert json.load(answer)["runs"]
        bearer = {"Authorization": f"Bearer {token}"}
        assert ask(f"{base}/api/runs", headers=bearer)[0] == 200
        assert ask(f"{base}/api/runs", headers=bearer | {"Host": "evil.example"})[0] == 400


def test_a_filter_is_refused_where_nothing_would_honour_it(folder, tmp_path, capsys):
    for option in ("--web", "--html"):
        rest = [] if option == "--web" else [str(tmp_path / "x.html")]
        assert run(cli, ["view", str(folder / "other"), option, *rest, "--filter", "score>1"]) == 2
        assert "--filter is the terminal's" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("query", ["offset=-1", "step=x", "low=nan", f"q={'x' * 600}", "sort=../x", "regex=1&q=("])
def test_a_wrong_question_is_answered_with_a_line(server, query):
    status, _, body = ask(f"{server}/api/trajectories?run=big&{query}")
    assert status == 422
    assert json.loads(body)["detail"]


def test_an_answer_holds_a_page_however_much_there_is(tmp_path):
    folder = write_large_run(tmp_path / "run", steps=3, groups=60, n=2)
    (folder / "metrics.jsonl").write_text("".join(metrics_line(step) for step in range(1, 3001)))
    run = RunView("run", folder)
    page = answers.trajectories(run, Filter(), "step", False, False, 0)
    assert (page["total"], len(page["rows"])) == (360, answers.PAGE_ROWS)
    groups = answers.trajectories(run, Filter(), "step", False, True, 0)
    assert (groups["total"], len(groups["groups"])) == (180, answers.PAGE_GROUPS)
    curves = answers.curves(run)
    assert max(len(line["steps"]) for chart in curves["charts"] for line in chart["lines"]) <= MAX_POINTS
    assert curves["charts"][0]["lines"][0]["steps"][-1] == 3000
    assert len(curves["time"]["steps"]) <= MAX_POINTS


def test_metrics_are_followed_and_read_anew_once_replaced(tmp_path):
    path, run = tmp_path / "metrics.jsonl", RunView(".", tmp_path)
    assert answers.curves(run)["charts"] == []
    path.write_text(metrics_line(1) + metrics_line(2)[:-20])
    assert [record["step"] for record in run.metrics()[1]] == [1]
    path.write_text(metrics_line(1) + metrics_line(2) + "no json\n" + metrics_line(3))
    version, records = run.metrics()
    assert [record["step"] for record in records] == [1, 2, 3]
    assert answers.curves(run, version) == {"version": version}
    path.unlink()
    path.write_text(metrics_line(1))  # as a resumed run begins: later steps are dropped
    assert [record["step"] for record in run.metrics()[1]] == [1]


def test_a_run_is_named_by_its_path_and_dumps_alone_are_one(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        Runs(tmp_path / "absent")
    write_run(tmp_path / "dumps")
    alone = Runs(tmp_path / "dumps")
    assert [run.name for run in alone.all()] == ["."]
    assert answers.list_runs(alone)["runs"][0]["status"] == "dumps"
    write_large_run(tmp_path / "a" / "b", steps=1)
    runs = Runs(tmp_path / "a")
    assert [run.name for run in runs.all()] == ["b"]
    assert runs.get("").name == "b"
    assert runs.get("../dumps") is None


def test_a_folder_of_runs_opens_the_running_one_else_the_newest(tmp_path):
    for age, name in enumerate(("newest", "a", "b")):
        write_large_run(tmp_path / name, steps=1)
        for file in (tmp_path / name).glob("*.json*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    assert [run.name for run in Runs(tmp_path).all()] == ["newest", "a", "b"]
    with run_lock(tmp_path / "b"):
        assert Runs(tmp_path).get("").name == "b"
        assert answers.list_runs(Runs(tmp_path))["runs"][0]["name"] == "b"
        assert Runs(tmp_path / "a").get("").name == "."
    write_large_run(tmp_path / "a" / "evaluation" / "greedy", steps=1)  # newer than the training that it evaluates
    assert Runs(tmp_path).get("").name == "newest"


def test_verls_dumps_have_a_conversation_and_say_that_they_hold_no_tokens(tmp_path):
    (tmp_path / "1.jsonl").write_text(verl_line(1, 0) + verl_line(1, 1))
    run = RunView(".", tmp_path)
    blocks = answers.trajectory(run, "1.jsonl:2")["sequences"][0]["blocks"]
    assert [block["text"] for block in blocks] == ["user\nHow many 0?", "They are 1."]
    with pytest.raises(DataError, match="holds no tokens"):
        answers.tokens(run, "1.jsonl:2", 0, 0)


def test_tokens_come_with_the_trainers_numbers(tmp_path):
    record = with_token_values(make_record())
    write_rollouts(tmp_path, 1, [record])
    found = answers.tokens(RunView(".", tmp_path), "1.jsonl:1", 0, 0)
    columns = found["columns"]
    assert found["total"] == 7
    assert columns["id"] == [4, 5, 6, 7, 8, 9, 10]
    assert columns["from"] == ["sampled"] * 2 + ["template", "tool"] + ["sampled"] * 3
    assert columns["log_prob"] == [-0.1, -0.25, None, None, -0.5, -1.0, -2.0]
    assert columns["old_log_probs"] == [-0.35, -0.5, None, None, -0.75, -1.25, -2.25]
    assert columns["advantages"] == [1.5, 1.5, None, None, 1.5, 1.5, 1.5]
    assert answers.tokens(RunView(".", tmp_path), "1.jsonl:1", 0, 5)["columns"]["id"] == [9, 10]


def test_a_timeline_counts_from_the_first_trajectorys_start(tmp_path):
    late = with_token_values(make_record(number=1))
    late["timeline"] = [["queue", 100.0, 2.0], ["generate_sequences", 102.0, 1.0], ["bad", None, 1.0]]
    write_rollouts(tmp_path, 1, [with_token_values(make_record()), late])
    lanes = answers.timeline(RunView(".", tmp_path))["lanes"]
    assert lanes[0]["spans"] == [["queue", 0.0, 0.5], ["generate_sequences", 0.5, 1.0], ["tool_calls", 1.5, 0.5]]
    assert lanes[1]["spans"] == [["queue", 0.0, 2.0], ["generate_sequences", 2.0, 1.0]]


def test_prompts_of_two_runs_are_compared_where_they_differ_most(tmp_path):
    for name, scores in (("a", (0.0, 0.5)), ("b", (1.0, 0.5))):
        records = [make_record(3, group, group=group, score=score) for group, score in enumerate(scores)]
        write_rollouts(tmp_path / name / "rollouts", 3, records)
    found = answers.compare(RunView("a", tmp_path / "a"), RunView("b", tmp_path / "b"))
    assert found["shared"] == 2
    means = [(pair["left"]["place"], pair["right"]["mean"] - pair["left"]["mean"]) for pair in found["prompts"]]
    assert means == [("rollouts/3.jsonl:1", 1.0), ("rollouts/3.jsonl:2", 0.0)]
    assert found["prompts"][0]["prompt"] == "12 * 6?"
    assert "config.yaml" in found["reason"]


# -- the pages ---------------------------------------------------------------------------------------------------


def test_the_overview_draws_every_curve_of_the_run(tab):
    tab.open("overview?run=big")
    charts = tab.texts("figure h3")
    wanted = {
        "Reward",
        "Tool calls",
        "Tool errors",
        "Tool latency",
        "Messages",
        "Response length",
        "KL divergence",
        "Entropy",
    }
    assert wanted | {"Clip fraction", "Gradient norm", "Sampler–trainer mismatch", "Where the time went"} <= set(charts)
    assert "complete step 50" in tab.text("main")
    tab.page.hover('figure[data-chart="Reward"] svg')
    tab.until("document.querySelector('figure[data-chart=Reward] .reading').textContent.startsWith('step 2')")
    assert len(tab.page.query_selector_all('figure[data-chart="Where the time went"] rect')) == 150  # gen, actor, other
    tab.page.mouse.move(0, 0)


def test_thousands_of_trajectories_are_listed_filtered_and_sorted(tab):
    tab.open("trajectories?run=big")
    tab.until("document.querySelector('#list').dataset.total == 5000")
    assert len(tab.texts("#list tbody tr")) == 100
    assert tab.texts("#list tbody tr:first-child td")[0] == "50"  # the newest step first
    assert tab.texts("#list tbody tr:first-child .text > *") == ["12 * 6?", "72It is 72. number 0"]
    tab.page.select_option('label:has-text("step") select', "7")
    tab.until("document.querySelector('#list').dataset.total == 100")
    tab.page.fill("#search", "number 42")
    tab.page.keyboard.press("Enter")
    tab.until("document.querySelector('#list').dataset.total == 1")
    assert tab.page.get_attribute("#list tbody tr", "data-place") == "rollouts/7.jsonl:43"
    tab.open("trajectories?run=big&low=1.5")
    tab.until("document.querySelector('#list').dataset.total == 1250")  # the first of each group
    tab.page.click('th button:has-text("score")')
    tab.page.wait_for_selector('th[aria-sort="ascending"]')
    tab.page.click('a:has-text("next →")')
    tab.until("document.querySelector('.pager').textContent.includes('101 to 200')")


def test_rollouts_of_a_prompt_are_grouped_and_stand_side_by_side(tab):
    tab.open("trajectories?run=big&group=1&step=9")
    assert len(tab.texts("details.group")) == 25
    assert tab.texts("details.group summary")[0].startswith("12 * 6?, step 9: 4 rollouts, score 1 ±")
    tab.page.click('details.group >> nth=0 >> a:has-text("side by side")')
    tab.until("document.querySelectorAll('.column').length == 4")


def test_tokens_are_coloured_by_what_the_trainer_made_of_them(tab):
    tab.open(TRAJECTORY)
    assert tab.texts(".talk .who") == [
        "user",
        "model",
        "arguments",
        "result",
        "model",
    ]  # a call after the turn that made it
    assert tab.page.query_selector(".talk details[open], #raw[open]") is None
    tab.page.keyboard.press("r")
    tab.page.wait_for_selector(".tok")
    assert tab.texts(".tokens .tok") == ["w4", "w5", "w6", "w7", "w8", "w9", "w10"]
    assert tab.page.get_attribute(".tok >> nth=2", "class") == "tok template"
    tab.page.click('.modes button:has-text("mismatch")')
    assert "-0.25 to -0.25" in tab.text(".scale")
    tab.page.click('.modes button:has-text("entropy")')
    classes = [token.get_attribute("class") for token in tab.page.query_selector_all(".tok")]
    assert classes == ["tok v0", "tok v2", "tok ", "tok ", "tok v7", "tok v8", "tok v10"]
    tab.page.hover(".tok >> nth=1")
    reading = tab.text(".numbers")
    for part in (
        "id 5",
        "turn 0",
        "weights 3",
        "log-prob -0.25",
        "advantage 1.5",
        "trainer before -0.5",
        "ratio 1.6487",
        "mismatch -0.25",
    ):
        assert part in reading
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    tab.until("document.querySelector('.numbers').textContent.includes('id 5')")
    tab.page.keyboard.press("c")
    tab.until("document.querySelector('.tokens').dataset.by == 'mismatch'")
    assert tab.texts(".call summary") == ["called calculator 0.01 s · reward 0.5"]
    assert "advantage +1.5" in tab.text(".lead")
    tab.page.keyboard.press("p")
    tab.until("document.querySelector('h1').textContent == 'rollouts/49.jsonl:100'")


def test_why_it_does_not_learn_is_one_screen_with_examples(tab):
    tab.open("why?run=big")
    causes = dict(zip(tab.texts("[data-cause] h3"), tab.texts("[data-cause] .big")))
    assert causes == {"rollouts that met an infrastructure failure": "2 %"}
    assert tab.page.query_selector("[data-cause] .fix") is None  # too rare to be mended first
    assert tab.text(".verdict .big").startswith("The reward rose:")  # before what its last step still lacks
    assert re.search(r"step \d+: ", tab.text(".verdict"))
    assert len(tab.texts(".squares a")) == 25
    assert "step/calculator" in tab.text("main")
    assert {"Nothing to learn from", "Sampler–trainer mismatch"} <= set(tab.texts("figure h3"))


def test_a_timeline_has_a_row_a_trajectory_and_lanes_of_training(tab):
    tab.open("timeline?run=big&step=50")
    assert len(tab.texts("a.lane")) == 100
    assert len(tab.page.query_selector_all("a.lane >> nth=0 >> rect")) == 3
    assert tab.texts("div.lane .who") == ["gen 3 s", "update_actor 0.8 s"]


def test_two_runs_are_compared(tab):
    tab.open("compare?run=big&other=other")
    assert len(tab.texts("#differences tbody tr")) > 0
    assert "12 * 6?" in tab.texts("#shared tbody td")
    assert "the mean score in the last step that has them (of validation, where there is one)" in tab.text("main")
    assert "actor.lr1e-062e-06" in tab.text("#differences")
    assert len(tab.texts("#shared tbody tr")) == 25
    assert len(tab.page.query_selector_all('figure[data-chart="Reward"] path.line')) == 4
    tab.page.click("#shared a >> nth=0")
    tab.until("document.querySelectorAll('.column').length == 2")


def test_pages_follow_a_run_that_goes_on(tab, folder):
    tab.open("overview?run=live")
    assert tab.page.get_attribute(".charts", "data-step") == "2"
    with (folder / "live" / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(3)[:30])
        file.flush()
        file.write(metrics_line(3)[30:] + metrics_line(4))
    tab.until("document.querySelector('.charts').dataset.step == 4")
    assert "step 4 of 2" in tab.text("main")
    tab.until("document.querySelector('#live').textContent == 'complete'")  # as its run.json says
    with run_lock(folder / "live"):
        tab.until("document.querySelector('#live').textContent == 'live: step 4 of 2'")
    tab.open("trajectories?run=live")
    assert tab.page.get_attribute("#list", "data-total") == "8"
    write_rollouts(folder / "live" / "rollouts", 3, [make_record(3, number) for number in range(3)])
    tab.until("document.querySelector('#list').dataset.total == 11")
    tab.open("why?run=live")
    assert tab.page.input_value("main select") == "3"
    write_rollouts(folder / "live" / "rollouts", 5, [make_record(5, number) for number in range(3)])
    with (folder / "live" / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(5))
    tab.until("document.querySelector('main select').value == '5'")


def test_what_a_model_wrote_is_inert(tab):
    places = ["trajectory?run=hostile&place=rollouts/1.jsonl:3", "compare?run=hostile&siblings=rollouts/1.jsonl:3"]
    for where in [*(page + ("&" if "?" in page else "?") + "run=hostile" for page in PAGES), *places]:
        tab.open(where)
        assert tab.page.evaluate("window.pwned") is None
        assert tab.page.query_selector("main img, main script, main iframe") is None
        shown = tab.page.evaluate("document.body.innerText")
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        if where in places:
            assert EVIL.partition("\x1b")[0] + "\ufffd[31mred" in tab.text("main")
            assert len(shown) < 200_000
    tab.open(places[0])
    assert "more characters" in tab.text("#raw")
    tab.page.click("#raw summary")
    for quantity in ("log-prob", "advantage", "mismatch"):
        tab.page.click(f'.modes button:has-text("{quantity}")')
    tab.page.hover(".tok >> nth=0")
    assert "window.pwned=1" in tab.text(".numbers")


def test_pages_are_readable_on_a_telephone_in_both_themes(browser, server):
    for scheme in ("light", "dark"):
        tab = Tab(browser, server, viewport={"width": 400, "height": 800}, color_scheme=scheme)
        pages = [*(page + ("&" if "?" in page else "?") + "run=big" for page in PAGES), TRAJECTORY]
        for page in pages if scheme == "light" else pages[:1]:
            tab.open(page)
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400, page
        ink, paper = (
            tab.page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        light = [sum(map(int, re.findall(r"\d+", colour))) for colour in (ink, paper)]
        assert (light[0] < light[1]) == (scheme == "light")
        tab.context.close()
        assert tab.wrong == []


def test_keys_move_through_the_pages(tab):
    tab.open("overview?run=big")
    tab.page.keyboard.press("?")
    tab.page.wait_for_selector("dialog[open]")
    assert "next, previous trajectory" in tab.text("dialog")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("t")
    assert tab.page.get_attribute("html", "data-theme") == "dark"
    tab.page.keyboard.press("3")
    tab.page.wait_for_selector("#search")
    tab.page.keyboard.press("/")
    tab.until("document.activeElement.id == 'search'")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("Enter")
    tab.until("document.querySelector('h1').textContent == 'rollouts/50.jsonl:2'")
    tab.page.keyboard.press("u")
    tab.page.wait_for_selector("#list")


@pytest.mark.parametrize("name", ["other", "hostile"])
def test_a_run_is_one_file_that_asks_for_nothing(browser, folder, tmp_path, name):
    count = write_page(folder / name, tmp_path / "run.html")
    assert count == (150 if name == "other" else 4)
    tab = Tab(browser, f"file://{tmp_path}/run.html")
    for where in ("overview", "why", "trajectories", "timeline"):
        tab.open(where)
        assert tab.page.evaluate("window.pwned") is None
        assert tab.page.query_selector("main img, main script") is None
    if name == "other":
        assert tab.texts("#nav a") == ["Overview", "Why is it not learning?", "Trajectories", "Timeline"]
        tab.open("trajectories?step=2")
        assert tab.page.get_attribute("#list", "data-total") == "100"
        tab.page.click('#list tr[data-place="rollouts/2.jsonl:1"]')
        tab.page.click("#raw summary")
        tab.page.click('.modes button:has-text("advantage")')
        assert "1.5 to 1.5" in tab.text(".scale")
    assert {url.split("#")[0] for url in tab.requests} <= {"about:blank", tab.url, "data:,", f"{tab.url}/"}
    assert tab.wrong == []
    tab.context.close()


def test_the_report_opens_offline_with_the_same_question_before_and_after(browser, tmp_path):
    run = write_large_run(tmp_path / "mine", steps=2, groups=1, n=2)
    for step, score in ((0, 0.0), (2, 1.0)):
        answer = {"score": score, "answer": "72" if score else "27"}
        write_rollouts(run / "validation", step, [make_record(step, n, group=n, **answer) for n in range(2)])
    before = {"value": 0.5, "low": 0.4, "high": 0.6}
    (run / "summary.json").write_text(json.dumps({"before": {"success": before}, "after": {"success": 1.0}}))
    tab = Tab(browser, f"file://{write_report(run, title='My run')}")
    tab.open("")
    assert tab.text("h1") == "My run"
    titles = tab.texts("#change > h2, #before-after > h2, main > h2")
    assert titles == ["The same question, before and after", "Before and after", "Progress"]
    assert [label.partition("/")[0] for label in tab.texts("#change h3")] == ["Before, step 0", "After, step 2"]
    assert "It is 27." in tab.texts("#change .column")[0]
    assert "It is 72." in tab.texts("#change .column")[1]
    assert "50.0 % → 1" in tab.text('[data-headline="success"]')
    assert "before 40.0–60.0 %" in tab.text('[data-headline="success"]')
    assert len(tab.texts("#samples .columns")) == 2
    assert "total_training_steps" in tab.text("#configuration")
    tab.page.click("#change h3 a >> nth=1")
    tab.page.click("#raw summary")
    tab.page.wait_for_selector(".tok")
    assert {url.split("#")[0] for url in tab.requests} <= {"about:blank", tab.url, "data:,", f"{tab.url}/"}
    assert tab.wrong == []
    tab.context.close()


def test_of_several_evaluations_at_one_step_a_page_holds_the_last_one_alone(tmp_path):
    for name in ("validation", "eval-1", "eval-2"):
        write_rollouts(tmp_path / name, 0, [make_record(0, number) for number in range(2)])
    assert write_page(tmp_path, tmp_path / "run.html") == 2
    index = RunView(".", tmp_path).index
    assert len({row.group for row in index.rows}) == 3 * len({row.uid for row in index.rows})


def test_a_folder_without_a_run_is_no_page(tmp_path):
    with pytest.raises(DataError, match="holds no rollouts and no metrics"):
        write_page(tmp_path, tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def test_a_trajectory_is_one_file_with_the_others_of_its_prompt(browser, folder, tmp_path):
    with pytest.raises(DataError, match="no trajectory"):
        write_page(folder / "other", tmp_path / "one.html", "rollouts/2.jsonl:999")
    assert write_page(folder / "other", tmp_path / "one.html", "rollouts/2.jsonl:2") == 4
    tab = Tab(browser, f"file://{tmp_path}/one.html")
    tab.open("")
    assert tab.text("h1") == "rollouts/2.jsonl:2"
    tab.page.click("#raw summary")
    tab.page.wait_for_selector(".tok")
    assert len(tab.texts(".tok")) == 7
    assert tab.texts("#nav a") == []
    tab.page.click('a:has-text("side by side")')
    tab.until("document.querySelectorAll('.column').length == 4")
    assert tab.wrong == []
    tab.context.close()


def test_what_is_not_there_is_said(tab):
    for where in ("trajectory?run=big&place=rollouts/50.jsonl:999", "overview?run=absent"):
        tab.page.goto("about:blank")
        tab.page.goto(f"{tab.url}/#/{where}")
        tab.page.wait_for_selector('[role="alert"]')
    assert "no such run" in tab.text("main")
    tab.wrong = [text for text in tab.wrong if "404" not in text and "422" not in text]


def test_a_first_step_that_has_not_ended_is_not_called_a_missing_logger(browser, tmp_path):
    run = write_large_run(tmp_path / "run", steps=1, groups=1, n=2)
    (run / "metrics.jsonl").write_text("")  # as a run leaves it until then
    with serving(tmp_path) as url:
        tab = Tab(browser, url)
        tab.open("overview?run=run")
        assert tab.text(".charts") == "No metrics yet: the first step has not ended."
        (run / "metrics.jsonl").unlink()
        tab.open("overview?run=run")
        assert tab.text(".charts") == "No metrics (trainer.logger needs jsonl)."
        tab.context.close()
    assert tab.wrong == []


@pytest.mark.slow
def test_a_job_is_followed_while_it_trains(browser, tiny, tmp_path):
    given = ("trainer.total_training_steps=30", "trainer.rollout_token_values=true", "trainer.save_freq=5")
    command = [sys.executable, "-m", "etude.cli.main", "train", *tiny.arguments(tmp_path / "run", *given)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
        try:
            until(lambda: (tmp_path / "run" / "rollouts" / "1.jsonl").exists(), job)
            job.send_signal(signal.SIGSTOP)  # so that it goes on only once somebody looks
            with serving(tmp_path / "run") as url:
                follow(Tab(browser, url), job)
        finally:
            job.kill()
            job.wait()


def until(condition, job):
    while not condition():
        assert job.poll() is None, "the job ended"
        time.sleep(0.5)


def follow(tab, job):
    tab.page.set_default_timeout(4 * PATIENCE)
    tab.open("overview")
    first = tab.page.get_attribute(".charts", "data-step")
    job.send_signal(signal.SIGCONT)
    tab.until(f"Number(document.querySelector('.charts').dataset.step) > {first}")
    assert job.wait(4 * PATIENCE / 1000) == 0
    tab.until("document.querySelector('.charts').dataset.step == 30")
    assert "complete" in tab.text("main")
    tab.open("timeline?step=29")
    assert len(tab.texts("a.lane")) == 8
    assert {"waited", "generation", "reward"} <= set(tab.texts(".legend li"))
    assert "not when" not in tab.text("main")
    tab.open("trajectories")
    assert tab.page.get_attribute("#list", "data-total") == "240"
    tab.page.click("#list tbody tr >> nth=0")
    tab.page.click("#raw summary")
    tab.page.click('.modes button:has-text("entropy")')
    assert "trainer.rollout_token_values" not in tab.text(".scale")
    tab.page.hover(".tok >> nth=1")
    for part in ("advantage", "in the update", "entropy", "mismatch"):
        assert part in tab.text(".numbers")
    assert tab.wrong == []
    tab.context.close()


@pytest.mark.parametrize(("place", "value"), MALFORMED, ids=lambda each: str(each)[:40])
def test_a_malformed_record_is_shown_or_refused_in_one_line(tmp_path, place, value):
    run = RunView(".", write_malformed(tmp_path, place, value))
    [row] = run.index.rows
    found = answers.trajectory(run, row.place)
    assert found["sequences"][0]["blocks"][0]["text"] == "Question 0: 12 * 6?"
    assert answers.why(run)["step"] == 1
    try:
        said = str(answers.tokens(run, row.place, 0, 0)["total"])
    except DataError as error:
        said = str(error)
    assert said == "7" or "malformed" in said
