"""`ViewApp`: browses the rollouts of a run in a terminal: steps, trajectories, search, filters, groups, live updates.

Invariant: the app reads files through `RolloutIndex` and writes nothing. Reading and searching run in threads, and lists
render only the visible lines, so that a run of any size opens instantly. Every key is in `BINDINGS`, hence in the help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from etude.errors import ConfigError, DataError
from etude.run_folder import is_locked
from etude.viewer.index import SORTS, RolloutIndex, Selection, count_values, split_order
from etude.viewer.query import HELP, TERMS, Filter, parse_query, quote_term
from etude.viewer.rows import FLAGS, Row
from etude.viewer.tui_pages import GroupPage, LineView, Pick, TextPage, TrajectoryPage, clean_line

_SEARCH_SECONDS = 60.0
_READ_SECONDS = 0.3  # per refresh of the index, between two updates of the screen
_MAX_EXCERPT_BYTES = 2**22  # longer dump lines get no excerpt in the list
_KEPT_EXCERPTS = 2000


@dataclasses.dataclass(frozen=True)
class StepLine:
    """An entry of the step list; if `step` is None, the whole split; if `split` is None too, everything."""

    split: str | None
    step: int | None
    scores: Sequence[float | None]

    @cached_property
    def mean(self) -> float | None:
        """The mean score; None if there is none."""
        known = [score for score in self.scores if score is not None]
        return sum(known) / len(known) if known else None


class ViewApp(App[None]):
    """The application over `index`; starts with the filter `query`."""

    TITLE = "etude view"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("f", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("c", "clear", "Clear"),
        Binding("g", "group", "Group"),
        Binding("l", "follow", "Live"),
        Binding("b", "bad", "Bad lines", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
    ]
    CSS = """
    #status { height: 1; background: $primary; color: $text; }
    #columns { height: 1; color: $text-muted; padding-left: 27; }
    #steps { width: 26; border-right: solid $panel; }
    #head { height: 1; }
    #query { display: none; height: 3; }
    """

    def __init__(self, index: RolloutIndex, query: str = "", sort: str = "step", *, every: float = 1.0) -> None:
        super().__init__()
        self.index, self.filter_text = index, query
        self._filter, self._sort, self._descending = parse_query(query), sort, False
        self._every, self._reading, self._follows, self._searching = every, False, False, False
        self._refusal = ""  # why the last query was refused
        self._selection = Selection([], 0, 0)
        self._excerpts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="status")
        yield Static(Text(_row_cells("step", "score", "end", "turns", "calls", "tokens", "", "response")), id="columns")
        with Horizontal():
            yield LineView[StepLine](_step_text, id="steps")
            yield LineView[Row](self._row_text, id="rows")
        yield Input(placeholder=HELP, id="query", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self._rows.focus()
        self.set_interval(self._every, self._read_more)
        self._read_more()

    @property
    def _steps(self) -> LineView[StepLine]:
        return self.query_one("#steps", LineView)

    @property
    def _rows(self) -> LineView[Row]:
        return self.query_one("#rows", LineView)

    # -- reading and selecting, in threads -----------------------------------------------------------------------

    def _read_more(self) -> None:
        if not self._reading:
            self._reading = True
            self._refresh_index()

    @work(thread=True, group="read")
    def _refresh_index(self) -> None:
        changed, worker = False, get_current_worker()
        while not worker.is_cancelled:
            changed |= self.index.refresh(_READ_SECONDS)
            if self.index.complete:
                break
            if changed:
                self.call_from_thread(self._show_index)
        self._reading = False
        if changed and not worker.is_cancelled:
            self.call_from_thread(self._show_index)

    def _show_index(self) -> None:
        self._excerpts.clear()
        lines, current = list_steps(self.index.rows), self._steps.current
        listed = (current.split, current.step) if current else ()  # what the entry lists, whatever its rows are now
        at = next((n for n, line in enumerate(lines) if (line.split, line.step) == listed), 0)
        if self._follows:  # the last step of the first split, which is training if there is any
            first = next((line.split for line in lines if line.step is not None), None)
            at = max((n for n, line in enumerate(lines) if line.split == first), default=0)
        self._steps.show(lines, at)
        self._select()

    def _select(self) -> None:
        wanted, at = self._filter, self._steps.current
        if at is not None and at.split is not None:
            wanted = dataclasses.replace(wanted, split=at.split)
        if at is not None and (step := at.step) is not None:
            low, high = (step if limit is None else limit for limit in (wanted.min_step, wanted.max_step))
            wanted = dataclasses.replace(wanted, min_step=max(step, low), max_step=min(step, high))
        self._searching, self._refusal = bool(wanted.text), ""
        self._show_status()
        self._select_rows(wanted)

    @work(thread=True, exclusive=True, group="select")
    def _select_rows(self, wanted: Filter) -> None:
        worker = get_current_worker()
        try:
            selection = self.index.select(
                wanted, self._sort, self._descending, seconds=_SEARCH_SECONDS, stop=lambda: worker.is_cancelled
            )
        except ConfigError as error:
            self.call_from_thread(self._refuse, str(error))
            return
        if not worker.is_cancelled:
            self.call_from_thread(self._show_rows, selection)

    def _show_rows(self, selection: Selection) -> None:
        current = self._rows.current
        self._selection, self._searching = selection, False
        places = {row.place: n for n, row in enumerate(selection.rows)}
        cursor = places.get(current.place, 0) if current and self._rows.cursor else 0
        self._rows.show(selection.rows, len(selection.rows) - 1 if self._follows else cursor)
        self._show_status()

    def _refuse(self, message: str) -> None:
        self._searching, self._refusal = False, clean_line(message)
        self._show_status()

    # -- display -------------------------------------------------------------------------------------------------

    def _show_status(self) -> None:
        selection, status = self._selection, self.query_one("#status", Static)
        if self._refusal:
            status.update(Text(self._refusal, "bold white on red", overflow="ellipsis"))
            return
        running = any(map(is_locked, (self.index.path, self.index.path.parent)))  # a killed run holds no lock
        parts = [
            clean_line(self.index.path.name or str(self.index.path)),
            f"{len(selection.rows):,} of {len(self.index.rows):,}",
            f"{self._sort} {'↓' if self._descending else '↑'}",
            clean_line(self.filter_text),
            "searching …" if self._searching else "",
            "" if selection.complete else f"searched {selection.searched:,} of {selection.total:,}",
            "" if self.index.complete else "reading …",
            f"{self.index.bad_lines:,} bad lines (b)" if self.index.bad_lines else "",
            "● live" if running and self._follows else "● running (l follows)" if running else "",
            "○ following, nothing is running" if self._follows and not running else "",
        ]
        status.update(Text(" · ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis"))

    def _row_text(self, row: Row, _width: int) -> Text:
        score = "–" if row.score is None else f"{row.score:.3g}"
        flags = "".join(name[0].upper() for name in row.flags)
        numbers = (str(row.turns or ""), str(row.calls or ""), str(row.response_tokens or ""))
        text = Text(_row_cells(str(row.step), score, row.stop_reason.replace("_", " "), *numbers, flags, ""))
        text.stylize("green" if (row.score or 0) > 0 else "red", 6, 12)
        return text.append(self._excerpt(row), "dim")

    def _excerpt(self, row: Row) -> str:
        if row.place not in self._excerpts:
            if len(self._excerpts) > _KEPT_EXCERPTS:
                self._excerpts.clear()
            try:
                text = self.index.texts(row)[1] if row.length <= _MAX_EXCERPT_BYTES else "…"
            except DataError:
                text = "…"  # the file was replaced meanwhile; the next refresh picks it up
            self._excerpts[row.place] = clean_line(text, 300)
        return self._excerpts[row.place]

    # -- keys ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables the keys of the lists while another page is open."""
        of_lists = ("search", "filter", "sort", "reverse", "clear", "group", "follow", "bad")
        return action not in of_lists or len(self.screen_stack) == 1

    @on(LineView.Moved, "#steps")
    def _step_moved(self) -> None:
        self._select()

    @on(LineView.Chosen, "#steps")
    def _step_chosen(self) -> None:
        self._rows.focus()

    @on(LineView.Chosen, "#rows")
    def _row_chosen(self) -> None:
        self.push_screen(TrajectoryPage(self.index, self._selection.rows, self._rows.cursor))

    def action_search(self) -> None:
        line = self.query_one("#query", Input)
        line.display, line.value = True, self.filter_text
        line.focus()

    @on(Input.Submitted, "#query")
    def _query_submitted(self, event: Input.Submitted) -> None:
        try:
            self._search(event.value)
        except ConfigError as error:
            self._refuse(str(error))
            return
        self.query_one("#query").display = False
        self._rows.focus()

    def _search(self, text: str) -> None:
        self._filter, self.filter_text = parse_query(text), text
        self._select()

    def on_key(self, event: object) -> None:
        """Closes the search input on Escape."""
        line = self.query_one("#query", Input) if len(self.screen_stack) == 1 else None
        if line is not None and line.has_focus and getattr(event, "key", "") == "escape":
            line.display, self._refusal = False, ""
            self._rows.focus()
            self._show_status()

    def action_filter(self) -> None:
        def add(term: str | None) -> None:
            if term:
                self._search(f"{term} {self.filter_text}".strip())

        counts = count_values(self.index.rows)
        entries = [
            (quote_term(term, value), f"{term}: {value} ({count:,})  {FLAGS.get(value, '') if term == 'flag' else ''}")
            for term, field in TERMS.items()
            for value, count in counts[field].most_common(12)
            if value
        ]
        self.push_screen(Pick(entries), add)

    def action_sort(self) -> None:
        def sort_by(name: str | None) -> None:
            if name:
                self._sort = name
                self._select()

        self.push_screen(Pick([(name, name.replace("_", " ")) for name in SORTS]), sort_by)

    def action_reverse(self) -> None:
        self._descending = not self._descending
        self._select()

    def action_clear(self) -> None:
        self._search("")

    def action_group(self) -> None:
        if self._rows.current is not None:
            self.push_screen(GroupPage(self.index, self._rows.current))

    def action_follow(self) -> None:
        """Toggles live mode, which stays at the newest step of a running job."""
        self._follows = not self._follows
        self._show_index()

    def action_bad(self) -> None:
        lines = [f"{line.place}  {line.reason}" for line in self.index.bad] or ["every line could be read"]
        self.push_screen(TextPage(f"{self.index.bad_lines:,} bad lines", Text("\n".join(map(clean_line, lines)))))

    def action_help(self) -> None:
        self.push_screen(TextPage("keys", help_text()))


