"""`LineView`: a virtualized list that renders only the visible lines; also sanitizes and wraps text for a terminal.

Invariant: text is shown literally. Markup is not interpreted; control characters (hence escape sequences), bidirectional
overrides and lone surrogates are replaced. No line is wider than the view, in cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from etude.viewer.conversations import sanitize_text

T = TypeVar("T")

MAX_LINES = 20_000  # of wrapped text; the rest is cut
_CONSOLE = Console(width=80, color_system="truecolor", force_terminal=True)


def clean(text: str) -> str:
    """Sanitizes `text` for a terminal; keeps newlines and tabs."""
    return sanitize_text(text.encode("utf-8", "replace").decode())


def clean_line(text: str, limit: int = 400) -> str:
    """Sanitizes the first `limit` characters of `text` and joins them on one line."""
    return " ".join(clean(text[:limit]).split())


def wrap(texts: Iterable[Text], width: int) -> list[Text]:
    """Wraps the texts into at most `MAX_LINES` lines of `width` cells; if there are more, the last line says so."""
    width = max(width, 8)
    lines = list(islice((line for text in texts for line in _lines_of(text, width)), MAX_LINES + 1))
    return lines if len(lines) <= MAX_LINES else [*lines[:-1], Text("… and more", "dim")]


def _lines_of(text: Text, width: int) -> Iterator[Text]:
    if text.spans:
        yield from text.wrap(_CONSOLE, width) or [Text()]
        return
    for line in text.plain.split("\n"):  # for text in a single style, faster than Rich's wrapping
        if len(line) <= width and line.isascii() and "\t" not in line:
            yield Text(line, text.style)
        else:
            yield from Text(line, text.style).wrap(_CONSOLE, width, tab_size=4)


class LineView(ScrollView, Generic[T], can_focus=True):
    """A list of `items`, each rendered by `render_item` when visible. With `cursor`, one item is selected."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown,space", "move_page(1)", "Page down", show=False),
        Binding("home", "move_to(0)", "First", show=False),
        Binding("end,G", "move_to(-1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

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

    def __init__(self, render_item: Callable[[T, int], Text], *, cursor: bool = True, id: str | None = None) -> None:
        super().__init__(id=id)
        self._render_item, self._has_cursor = render_item, cursor
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
        self.cursor = max(min(self.cursor if cursor is None else cursor, len(items) - 1), 0)
        self._reveal()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Renders line `y` of the view."""
        number, width = self.scroll_offset.y + y, self.scrollable_content_region.width
        if number >= len(self.items):
            return Strip.blank(width, self.rich_style)
        text = self._render_item(self.items[number], width)
        text.truncate(width, overflow="ellipsis", pad=True)
        style = self.rich_style
        if self._has_cursor and number == self.cursor:
            style += self.get_component_rich_style("line--cursor" if self.has_focus else "line--unfocused")
        text.no_wrap, text.end = True, ""
        return Strip(text.render(_CONSOLE), width).crop(0, width).apply_style(style)

    COMPONENT_CLASSES: ClassVar[set[str]] = {"line--cursor", "line--unfocused"}
    DEFAULT_CSS = """
    LineView { height: 1fr; scrollbar-size-vertical: 1; }
    LineView > .line--cursor { background: $primary; color: $text; text-style: bold; }
    LineView > .line--unfocused { background: $surface-lighten-2; }
    """

    def action_move(self, by: int) -> None:
        """Moves the cursor, or scrolls if there is none."""
        self._go_to(self.cursor + by if self._has_cursor else self.scroll_offset.y + by)

    def action_move_page(self, by: int) -> None:
        """Moves by `by` pages."""
        self.action_move(by * max(self.scrollable_content_region.height - 1, 1))

    def action_move_to(self, number: int) -> None:
        """Moves to item `number`; -1 is the last."""
        self._go_to(number if number >= 0 else len(self.items) - 1)

    def action_choose(self) -> None:
        """Opens the current item."""
        if self._has_cursor and self.current is not None:
            self.post_message(self.Chosen(self))

    def _go_to(self, number: int) -> None:
        if not self._has_cursor:
            self.scroll_to(y=number, animate=False)
            return
        number = max(min(number, len(self.items) - 1), 0)
        if number != self.cursor:
            self.cursor = number
            self._reveal()
            self.refresh()
            self.post_message(self.Moved(self))

    def _reveal(self) -> None:
        if self._has_cursor:
            self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)

    def on_click(self, event: events.Click) -> None:
        """Moves the cursor to the clicked line; a second click opens it."""
        number = self.scroll_offset.y + event.y
        if self._has_cursor and number < len(self.items):
            again = number == self.cursor
            self._go_to(number)
            if again:
                self.action_choose()
