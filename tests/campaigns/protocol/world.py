"""The world between the machines: network, writes in flight, schedulers. States are values.

One request of 4 tokens in 2 chunks, one full-attention and one sliding-window group of 2-token
blocks, 2 layers. ``events.py`` has the possible events.

A broken promise raises Broken at once:

- a write is posted to, or in flight to, blocks that a consumer rank has released (it could arrive
  at this moment)
- a rank is answered while a write for it is in flight
- a request's blocks are freed while a write reads them, or a rank reports Sent or Received twice
- Received(ok) without all content of this prompt from all ranks
- Received without quarantine, or Freed, while a rank with an Offer has neither answered nor is
  known to be dead
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from connectors.protocol.wire import Aborted, Cancelled, Fin, Offer, Starting
from tests.campaigns.protocol.automata import ENGINE, Ambient, Broken, CellDigest, ExplorableProducer, Posted, counts
from tests.campaigns.protocol.states import (
    DEAD,
    DUE,
    FAILED,
    GARBAGE,
    GOT,
    QUEUED,
    STARTED,
    A,
    B,
    Draft,
    InFlight,
    Letter,
    States,
)
from tests.campaigns.protocol.transfers import NEVER


class World(States):
    """What each event does to a state of one scenario, and what must never happen."""

    # ---- the network, writes and clocks ---------------------------------------------------------

    def fault(self, d: Draft, name: str, then: Callable[..., None], *arguments: Any) -> None:
        d.budget = d.budget._replace(**{name: getattr(d.budget, name) - 1})
        then(d, *arguments)

    def cannot_send(self, d: Draft, then: Callable[..., None], *arguments: Any) -> None:
        """Another event happens, and the first message with which a decode rank answers it
        cannot be sent.
        """
        d.refuses = True
        then(d, *arguments)
        d.refuses = False

    def arrives(self, d: Draft, letter: Letter) -> None:
        d.net.remove(letter)
        self.arrives_and_stays(d, letter)

    def is_lost(self, d: Draft, letter: Letter) -> None:
        d.net.remove(letter)

    def arrives_and_stays(self, d: Draft, letter: Letter) -> None:
        to_consumer, at, by, number = letter
        if not to_consumer:
            if by in self.producers.derive(d.a[at].machine, ExplorableProducer.known_peers):
                self.producer(d, at, "message", (by, number))
            return
        if isinstance(self.letters.messages[number], Fin | Aborted | Cancelled):
            d.set_b(at, may=d.b[at].may & ~(1 << by))
        self.consumer(d, at, "message", (by, number))

    def send(self, d: Draft, letter: Letter) -> None:
        """Send a message.

        A message equal to one in flight would add only a second copy, which is one of the faults.
        Messages to a dead rank, to a decode rank whose only request has ended, and a second
        Starting have no effect. These are omitted.
        """
        to_consumer, at, by, number = letter
        message = self.letters.messages[number] if to_consumer else None
        if isinstance(message, Fin | Aborted | Cancelled):
            if any(write.rank == by and self.posted_of(write).consumer == at for write in d.writes):
                raise Broken(f"prefill {by} answers decode {at} while a write for it is in flight")
        elif isinstance(message, Starting) and d.b[at].queue != QUEUED:
            return
        if d.b[at].listens if to_consumer else d.a[at].machine != DEAD:
            d.net.add(letter)

    def posted_of(self, write: InFlight) -> Posted:
        found: Posted = self.posted.values[write.posted]
        return found

    def report(self, d: Draft, write: InFlight, what: str, *more: str) -> None:
        self.producer(d, write.rank, what, (self.posted_of(write).wid, *more))

    def write_done(self, d: Draft, write: InFlight) -> None:
        self.land(d, write, write.torn)
        self.report(d, write, "write_done")

    def write_fails(self, d: Draft, write: InFlight) -> None:
        """The transport reports a failure; parts of the write are in flight, and arrive at any
        time while its producer lives.
        """
        d.writes.remove(write)
        d.writes.add(write._replace(torn=True, hangs=False, failed=True))
        self.report(d, write, "write_failed", "")

    def write_is_not_posted(self, d: Draft, write: InFlight) -> None:
        """A slice of the write cannot be posted; those posted before it have arrived."""
        self.land(d, write, torn=True)
        self.report(d, write, "write_refused", "")

    def write_vanishes(self, d: Draft, write: InFlight) -> None:
        """Drop a write whose consumer is dead."""
        d.writes.remove(write)
        if not write.failed:
            self.report(d, write, "write_failed", "")

    def land(self, d: Draft, write: InFlight, torn: bool) -> None:
        d.writes.remove(write)
        posted = self.posted_of(write)
        b = d.b[posted.consumer]
        if b.machine != DEAD:
            cells = dict(b.memory[write.rank]) | {dst: GARBAGE if torn else tag for dst, _, tag in posted.cells}
            memory = list(b.memory)
            memory[write.rank] = tuple(sorted(cells.items()))
            d.b[posted.consumer] = b._replace(memory=tuple(memory))

    def write_hangs(self, d: Draft, write: InFlight) -> None:
        d.writes.remove(write)
        d.writes.add(write._replace(hangs=True))

    # ---- the prefill engine ---------------------------------------------------------------------

    def orders_of(self, d: Draft) -> int:
        """Number of orders of the scheduler; after a cut, one more reports the end of the
        request.
        """
        return len(self.scenario.orders) if d.budget.cut == NEVER else d.budget.cut + 1

    def memory_of(self, d: Draft, p: int) -> int:
        over = d.budget.freed or d.a[p].done > d.budget.cut >= 0
        return len(self.memories) - 1 if over else d.a[p].done

    def order(self, d: Draft, p: int) -> None:
        done = d.a[p].done
        method, *arguments = self.scenario.orders[done]
        if done == d.budget.cut:
            method, arguments = "finished", ["r", False, ""]
        d.set_a(p, done=done + 1)
        memory = self.memories[self.memory_of(d, p)]
        for write in [write for write in d.writes if write.rank == p]:
            if any(memory.get(src) != tag for _, src, tag in self.posted_of(write).cells):
                d.writes.remove(write)
                d.writes.add(write._replace(torn=True))
        self.producer(d, p, method, tuple(arguments))

    def prefill_discards(self, d: Draft, p: int) -> None:
        d.set_a(p, discards=False)
        self.producer(d, p, "discard", ("t",))

    def router_discards(self, d: Draft) -> None:
        d.a = [a._replace(discards=a.machine != DEAD) for a in d.a]

    def prefill_request_is_aborted(self, d: Draft) -> None:
        """No rank has an order that the furthest one lacks; all get the same orders."""
        d.budget = d.budget._replace(cut=max(a.done for a in d.a))

    def producer(self, d: Draft, p: int, method: str, arguments: tuple[Any, ...]) -> None:
        a = d.a[p]
        machine, actions = self.producers.on(a.machine, (method, arguments, self.memory_of(d, p)))
        d.a[p] = a._replace(machine=machine)
        for what, *details in actions:
            if what == "send":
                self.send(d, (True, details[0], p, details[1]))
            elif what == "write":
                self.post(d, p, details[0])
            else:
                self.sent(d, p)

    def post(self, d: Draft, p: int, posted: Posted) -> None:
        b = d.b[posted.consumer]
        if b.machine != DEAD and b.phase != STARTED and not b.kept:
            raise Broken(f"prefill {p} writes into blocks that decode {posted.consumer} has freed")
        if d.budget.freed:
            raise Broken(f"prefill {p} reads blocks that have been freed")
        d.writes.add(InFlight(p, self.posted(posted)))

    def sent(self, d: Draft, p: int) -> None:
        if d.a[p].sent:
            raise Broken(f"prefill {p} was sent twice")
        if any(write.rank == p and not write.failed for write in d.writes):
            raise Broken(f"prefill {p} was sent while its writes read the blocks")
        d.set_a(p, sent=True)
        if all(d.a[p].sent for p in d.prefills):
            if any(not write.failed for write in d.writes):
                raise Broken("the blocks are freed while writes read them")
            if len(d.prefills) == self.producer_tp:
                d.budget = d.budget._replace(freed=True)

    def prefill_dies(self, d: Draft, p: int) -> None:
        for write in [write for write in d.writes if write.rank == p]:
            self.land(d, write, True)
        d.a[p] = A(DEAD)
        d.drop_letters(False, p)

    def prefill_is_told(self, d: Draft, p: int, c: int) -> None:
        d.set_a(p, told=d.a[p].told | 1 << c)
        self.producer(d, p, "peer_lost", (self.scenario.peer(c),))

    # ---- the decode engine ----------------------------------------------------------------------

    def decode_starts(self, d: Draft, c: int) -> None:
        d.set_b(c, phase=STARTED)
        self.consumer(d, c, "start", (self.scenario.order,))

    def decode_queues(self, d: Draft) -> None:
        d.set_b(0, queue=QUEUED)
        self.consumer(d, 0, "queue", ("d", "t", ENGINE))

    def due(self, d: Draft, ok: bool) -> None:
        """The scheduler allocates the request's blocks, or lets it be computed without them."""
        if d.b[0].queue != QUEUED:
            raise Broken("decode's request is due and was not queued")
        d.set_b(0, queue=DUE)
        if not ok:
            for c in d.decodes:
                d.set_b(c, phase=FAILED, aborts=False)
                d.drop_letters(True, c)

    def decode_leaves(self, d: Draft, c: int) -> None:
        """The request was aborted before it had blocks."""
        d.set_b(c, aborts=False, phase=FAILED, queue=DUE)
        self.consumer(d, c, "release", ("t", ENGINE))
        d.drop_letters(True, c)

    def decode_request_is_aborted(self, d: Draft) -> None:
        """Ranks that have not started do so no more if none has."""
        d.b = [b._replace(aborts=b.machine != DEAD) for b in d.b]

    def decode_aborts(self, d: Draft, c: int) -> None:
        d.set_b(c, aborts=False)
        self.consumer(d, c, "abort", ("d",))

    def connects(self, d: Draft, c: int, works: bool) -> None:
        d.set_b(c, connecting=False)
        if works:
            self.consumer(d, c, "connected", (ENGINE.incarnation, self.scenario.partners))
        else:
            self.consumer(d, c, "connect_failed", (ENGINE.incarnation, "refused"))

    def decode_is_told(self, d: Draft, c: int, p: int) -> None:
        d.set_b(c, told=d.b[c].told | 1 << p, may=d.b[c].may & ~(1 << p))
        self.consumer(d, c, "worker_lost", (self.scenario.partners[p].peer, "dead"))

    def verified(self, d: Draft, c: int, verify: tuple[Any, ...]) -> None:
        p, wanted, expected = verify
        b = d.b[c]
        d.b[c] = b._replace(verifying=tuple(each for each in b.verifying if each != verify))
        Ambient.cells = dict(b.memory[p])
        digest = CellDigest()
        for group, block in wanted:
            digest.add(group, np.array([block]), np.array([0]))
        problem = None if digest.hexdigest() == expected else "not what was sent"
        self.consumer(d, c, "verified", ("t", self.scenario.partners[p].peer, problem))

    def consumer(self, d: Draft, c: int, method: str, arguments: tuple[Any, ...]) -> None:
        machine, actions = self.consumers.on(d.b[c].machine, (method, arguments, 0))
        d.set_b(c, machine=machine)
        for what, *details in actions:
            if what == "send":
                rank, number = details
                if d.refuses:
                    d.refuses = False
                    self.consumer(d, c, "undelivered", (rank, number))
                    continue
                if isinstance(self.letters.messages[number], Offer):
                    d.set_b(c, may=d.b[c].may | 1 << rank)
                self.send(d, (False, rank, c, number))
            elif what == "verify":
                d.set_b(c, verifying=tuple(sorted((*d.b[c].verifying, tuple(details)))))
            elif what == "connect":
                # For producers that know the consumer, a new handshake does what the clock's next
                # jump does: another Cancel.
                if not d.b[c].may:
                    d.set_b(c, connecting=True)
            elif what == "due":
                self.due(d, *details)
            elif what == "received":
                self.received(d, c, *details)
            else:
                self.freed(d, c)

    def received(self, d: Draft, c: int, ok: bool, quarantine: bool) -> None:
        b = d.b[c]
        if b.phase != STARTED:
            raise Broken(f"decode {c} received twice")
        if ok:
            for p, memory in enumerate(b.memory):
                if dict(memory) != self.scenario.wanted:
                    raise Broken(f"decode {c} was told ok, but of prefill {p} it has {memory}")
        if ok and quarantine:
            raise Broken(f"decode {c} was told ok, and that its blocks are in quarantine")
        d.b[c] = b._replace(phase=GOT if ok else FAILED, kept=quarantine)
        if not quarantine:
            self.give_up_blocks(d, c)

    def freed(self, d: Draft, c: int) -> None:
        if not d.b[c].kept:
            raise Broken(f"decode {c} frees blocks that are not in quarantine")
        d.set_b(c, kept=False)
        self.give_up_blocks(d, c)

    def give_up_blocks(self, d: Draft, c: int) -> None:
        b = d.b[c]
        if b.may:
            raise Broken(f"decode {c} gives its blocks up while ranks {b.may:b} have not answered")
        if b.verifying or any(self.posted_of(write).consumer == c for write in d.writes):
            raise Broken(f"decode {c} gives its blocks up while a write or a comparison is in progress")
        d.b[c] = b._replace(memory=((),) * self.producer_tp)
        d.drop_letters(True, c)

    def decode_dies(self, d: Draft, c: int) -> None:
        d.b[c] = B(DEAD)
        d.drop_letters(True, c)

    # ---- the end --------------------------------------------------------------------------------

    def check_end(self, d: Draft) -> None:
        """Check a state without further events: every wait has ended, and every block is free."""
        if d.net or d.writes:
            raise Broken(f"at the end {len(d.net)} messages and {len(d.writes)} writes are in flight")
        whole = len(d.prefills) == self.producer_tp
        held = whole and d.budget.cut == NEVER
        for p, a in enumerate(d.a):
            if a.machine != DEAD and (left := self.producers.derive(a.machine, counts)):
                raise Broken(f"at the end prefill {p} has {left}")
            if whole and a.sent != held:
                raise Broken(f"at the end prefill {p}'s request (held: {held}) is sent: {a.sent}")
        if held and not d.budget.freed:
            raise Broken("at the end prefill's blocks are not free")
        for c in d.decodes:
            b, left = d.b[c], self.consumers.derive(d.b[c].machine, counts)
            if b.phase not in (GOT, FAILED) or b.kept or left:
                raise Broken(f"at the end decode {c} is in phase {b.phase} and has {left}")
