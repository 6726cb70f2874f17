"""Pages that `etude view` opens over its lists: a trajectory, its tokens, the rollouts of one prompt side by side.

Invariant: a page shows one record per column, bounded by `parse_conversation` and `wrap`; for a record that cannot be read
it shows the error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from etude.dumps import sequences_of, token_values
from etude.errors import DataError
from etude.viewer.conversations import PROVENANCE_COLOURS, parse_conversation
from etude.viewer.explain import Token, list_tokens
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import Row
from etude.viewer.tui_lines import LineView, clean, clean_line, wrap

_MAX_CALLS = 50
_MAX_TEXT = 200_000  # characters of a block
_VALUES = {"advantages": "advantage", "entropys": "entropy"}  # per-token values shown if the dump has them → title
_MAX_TOKENS = 200_000
_MAX_DIFF = 4_000  # words
_MAX_COLUMN = 20_000  # characters of a rollout in a group
_COLUMN = 38  # minimum width of a group's column, in cells


class TextPage(Screen[None]):
    """A title and wrapped text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", "Back")]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._head, self._text = title, text

    def compose(self) -> ComposeResult:
        """Title, text, key bar."""
        yield Static(Text(self._head, "bold reverse"), id="head")
        yield LineView[Text](lambda line, _: line.copy(), cursor=False, id="text")
        yield Footer()

    def on_resize(self, event: events.Resize) -> None:
        """Wraps the text to the new width."""
        self.query_one("#text", LineView).show(wrap([self._text], event.size.width - 2))


class Pick(ModalScreen[str | None]):
    """A menu of entries (value, label); returns the chosen value, None if cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Back")]
    DEFAULT_CSS = "Pick { align: center middle; } Pick > OptionList { width: 50; height: auto; max-height: 80%; }"

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._entries = entries

    def compose(self) -> ComposeResult:
        """The option list."""
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
        self._decode: Callable[[int], str] | None = None
        self._with_tokens = False

    def compose(self) -> ComposeResult:
        """Title, conversation view, token view, key bar."""
        yield Static(id="head")
        yield LineView[Text](lambda line, _: line.copy(), cursor=False, id="text")
        yield LineView[Token | str](_token_line, cursor=False, id="tokens")
        yield Footer()

    def on_mount(self) -> None:
        """Opens the chosen trajectory."""
        self._open()

    def on_resize(self) -> None:
        """Wraps the text to the new width."""
        self._show()

    def _open(self) -> None:
        row = self._rows[self._number]
        head = f"{clean_line(row.place)} · {self._number + 1:,} of {len(self._rows):,} · {describe(row)}"
        try:
            self._record = self._index.read(row)
        except DataError as error:
            self._record = {"output": str(error)}
        self.query_one("#head", Static).update(Text(head, "bold reverse", no_wrap=True, overflow="ellipsis"))
        self._show(0)

    def _show(self, cursor: int | None = None) -> None:
        text, tokens = self.query_one("#text", LineView), self.query_one("#tokens", LineView)
        text.display, tokens.display = not self._with_tokens, self._with_tokens
        (tokens if self._with_tokens else text).focus()
        if not self._with_tokens:
            text.show(wrap(trajectory_texts(self._record), self.size.width - 2), cursor)
            return
        self._decode = self._decode or find_decoder(self._index.root)
        tokens.show(list(islice(_token_items(self._record, self._decode), _MAX_TOKENS)))

    def action_step(self, by: int) -> None:
        """Moves `by` trajectories along the list."""
        self._number = max(0, min(self._number + by, len(self._rows) - 1))
        self._open()

    def action_tokens(self) -> None:
        """Toggles between tokens and conversation."""
        self._with_tokens = not self._with_tokens
        self._show()

    def action_group(self) -> None:
        """Shows the rollouts of the same prompt."""
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
        Binding("enter", "open", "Open the first"),
        Binding("question_mark", "app.help", "Help"),
    ]
    DEFAULT_CSS = """
    GroupPage Vertical { width: 1fr; border-left: solid $panel; }
    GroupPage #prompt { max-height: 4; }
    """

    def __init__(self, index: RolloutIndex, row: Row) -> None:
        super().__init__()
        self._index, self._rows = index, index.siblings(row) or [row]
        self._first = next((n for n, each in enumerate(self._rows) if each.place == row.place), 0)
        self._with_diff = False

    def compose(self) -> ComposeResult:
        """Title, prompt, columns, key bar."""
        yield Static(id="head")
        yield Static(id="prompt")
        yield Horizontal(id="siblings")
        yield Footer()

    async def on_mount(self) -> None:
        """Builds the columns."""
        await self._show()

    async def on_resize(self) -> None:
        """Rebuilds the columns, as many as fit."""
        await self._show()

    def _visible_rows(self) -> list[Row]:
        fitting = max(min(self.size.width // _COLUMN, len(self._rows)), 1)
        others = self._rows[self._first + 1 :] + self._rows[: self._first]
        return [self._rows[self._first], *others[: fitting - 1]]

    async def _show(self) -> None:
        shown = self._visible_rows()
        texts = [self._texts(row) for row in shown]
        head = f"prompt {clean_line(shown[0].uid)} · step {shown[0].step} · {len(self._rows)} rollouts"
        scores = " ".join("–" if row.score is None else f"{row.score:g}" for row in self._rows[:32])
        self.query_one("#head", Static).update(
            Text(f"{head} · scores {scores}", "bold reverse", no_wrap=True, overflow="ellipsis")
        )
        self.query_one("#prompt", Static).update(Text(clean_line(texts[0][0][-2000:], 2000)[-300:], "dim"))
        width = max(self.size.width // len(shown) - 3, 8)
        bodies = [Text(clean(output)) for _, output in texts]
        if self._with_diff and len(bodies) > 1:
            pairs = [diff_texts(texts[0][1], output) for _, output in texts[1:]]
            bodies = [pairs[0][0], *(other for _, other in pairs)]
        columns = self.query_one("#siblings", Horizontal)
        async with self.batch():
            await columns.remove_children()
            for row, body in zip(shown, bodies):
                view = LineView[Text](lambda line, _: line.copy(), cursor=False)
                view.can_focus = False
                title = Text(describe(row), "bold", no_wrap=True, overflow="ellipsis")
                await columns.mount(Vertical(Static(title), view))
                view.show(wrap([body], width))

    def _texts(self, row: Row) -> tuple[str, str]:
        try:
            prompt, output = self._index.texts(row)
            return prompt, output[:_MAX_COLUMN]
        except DataError as error:
            return "", str(error)

    async def action_shift(self, by: int) -> None:
        """Puts another rollout in the first column."""
        self._first = (self._first + by) % len(self._rows)
        await self._show()

    async def action_diff(self) -> None:
        """Toggles the word diff with the first column."""
        self._with_diff = not self._with_diff
        await self._show()

    def action_scroll(self, by: int) -> None:
        """Scrolls all columns."""
        for view in self.query(LineView):
            view.action_move(by)

    def action_open(self) -> None:
        """Opens the first column's trajectory."""
        self.app.push_screen(TrajectoryPage(self._index, self._rows, self._first))