def help_text() -> Text:
    """Lists the keys of every page, the search syntax and the flags."""
    text = Text()
    pages = (("lists", ViewApp), ("list", LineView), ("trajectory", TrajectoryPage), ("group", GroupPage))
    for title, page in pages:
        text.append(f"{title}\n", "bold")
        for binding in page.BINDINGS:
            assert isinstance(binding, Binding)
            key = binding.key.replace("slash", "/").replace("question_mark", "?").replace(",", ", ")
            text.append(f"  {key:<18}", "cyan").append(f"{binding.description}\n")
    text.append("search\n", "bold").append(f"  {HELP}\n")
    text.append("flags\n", "bold")
    for name, meaning in FLAGS.items():
        text.append(f"  {name[0].upper()}  ", "cyan").append(f"flag:{name}  {meaning}\n")
    return text


def list_steps(rows: Sequence[Row]) -> list[StepLine]:
    """Returns the step list: all rows, then each split (if there are several) and its steps."""
    scores: dict[str, dict[int, list[float | None]]] = {}
    for row in rows:
        scores.setdefault(row.split, {}).setdefault(row.step, []).append(row.score)
    lines = [StepLine(None, None, [row.score for row in rows])]
    for split in sorted(scores, key=split_order):
        steps = scores[split]
        if len(scores) > 1:
            lines.append(StepLine(split, None, [score for of in steps.values() for score in of]))
        lines += [StepLine(split, step, steps[step]) for step in sorted(steps)]
    return lines


def _step_text(line: StepLine, width: int) -> Text:
    name = str(line.step) if line.step is not None else "all" if line.split is None else line.split or "other"
    mean = "" if line.mean is None else f"{line.mean:.2f}"
    if len(name := clean_line(name)) > width - 15:  # of `evaluation/greedy` the end tells more
        name = name.rpartition("/")[2][-(width - 15) :]
    text = Text(f"{name:>{max(width - 14, 1)}} ", "" if line.step is not None else "bold")
    return text.append_text(Text(f"{len(line.scores):>6} {mean:>6}"))


def _row_cells(step: str, score: str, end: str, turns: str, calls: str, tokens: str, flags: str, rest: str) -> str:
    return f"{step:>5} {score:>6} {clean_line(end)[:10]:<10} {turns:>2} {calls:>2} {tokens:>5} {flags:<3} {rest}"
