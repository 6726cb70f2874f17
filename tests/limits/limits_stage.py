"""A cluster in miniature for tests: one ledger, several holders, and a network that delays, loses and repeats, all on
one clock that the test moves. After every step the promises that must hold at every moment are checked."""

import heapq
import itertools
import random

from etude.limits.holder import Holder
from etude.limits.ledger import Ledger
from etude.limits.limit import Limit

LEASE = 3.0
RECALL = 0.050  # no permit is idle for longer while somebody waits


class Process:
    """A holder with its link: one turn under way, one `listen` open, both said again until answered."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.names = itertools.count()
        self.holder = Holder(world.limit, LEASE, lambda: f"p{number}.{next(self.names)}")
        self.alive, self.paused = True, False
        self.inbox = []  # what arrives while the process is stopped
        self.entered, self.served = [], []
        self.in_use = {}  # ticket → lease
        self.speaking = self.listening = False
        self.tickets = itertools.count()

    def enter(self):
        ticket = (self.number, next(self.tickets))
        self.entered.append(ticket)
        lease = self.holder.take(self.world.now)
        self.take_in([(ticket, lease)] if lease is not None else self.holder.enter(ticket, self.world.now))
        return ticket

    def take_in(self, granted):
        for ticket, lease in granted:
            assert ticket not in self.in_use, "granted twice"
            assert ticket in self.entered, "granted after its cancellation"
            if self.world.limit.per_second is None:
                assert self.world.now < self.holder._valid_until, "granted under a lease that may have expired"
            if self.served:
                assert ticket > self.served[-1], "served out of order"
            self.served.append(ticket)
            self.entered.remove(ticket)
            self.in_use[ticket] = lease
        self.speak()

    def cancel(self, ticket):
        self.entered.remove(ticket)
        self.take_in(self.holder.cancel(ticket, self.world.now))

    def release(self, ticket, unused=False):
        self.take_in(self.holder.release(self.in_use.pop(ticket), self.world.now, unused))

    def speak(self):
        if self.speaking or self.paused or not self.alive:
            return
        turn = self.holder.next_turn()
        if turn is not None:
            self.speaking = True
            self.world.send(self, turn)
        if not self.listening and self.holder.introduced:
            self.listening = True
            self.world.send(self, self.holder.farewell() if self.holder.is_quiet else None)

    def hear(self, turn, reply, sent_at):
        if turn is None or turn.leaves:
            self.listening = False
        else:
            self.speaking = False
        if reply is not None:
            self.take_in(self.holder.hear(reply, turn, sent_at, self.world.now))
        self.speak()

    def resume(self):
        self.paused = False
        waiting, self.inbox = self.inbox, []
        for arguments in waiting:
            self.hear(*arguments)
        self.speak()

    def usable(self):
        """Leases that this process would still work under."""
        if not self.alive or self.world.now >= self.holder._valid_until:
            return 0
        return self.holder.held + self.holder.idle


class World:
    """The clock, the network, the ledger."""

    def __init__(self, limit: Limit, processes: int, seed: int, delay=0.01, loss=0.0):
        self.limit, self.now, self.chance = limit, 0.0, random.Random(seed)
        self.delay, self.loss = delay, loss
        self.keepers = itertools.count()
        self.ledger = Ledger(limit, LEASE, f"k{next(self.keepers)}", 0.0)
        self.queue, self.order = [], itertools.count()
        self.listeners = {}
        self.restarts = 0
        self.idle_since = {}
        self.processes = [Process(self, number) for number in range(processes)]
        self.later(0.25, self._tidy)

    def later(self, delay, action):
        heapq.heappush(self.queue, (self.now + delay, next(self.order), action))

    def travel(self):
        return self.chance.uniform(0.0, self.delay)

    def send(self, process, turn):
        """One call: it may be lost on its way there or on its way back, and is then tried again by the link."""
        sent_at, name, heard = self.now, process.holder.name, process.holder.heard
        lost_there, lost_back = self.chance.random() < self.loss, self.chance.random() < self.loss

        def fail():
            self.arrive(process, (turn, None, sent_at))

        def answer(reply):
            if lost_back:
                self.later(0.1, fail)
            else:
                self.later(self.travel(), lambda: self.arrive(process, (turn, reply, sent_at)))

        def at_keeper():
            if lost_there:
                return self.later(0.1, fail)
            if turn is not None:
                answer(self.ledger.turn(turn, self.now))
            else:
                reply = self.ledger.listen(name, heard, self.now)
                if reply.events or not reply.known:
                    answer(reply)
                else:
                    self.listeners[name] = answer
                    self.later(LEASE / 3, lambda: self.listeners.get(name) is answer and self.wake(name))
            self.settle()

        self.later(self.travel(), at_keeper)

    def wake(self, name):
        answer = self.listeners.pop(name, None)
        if answer is not None:
            answer(self.ledger.unheard(name))

    def arrive(self, process, arguments):
        if not process.alive:
            return
        if process.paused:
            process.inbox.append(arguments)
        else:
            process.hear(*arguments)

    def settle(self):
        """After the ledger did something: news leaves at once, and it is called again when something is due."""
        for name in list(self.ledger.fresh):
            self.wake(name)
        self.ledger.fresh.clear()
        due, ledger = self.ledger.next_event(), self.ledger
        if due is not None:
            self.later(max(0.0, due - self.now) + 1e-9, lambda: ledger is self.ledger and self._advance())

    def _advance(self):
        due = self.ledger.next_event()
        if due is not None and due <= self.now:
            self.ledger.advance(self.now)
            self.settle()

    def _tidy(self):
        for process in self.processes:
            if process.alive and not process.paused:
                process.take_in(process.holder.advance(self.now))
        self.later(0.25, self._tidy)

    def restart_keeper(self):
        """The actor was lost, and started again with no memory."""
        self.ledger = Ledger(self.limit, LEASE, f"k{next(self.keepers)}", self.now, settling=True)
        for name in list(self.listeners):
            self.wake(name)
        self.restarts += 1

    def run(self, seconds):
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            self.check()
        self.now = until
        self.check()

    def check(self):
        n = self.limit.max_concurrent
        if n is not None:
            assert self.ledger.held <= n
            assert sum(process.usable() for process in self.processes) <= n
        assert sum(self.ledger._waiting.values()) == self.ledger.waiting
        assert sum(len(owner.leases) for owner in self.ledger._owners.values()) == self.ledger.held
        if not self.restarts:
            self._check_books()
        self._check_idle()

    def _check_books(self):
        """What a process works under is in the ledger, under its name."""
        for process in self.processes:
            if process.usable():
                held = process.holder._busy | {lease for lease, _ in process.holder._idle}
                assert held <= self.ledger._owners[process.holder.name].leases

    def _check_idle(self):
        """Only of processes that are well and messages that are not lost: a stopped process can return nothing."""
        for process in self.processes:
            others = any(name != process.holder.name for name, _ in self.ledger._queue)
            if process.alive and not process.paused and process.holder.idle and others:
                since = self.idle_since.setdefault(process.number, self.now)
                assert self.loss or self.now - since <= RECALL, "a permit lies idle while somebody waits"
            else:
                self.idle_since.pop(process.number, None)