def describe(row: Row) -> str:
    """One-line summary, such as `0.75 completed · 7 tokens · 1 calls · truncated`."""
    score = "no score" if row.score is None else f"{row.score:.3g}"
    counts = ((row.response_tokens, "tokens"), (row.calls, "calls"))
    parts = [f"{score} {clean_line(row.stop_reason)}".strip(), *(f"{count} {what}" for count, what in counts if count)]
    return " · ".join([*parts, *row.flags])


def trajectory_texts(record: Mapping[str, Any]) -> Iterator[Text]:
    """Yields a record's facts, its text blocks coloured by provenance, and its tool calls."""
    conversation = parse_conversation(record, _MAX_TEXT)
    assert conversation is not None
    facts = (Text.assemble((f"{clean_line(name)} ", "dim"), clean_line(value)) for name, value in conversation.facts)
    yield Text("   ").join(facts)
    for block in conversation.blocks:
        colour = PROVENANCE_COLOURS.get(block.kind, "default")
        yield Text(f"── {clean_line(block.label)} ──", f"bold {colour}")
        yield Text(clean(block.text).rstrip("\n"), colour)
        if block.omitted:
            yield Text(f"… {block.omitted:,} more characters", "dim")
    calls = record.get("tool_calls")
    for call in calls[:_MAX_CALLS] if isinstance(calls, list) else []:
        if isinstance(call, Mapping):
            yield from _call_texts(call)


def _call_texts(call: Mapping[str, Any]) -> Iterator[Text]:
    name, turn = clean_line(str(call.get("name"))), clean_line(str(call.get("turn")))
    head = Text.assemble("── call ", (f"{name} ", "bold cyan"), f"turn {turn}")
    for key, unit in (("seconds", " s"), ("reward", " reward")):
        if isinstance(value := call.get(key), int | float):
            head.append(f" · {value:.3g}{unit}")
    if call.get("error"):
        head.append(f" · {clean_line(str(call['error']))}", "bold red")
    yield head.append(" ──")
    yield Text(clean_line(str(call.get("arguments", "")), 2000))
    yield Text("→ " + clean(str(call.get("response", ""))[:2000]), "cyan")


def _token_items(record: Mapping[str, Any], decode: Callable[[int], str] | None) -> Iterator[Token | str]:
    values = "".join(f"{title:>9} " for name, title in _VALUES.items() if name in token_values(record))
    yield f"{'position':>8} {'id':>7} mask {'log-prob':>9} {values}{'reward':>7} version  text"
    try:
        sequences = sequences_of(record)
        for number, sequence in enumerate(sequences, 1):
            if len(sequences) > 1:
                yield f"── sequence {number} of {len(sequences)} ──"
            yield from list_tokens(sequence, _Decoder(decode) if decode else None)
    except DataError as error:
        yield str(error)


class _Decoder:
    """The part of the tokenizer interface that `list_tokens` uses."""

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self._decode, ids))


def _token_line(token: Token | str, _width: int) -> Text:
    if isinstance(token, str):
        return Text(clean_line(token), "bold")
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


def find_decoder(root: Path) -> Callable[[int], str] | None:
    """Returns a function from token id to text, using the tokenizer of a model in the run folder; None if there is none."""
    paths = [*root.glob("global_step_*/actor/huggingface/tokenizer.json"), *root.glob("*/tokenizer.json")]
    for path in paths[:1]:
        try:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(path))
        except Exception:  # tokenizers raises plain Exception for a malformed file
            return None
        return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
    return None


def diff_texts(one: str, other: str) -> tuple[Text, Text]:
    """Returns both texts with the differing words highlighted; compares the first 4,000 words and spaces of each."""
    words = [re.findall(r"\s+|\S+", clean(text[:_MAX_COLUMN]))[:_MAX_DIFF] for text in (one, other)]
    left, right = Text(), Text()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, words[0], words[1]).get_opcodes():
        left.append("".join(words[0][a:b]), "dim" if kind == "equal" else "bold white on dark_red")
        right.append("".join(words[1][c:d]), "dim" if kind == "equal" else "bold white on dark_green")
    return left, right
