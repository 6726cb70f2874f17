"""What `etude view` opens over its lists: a trajectory, its tokens, the rollouts of one prompt side by side; and `LineView`,
the list itself.

Invariant: text is shown literally. Markup is not interpreted; control characters (hence escape sequences), bidirectional
overrides and lone surrogates are replaced. A page shows one record per column, of bounded length; for a record that cannot
be read it shows the error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from etude.dumps import sequences_of, token_values
from etude.errors import DataError
from etude.viewer.answers import describe_record
from etude.viewer.conversations import PROVENANCE_COLOURS, sanitize_text
from etude.viewer.explain import Token, list_tokens
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import Row
from etude.viewer.runs import Decode, find_decoder

T = TypeVar("T")

_CONSOLE = Console(width=80, color_system="truecolor", force_terminal=True)
_MAX_TEXT = 100_000  # characters of a block
_MAX_CALL = 2000  # characters of a call's arguments or result
_MAX_TOKENS = 200_000
_VALUES = {"advantages": "advantage", "entropys": "entropy"}  # per-token values shown if the dump has them → title
_MAX_DIFF = 4_000  # words
_MAX_COLUMN = 20_000  # characters of a rollout in a group
_COLUMN = 38  # minimum width of a group's column, in cells


def clean(text: str) -> str:
    """Sanitizes `text` for a terminal; keeps newlines and tabs."""
    return sanitize_text(text.encode("utf-8", "replace").decode())


def clean_line(text: str, limit: int = 400) -> str:
    """Sanitizes the first `limit` characters of `text` and joins them on one line."""
    return " ".join(clean(text[:limit]).split())


class LineView(ScrollView, Generic[T], can_focus=True):
    """A list with a cursor, of which only the visible lines are rendered, each by `render_item`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown,space", "move_page(1)", "Page down", show=False),
        Binding("home", "move_to(0)", "First", show=False),
        Binding("end,G", "move_to(-1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"line--cursor", "line--unfocused"}
    DEFAULT_CSS = """
    LineView { height: 1fr; scrollbar-size-vertical: 1; }
    LineView > .line--cursor { background: $primary; color: $text; text-style: bold; }
    LineView > .line--unfocused { background: $surface-lighten-2; }
    """

    class Moved(Message):
        """Posted when the cursor moves to another item."""

        def __init__(self, view: LineView[Any]) -> None:
            super().__init__()
            self.view = view

        @property
        def control(self) -> LineView[Any]:
            """The view, so that `@on` can match its selector."""
            return self.view

    class Chosen(Moved):
        """Posted on Enter or a click on the current item."""

    def __init__(self, render_item: Callable[[T, int], Text], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._render_item = render_item
        self.items: Sequence[T] = ()
        self.cursor = 0

    @property
    def current(self) -> T | None:
        """The item under the cursor; None if there is none."""
        return self.items[self.cursor] if self.cursor < len(self.items) else None

    def show(self, items: Sequence[T], cursor: int | None = None) -> None:
        """Replaces the items; the cursor keeps its index, or moves to `cursor`."""
        self.items = items
        self.virtual_size = Size(1, len(items))
        self._set_cursor(self.cursor if cursor is None else cursor)

    def _set_cursor(self, number: int) -> None:
        self.cursor = max(min(number, len(self.items) - 1), 0)
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number, width = self.scroll_offset.y + y, self.scrollable_content_region.width
        if number >= len(self.items):
            return Strip.blank(width, self.rich_style)
        text = self._render_item(self.items[number], width)
        text.truncate(width, overflow="ellipsis", pad=True)
        style = self.rich_style
        if number == self.cursor:
            style += self.get_component_rich_style("line--cursor" if self.has_focus else "line--unfocused")
        text.no_wrap, text.end = True, ""
        return Strip(text.render(_CONSOLE), width).crop(0, width).apply_style(style)

    def action_move(self, by: int) -> None:
        number = max(min(self.cursor + by, len(self.items) - 1), 0)
        if number != self.cursor:
            self._set_cursor(number)
            self.post_message(self.Moved(self))

    def action_move_page(self, by: int) -> None:
        self.action_move(by * max(self.scrollable_content_region.height - 1, 1))

    def action_move_to(self, number: int) -> None:
        """Moves to item `number`; -1 is the last."""
        self.action_move((number if number >= 0 else len(self.items) - 1) - self.cursor)

    def action_choose(self) -> None:
        if self.current is not None:
            self.post_message(self.Chosen(self))

    def on_click(self, event: events.Click) -> None:
        """Moves the cursor to the clicked line; a second click opens it."""
        by = self.scroll_offset.y + event.y - self.cursor
        self.action_move(by) if by else self.action_choose()


class TextView(VerticalScroll):
    """Text that wraps and scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", "Up", show=False),
        Binding("j", "scroll_down", "Down", show=False),
        Binding("space", "page_down", "Page down", show=False),
        Binding("G", "scroll_end", "Last", show=False),
    ]

    def __init__(self, text: Text | None = None) -> None:
        super().__init__()
        self._text = text or Text()

    def compose(self) -> ComposeResult:
        yield Static(self._text)

    def show(self, text: Text) -> None:
        self.query_one(Static).update(text)


class TextPage(Screen[None]):
    """A title and text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", "Back")]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._head, self._text = title, text

    def compose(self) -> ComposeResult:
        yield Static(Text(self._head, "bold reverse"), id="head")
        yield TextView(self._text)
        yield Footer()


class Pick(ModalScreen[str | None]):
    """A menu of entries (value, label); returns the chosen value, None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Back")]
    DEFAULT_CSS = "Pick { align: center middle; } Pick > OptionList { width: 50; height: auto; max-height: 80%; }"

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._entries = entries

    def compose(self) -> ComposeResult:
        yield OptionList(*(Option(Text(clean_line(label)), id=str(n)) for n, (_, label) in enumerate(self._entries)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Returns the chosen value to the caller of the screen."""
        self.dismiss(self._entries[int(event.option.id or 0)][0])


class TrajectoryPage(Screen[None]):
    """One trajectory of a list, as a conversation or token by token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back"),
        Binding("n,right", "step(1)", "Next"),
        Binding("p,left", "step(-1)", "Previous"),
        Binding("t", "tokens", "Tokens"),
        Binding("g", "group", "Group"),
        Binding("question_mark", "app.help", "Help"),
    ]

    def __init__(self, index: RolloutIndex, rows: Sequence[Row], number: int) -> None:
        super().__init__()
        self._index, self._rows, self._number = index, rows, number
        self._record: dict[str, Any] = {}
        self._decode: Decode | None = None
        self._with_tokens = False

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield TextView()
        yield LineView[Token | str](_token_line)
        yield Footer()

    def on_mount(self) -> None:
        self._open()

    def _open(self) -> None:
        row = self._rows[self._number]
        head = f"{clean_line(row.place)} · {self._number + 1:,} of {len(self._rows):,} · {describe(row)}"
        try:
            self._record = self._index.read(row)
        except DataError as error:
            self._record = {"output": str(error)}
        self.query_one("#head", Static).update(Text(head, "bold reverse", no_wrap=True, overflow="ellipsis"))
        self._show()

    def _show(self) -> None:
        text, tokens = self.query_one(TextView), self.query_one(LineView)
        text.display, tokens.display = not self._with_tokens, self._with_tokens
        (tokens if self._with_tokens else text).focus()
        if self._with_tokens:
            self._decode = self._decode or find_decoder(self._index.root)
            tokens.show([*islice(_token_items(self._record, self._decode), _MAX_TOKENS)], 0)
        else:
            text.show(Text("\n").join(trajectory_texts(self._record)))
            text.scroll_home(animate=False)

    def action_step(self, by: int) -> None:
        self._number = max(0, min(self._number + by, len(self._rows) - 1))
        self._open()

    def action_tokens(self) -> None:
        self._with_tokens = not self._with_tokens
        self._show()

    def action_group(self) -> None:
        self.app.push_screen(GroupPage(self._index, self._rows[self._number]))


class GroupPage(Screen[None]):
    """The rollouts of one prompt in one step, side by side, with an optional word diff."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back"),
        Binding("left", "shift(-1)", "Previous"),
        Binding("right", "shift(1)", "Next"),
        Binding("d", "diff", "Diff with the first"),
        Binding("up,k", "scroll(-1)", "Up", show=False),
        Binding("down,j", "scroll(1)", "Down", show=False),
        Binding("pageup", "scroll(-10)", "Page up", show=False),
        Binding("pagedown,space", "scroll(10)", "Page down", show=False),
        Binding("enter", "open", "Open"),
    ]
    DEFAULT_CSS = "GroupPage Vertical { width: 1fr; border-right: solid $panel; }"

    def __init__(self, index: RolloutIndex, row: Row) -> None:
        super().__init__()
        self._index, self._rows = index, index.siblings(row) or [row]
        self._first = next((n for n, each in enumerate(self._rows) if each.place == row.place), 0)
        self._with_diff = False

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="prompt")
        yield Horizontal(id="siblings")
        yield Footer()

    async def on_resize(self) -> None:
        await self._show()

    async def _show(self) -> None:
        fitting = max(min(self.size.width // _COLUMN, len(self._rows)), 1)
        shown = [*self._rows[self._first :], *self._rows[: self._first]][:fitting]
        texts = [self._texts(row) for row in shown]
        head = f"prompt {clean_line(shown[0].uid)} · step {shown[0].step} · {len(self._rows)} rollouts"
        scores = " ".join("–" if row.score is None else f"{row.score:g}" for row in self._rows[:32])
        title = Text(f"{head} · scores {scores}", "bold reverse", no_wrap=True, overflow="ellipsis")
        self.query_one("#head", Static).update(title)
        self.query_one("#prompt", Static).update(Text(clean_line(texts[0][0][-2000:], 2000)[-300:], "dim"))
        bodies = [Text(clean(output)) for _, output in texts]
        if self._with_diff and len(bodies) > 1:
            pairs = [diff_texts(texts[0][1], output) for _, output in texts[1:]]
            bodies = [pairs[0][0], *(other for _, other in pairs)]
        columns = self.query_one("#siblings", Horizontal)
        async with self.batch():
            await columns.remove_children()
            for row, body in zip(shown, bodies):
                view = TextView(body)
                view.can_focus = False
                title = Text(describe(row), "bold", no_wrap=True, overflow="ellipsis")
                await columns.mount(Vertical(Static(title), view))

    def _texts(self, row: Row) -> tuple[str, str]:
        try:
            prompt, output = self._index.texts(row)
            return prompt, output[:_MAX_COLUMN]
        except DataError as error:
            return "", str(error)

    async def action_shift(self, by: int) -> None:
        self._first = (self._first + by) % len(self._rows)
        await self._show()

    async def action_diff(self) -> None:
        self._with_diff = not self._with_diff
        await self._show()

    def action_scroll(self, by: int) -> None:
        for view in self.query(TextView):
            view.scroll_relative(y=by, animate=False)

    def action_open(self) -> None:
        self.app.push_screen(TrajectoryPage(self._index, self._rows, self._first))


def describe(row: Row) -> str:
    """One-line summary, such as `0.75 completed · 7 tokens · 1 calls · truncated`."""
    score = "no score" if row.score is None else f"{row.score:.3g}"
    counts = ((row.response_tokens, "tokens"), (row.calls, "calls"))
    parts = [f"{score} {clean_line(row.stop_reason)}".strip(), *(f"{count} {what}" for count, what in counts if count)]
    return " · ".join([*parts, *row.flags])


def trajectory_texts(record: Mapping[str, Any]) -> Iterator[Text]:
    """Yields a record's facts, its text blocks coloured by provenance, and its tool calls."""
    described = describe_record(record, _MAX_TEXT)
    main = described["sequences"][-1]
    yield Text("   ").join(Text.assemble((f"{clean_line(n)} ", "dim"), clean_line(value)) for n, value in main["facts"])
    for block in main["blocks"]:
        colour = PROVENANCE_COLOURS.get(block["kind"], "default")
        yield Text(f"── {clean_line(block['label'])} ──", f"bold {colour}")
        yield Text(clean(block["text"]).rstrip("\n"), colour)
        if block["omitted"]:
            yield Text(f"… {block['omitted']:,} more characters", "dim")
    for call in described["calls"]:
        head = Text.assemble("── call ", (f"{clean_line(str(call['name']))} ", "bold cyan"), f"turn {call['turn']}")
        for key, unit in (("seconds", " s"), ("reward", " reward")):
            if call[key] is not None:
                head.append(f" · {call[key]:.3g}{unit}")
        if call["error"]:
            head.append(f" · {clean_line(call['error'])}", "bold red")
        yield head.append(" ──")
        yield Text(clean_line(call["arguments"] or "", _MAX_CALL))
        yield Text("→ " + clean((call["response"] or "")[:_MAX_CALL]), "cyan")


def _token_items(record: Mapping[str, Any], decode: Decode | None) -> Iterator[Token | str]:
    values = "".join(f"{title:>9} " for name, title in _VALUES.items() if name in token_values(record))
    yield f"{'position':>8} {'id':>7} mask {'log-prob':>9} {values}{'reward':>7} version  text"
    try:
        sequences = sequences_of(record)
        for number, sequence in enumerate(sequences, 1):
            if len(sequences) > 1:
                yield f"── sequence {number} of {len(sequences)} ──"
            yield from list_tokens(sequence, decode, sequences)
    except DataError as error:
        yield str(error)


def _token_line(token: Token | str, _width: int) -> Text:
    if isinstance(token, str):
        return Text(" ".join(clean(token).splitlines()), "bold")
    log_prob = "" if token.log_prob is None else f"{token.log_prob:.4f}"
    reward, version = f"{token.reward:g}" if token.reward else "", "" if token.version is None else str(token.version)
    line = Text(f"{token.position:8} {token.id:7} {token.mask:4} ")
    colour = "green" if (token.log_prob or 0.0) > -1.0 else "yellow" if (token.log_prob or 0.0) > -3.0 else "red"
    line.append(f"{log_prob:>9} ", colour)
    for name in _VALUES:
        if name in token.values:
            line.append(f"{'' if (value := token.values[name]) is None else format(value, '.4f'):>9} ")
    line.append(f"{reward:>7} {version:>7}  ")
    return line.append(repr(clean(token.text[:200]))[1:-1], PROVENANCE_COLOURS[token.provenance.value])


def diff_texts(one: str, other: str) -> tuple[Text, Text]:
    """Returns both texts with the differing words highlighted; compares the first 4,000 words and spaces of each."""
    words = [re.findall(r"\s+|\S+", clean(text[:_MAX_COLUMN]))[:_MAX_DIFF] for text in (one, other)]
    left, right = Text(), Text()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, words[0], words[1]).get_opcodes():
        left.append("".join(words[0][a:b]), "dim" if kind == "equal" else "bold white on dark_red")
        right.append("".join(words[1][c:d]), "dim" if kind == "equal" else "bold white on dark_green")
    return left, right
