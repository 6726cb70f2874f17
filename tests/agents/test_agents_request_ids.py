"""Several requests of one trajectory under way at once: their names at the engine, its deterministic mode among them."""

import asyncio
from collections import Counter

import pytest
from agents_stage import CHAT, QUESTION, SAMPLING, Recorder, says
from failure_stage import MODEL
from hypothesis import given
from hypothesis import strategies as st

from etude.agents import TrajectoryClient
from etude.agents.client import RequestIds
from etude.errors import EngineError
from etude.inference import NativeEngine, NativeEngineOptions

PROMPT = CHAT.initial_ids(QUESTION)


class Book:
    """An engine that checks what it is told: nothing is opened twice, or closed that is not open."""

    def __init__(self):
        self.rows = {"t"}

    def open(self, names):
        assert not self.rows & set(names)
        self.rows |= set(names)

    def close(self, name):
        self.rows.remove(name)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_names_are_never_shared_and_none_waits_beside_one_under_way(moves):
    book = Book()
    ids = RequestIds(book, "t")
    under_way = []
    for begins, which in moves:
        if begins or not under_way:
            under_way.append(ids.enter())
        else:
            ids.leave(under_way.pop(which % len(under_way)))
        assert len(set(under_way)) == len(under_way)
        assert book.rows == (set(under_way) or {"t"})
    for name in under_way:
        ids.leave(name)
    assert book.rows == {"t"}


def test_after_the_end_nothing_is_opened_again():
    book = Book()
    ids = RequestIds(book, "t")
    first, other = ids.enter(), ids.enter()
    ids.leave(first)
    assert book.rows == {"t#1"}
    ids.end()
    ids.leave(other)
    assert book.rows == set()


def test_a_loop_that_asks_for_one_turn_after_the_other_has_one_name():
    engine = Recorder([says("a"), says("b")])

    async def main():
        client = TrajectoryClient(engine, "t")
        for _ in range(2):
            await client.generate(prompt_ids=PROMPT, sampling_params=SAMPLING.params(0, 5, ()))

    asyncio.run(main())
    assert ([name for name, *_ in engine.asked], engine.opened, engine.closed) == (["t", "t"], [], [])


def drawn(deterministic, several, order=(0, 1, 2)):
    """What three trajectories draw: each asks for `several` choices at once, then goes on with one of them."""
    engine = NativeEngine(MODEL, NativeEngineOptions(deterministic=deterministic, admit_every=2))
    found = {}

    async def one(number):
        client = TrajectoryClient(engine, f"t{number}")
        params = SAMPLING.params(number, 9, CHAT.stop_token_ids)
        choices = await asyncio.gather(
            *(
                client.generate(prompt_ids=PROMPT, sampling_params=params | {"max_tokens": 3 + 4 * k})
                for k in range(several)
            )
        )
        await asyncio.sleep(0.01 * order[number])  # the agent thinks
        follow = PROMPT + choices[-1].token_ids + PROMPT
        last = await client.generate(prompt_ids=follow, sampling_params=params)
        found[number] = [c.token_ids for c in choices] + [last.token_ids], [c.log_probs for c in [*choices, last]]
        client.end()
        engine.close(f"t{number}")

    async def main():
        engine.open([f"t{n}" for n in range(3)])
        await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(3))), 60)

    asyncio.run(main())
    assert engine._rows == {}
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("several", [1, 2, 4])
def test_choices_at_once_do_not_stall_the_engine_nor_draw_alike(deterministic, several):
    found = drawn(deterministic, several)
    for ids, _ in found.values():
        assert len(ids) == several + 1
        firsts = Counter(tuple(each[:3]) for each in ids)
        assert max(firsts.values()) == 1


def test_the_deterministic_mode_gives_the_same_bits_whoever_thinks_longer():
    assert drawn(True, 3) == drawn(True, 3, order=(2, 0, 1))


def test_one_of_several_that_fails_leaves_the_others_alone():
    class Failing(Recorder):
        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            if request_id == "t#1":
                raise EngineError("gone")
            await asyncio.sleep(0.01)
            return await super().generate(request_id, prompt_ids, sampling_params)

    engine = Failing(lambda *_: says("a"))

    async def main():
        client = TrajectoryClient(engine, "t")
        ask = [client.generate(prompt_ids=PROMPT, sampling_params=SAMPLING.params(0, 5, ())) for _ in range(3)]
        return await asyncio.gather(*ask, return_exceptions=True)

    first, failed, third = asyncio.run(main())
    assert first.token_ids == third.token_ids == says("a")
    assert isinstance(failed, EngineError)
    assert Counter(engine.opened) - Counter(engine.closed) == {}
