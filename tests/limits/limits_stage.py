"""A cluster in miniature for tests: one server, several clients, and a network that delays, loses and repeats, all on
one clock that the test moves. After every step the promises that must hold at every moment are checked."""

import heapq
import itertools
import random

from etude.limits.lease import LeaseClient, LeaseServer
from etude.limits.limit import Limit

LEASE = 3.0
RECALL = 0.050  # no permit is idle for longer while somebody waits


class Process:
    """A client with its calls: one report under way, one that waits for news, both repeated after a failure."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.names = itertools.count()
        self.client = LeaseClient(world.limit, LEASE, lambda: f"p{number}.{next(self.names)}")
        self.alive, self.paused = True, False
        self.inbox = []  # what arrives while the process is stopped
        self.entered, self.served = [], []
        self.in_use = {}  # ticket → lease
        self.speaking = self.listening = False
        self.tickets = itertools.count()

    def enter(self):
        ticket = (self.number, next(self.tickets))
        self.entered.append(ticket)
        lease = self.client.take(self.world.now)
        self.take_in([(ticket, lease)] if lease is not None else self.client.enter(ticket, self.world.now))
        return ticket

    def take_in(self, granted):
        for ticket, lease in granted:
            assert ticket not in self.in_use, "granted twice"
            assert ticket in self.entered, "granted after its cancellation"
            if self.world.limit.per_second is None:
                assert self.world.now < self.client._valid_until, "granted under a lease that may have expired"
            if self.served:
                assert ticket > self.served[-1], "served out of order"
            self.served.append(ticket)
            self.entered.remove(ticket)
            self.in_use[ticket] = lease
        self.speak()

    def cancel(self, ticket):
        self.entered.remove(ticket)
        self.take_in(self.client.cancel(ticket, self.world.now))

    def release(self, ticket, unused=False):
        self.take_in(self.client.release(self.in_use.pop(ticket), self.world.now, unused))

    def speak(self):
        if self.paused or not self.alive:
            return
        if not self.speaking and self.client.has_changes:
            self.speaking = True
            self.world.send(self, self.client.report(self.world.now), 0.0)
        if not self.listening and self.client.known:
            self.listening = True
            quiet, now = self.client.is_quiet, self.world.now
            report = self.client.leave(now) if quiet else self.client.report(now)
            self.world.send(self, report, 0.0 if quiet else LEASE / 3)

    def hear(self, seconds, leaves, reply, sent_at):
        if seconds or leaves:
            self.listening = False
        else:
            self.speaking = False
        if reply is None and not leaves:
            self.client.has_changes = True
        if reply is not None:
            self.take_in(self.client.receive(reply, sent_at, self.world.now))
        self.speak()

    def resume(self):
        self.paused = False
        waiting, self.inbox = self.inbox, []
        for arguments in waiting:
            self.hear(*arguments)
        self.speak()

    def usable(self):
        """Leases that this process would still work under."""
        if not self.alive or self.world.now >= self.client._valid_until:
            return 0
        return self.client.held + self.client.idle


class World:
    """The clock, the network, the server."""

    def __init__(self, limit: Limit, processes: int, seed: int, delay=0.01, loss=0.0):
        self.limit, self.now, self.chance = limit, 0.0, random.Random(seed)
        self.delay, self.loss = delay, loss
        self.server = LeaseServer(limit, LEASE, 0.0)
        self.queue, self.order = [], itertools.count()
        self.polls = {}  # client → the version it knows, and how to answer it
        self.restarts = 0
        self.idle_since = {}
        self.processes = [Process(self, number) for number in range(processes)]
        self.later(0.25, self._tidy)

    def later(self, delay, action):
        heapq.heappush(self.queue, (self.now + delay, next(self.order), action))

    def travel(self):
        return self.chance.uniform(0.0, self.delay)

    def send(self, process, report, seconds):
        """One call: it may be lost on its way there or on its way back, and is then repeated by the process."""
        sent_at = self.now
        lost_there, lost_back = self.chance.random() < self.loss, self.chance.random() < self.loss

        def fail():
            self.arrive(process, (seconds, report.leaves, None, sent_at))

        def answer(reply):
            if lost_back:
                self.later(0.1, fail)
            else:
                self.later(self.travel(), lambda: self.arrive(process, (seconds, report.leaves, reply, sent_at)))

        def at_server():
            if lost_there:
                return self.later(0.1, fail)
            reply = self.server.receive(report, self.now)
            if seconds and reply.known and reply.version == report.version:
                poll = self.polls[report.client] = (report.version, answer)
                self.later(seconds, lambda: self.polls.get(report.client) is poll and self.wake(report.client))
            else:
                answer(reply)
            self.publish()

        self.later(self.travel(), at_server)

    def wake(self, name):
        _, answer = self.polls.pop(name)
        answer(self.server.reply(name))

    def arrive(self, process, arguments):
        if not process.alive:
            return
        if process.paused:
            process.inbox.append(arguments)
        else:
            process.hear(*arguments)

    def publish(self):
        """After the server did something: news leaves at once, and it is called again when something is due."""
        for name, (version, _) in list(self.polls.items()):
            reply = self.server.reply(name)
            if not (reply.known and reply.version == version):
                self.wake(name)
        due, server = self.server.next_event(), self.server
        if due is not None:
            self.later(max(0.0, due - self.now) + 1e-9, lambda: server is self.server and self._advance())

    def _advance(self):
        due = self.server.next_event()
        if due is not None and due <= self.now:
            self.server.advance(self.now)
            self.publish()

    def _tidy(self):
        for process in self.processes:
            if process.alive and not process.paused:
                process.take_in(process.client.advance(self.now))
        self.later(0.25, self._tidy)

    def restart_server(self):
        """The actor was lost, and started again with no memory."""
        self.server = LeaseServer(self.limit, LEASE, self.now, settling=True)
        for name in list(self.polls):
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
        n, info = self.limit.max_concurrent, self.server.info()
        clients = self.server._clients.values()
        if n is not None:
            assert info.held <= n
            assert sum(process.usable() for process in self.processes) <= n
        assert sum(len(client.places) for client in clients) == info.waiting
        assert sum(client.granted - client.returned for client in clients) == info.held
        if not self.restarts:
            self._check_books()
        self._check_idle()

    def _check_books(self):
        """What a process works under is on the server's books, under its name."""
        for process in self.processes:
            if process.usable():
                client = self.server._clients[process.client.name]
                assert process.client.held + process.client.idle <= client.granted - client.returned

    def _check_idle(self):
        """Only of processes that are well and messages that are not lost: a stopped process can return nothing."""
        for process in self.processes:
            others = any(client.name != process.client.name for client in self.server._queue.values())
            if process.alive and not process.paused and process.client.idle and others:
                since = self.idle_since.setdefault(process.number, self.now)
                assert self.loss or self.now - since <= RECALL, "a permit lies idle while somebody waits"
            else:
                self.idle_since.pop(process.number, None)
