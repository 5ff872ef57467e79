"""The world between the machines: network, writes in flight, schedulers, faults. States are values.

One request of 4 tokens in 2 chunks, one full-attention and one sliding-window group of 2-token
blocks, 2 layers. Possible events in a state, in any order:

- a message arrives, arrives twice, is lost, or cannot be sent; the network keeps no order
- a write ends, fails, or never ends; a failed one may arrive until its producer rank dies
- a rank carries out its scheduler's next order, at its own time
- a rank's clock jumps; a digest is found equal, or not
- ranks die, the rest of their engine after them; decode learns of each death, prefill once all
  are dead

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

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from connectors.protocol.wire import Aborted, Cancel, Cancelled, Fin, Offer, Starting
from tests.campaigns.protocol.automata import (
    ENGINE,
    Ambient,
    Broken,
    CellDigest,
    ExplorableConsumer,
    ExplorableProducer,
    Posted,
    counts,
)
from tests.campaigns.protocol.states import (
    DEAD,
    DUE,
    FAILED,
    GARBAGE,
    GOT,
    QUEUED,
    STARTED,
    UNASKED,
    WAITING,
    A,
    B,
    Draft,
    InFlight,
    Letter,
    States,
    Step,
)
from tests.campaigns.protocol.transfers import NEVER


class World(States):
    """Possible events in the states of one scenario, and forbidden ones."""

    # ---- possible events ------------------------------------------------------------------------

    def orderly(self, d: Draft) -> Iterator[Step]:
        """Yield the events that happen eventually without a further fault, the most urgent
        first; without clocks.
        """
        for letter in d.net:
            yield self.arrives, (letter,)
        for write in d.writes:
            if self.b_of(d, write).machine == DEAD:
                yield self.write_vanishes, (write,)
            elif not write.hangs and not write.failed:
                yield self.write_done, (write,)
        for c, b in enumerate(d.b):
            if b.machine == DEAD:
                continue
            for verify in b.verifying:
                yield self.verified, (c, verify)
            if b.aborts and b.phase == WAITING and self.scenario.queued:
                yield self.decode_leaves, (c,)
            elif b.phase == WAITING and (d.b[0].queue == DUE or not self.scenario.queued):
                yield self.decode_starts, (c,)
            elif b.phase == WAITING and c == 0 and b.queue == UNASKED:
                yield self.decode_queues, ()
            elif b.aborts and b.phase != WAITING:
                yield self.decode_aborts, (c,)
            if b.connecting:
                yield self.connects, (c, all(a.machine != DEAD for a in d.a))
        last = self.last_order(d)
        for p, a in enumerate(d.a):
            if a.machine == DEAD:
                continue
            if a.done < last:
                yield self.order, (p,)
            if a.discards:
                yield self.prefill_discards, (p,)
        yield from self.deaths(d)

    def last_order(self, d: Draft) -> int:
        """Return how many orders a rank can have carried out by now: an engine's ranks compute
        each step together.
        """
        return min(self.orders_of(d), 1 + min((a.done for a in d.a if a.machine != DEAD), default=0))

    def deaths(self, d: Draft) -> Iterator[Step]:
        """Yield deaths of the rest of an engine that has lost a rank; decode learns of each,
        prefill once all are dead.
        """
        if any(a.machine == DEAD for a in d.a):
            alive = [p for p, a in enumerate(d.a) if a.machine != DEAD]
            for p in alive:
                yield self.prefill_dies, (p,)
            for c, b in enumerate(d.b):
                for p, a in enumerate(d.a):
                    if a.machine == DEAD and b.machine != DEAD and not b.told >> p & 1:
                        yield self.decode_is_told, (c, p)
        if any(b.machine == DEAD for b in d.b):
            alive = [c for c, b in enumerate(d.b) if b.machine != DEAD]
            for c in alive:
                yield self.decode_dies, (c,)
            if self.scenario.words_to_prefill and not alive:
                for p, a in enumerate(d.a):
                    for c in range(self.consumer_tp):
                        if a.machine != DEAD and not a.told >> c & 1:
                            yield self.prefill_is_told, (p, c)

    def faults(self, d: Draft) -> Iterator[Step]:
        budget = d.budget
        for letter in d.net:
            if budget.drop:
                yield self.fault, ("drop", self.is_lost, letter)
            if budget.double:
                yield self.fault, ("double", self.arrives_and_stays, letter)
        for write in d.writes:
            if write.failed:
                continue
            if budget.fail and not write.hangs:
                yield self.fault, ("fail", self.write_fails, write)
            if budget.unposted and not write.hangs:
                yield self.fault, ("unposted", self.write_is_not_posted, write)
            if budget.hang and not write.hangs:
                yield self.fault, ("hang", self.write_hangs, write)
        for p, a in enumerate(d.a):
            if budget.crash_prefill and a.machine != DEAD:
                yield self.fault, ("crash_prefill", self.prefill_dies, p)
        for c, b in enumerate(d.b):
            if budget.crash_decode and b.machine != DEAD:
                yield self.fault, ("crash_decode", self.decode_dies, c)
            if budget.refuse and b.connecting:
                yield self.fault, ("refuse", self.connects, c, False)
        if budget.unsent:
            for then, arguments in self.orderly(d):
                if then in (self.arrives, self.connects, self.decode_queues, self.decode_starts, self.decode_aborts):
                    yield self.fault, ("unsent", self.cannot_send, then, *arguments)
            for c, b in enumerate(d.b):
                if b.machine != DEAD:
                    yield self.fault, ("unsent", self.cannot_send, self.decode_jumps, c)
        if budget.abort:
            yield self.fault, ("abort", self.decode_request_is_aborted)
        if budget.leave and max(a.done for a in d.a) < len(self.scenario.orders):
            yield self.fault, ("leave", self.prefill_request_is_aborted)
        if budget.discard:
            yield self.fault, ("discard", self.router_discards)

    def alone(self, d: Draft) -> list[Step]:
        """Return steps that need no interleaving: if there are some, nothing else is tried in this
        state.

        Clocks do not jump before these steps (they are due; see ``early``), and each commutes with
        all steps of other machines and with all that its own machine can still do before it:

        - a message to a decode rank that is releasing its blocks: one rank less may write, whatever
          the message, and nothing is sent. Twice is like once, and a dying rank loses what it has
          received
        - a Cancel for a closed delivery: it is answered and changes nothing
        - the end of a write of an abandoned delivery: its bytes are not used. The answer must not
          be sent while the write is in flight, which is the only thing that depends on its end;
          this is checked where the answer is sent
        - orders of a prefill rank that has closed every delivery and that no message can reach

        The last three are answers of a rank that may die first, so they wait until none can. If a
        message may be lost, that is tried as well.
        """
        if d.budget.early:
            return []
        living = not d.budget.crash_prefill and all(a.machine != DEAD for a in d.a)
        for letter in d.net:
            to_consumer, at, by, number = letter
            if to_consumer:
                commutes = self.consumers.derive(d.b[at].machine, ExplorableConsumer.ending)
            else:
                closed, _, _ = self.producers.derive(d.a[at].machine, ExplorableProducer.settled)
                commutes = living and isinstance(self.letters.messages[number], Cancel) and by in closed
            if commutes:
                lost: list[Step] = [(self.fault, ("drop", self.is_lost, letter))] if d.budget.drop else []
                return [(self.arrives, (letter,)), *lost]
        if not living or d.budget.hang or any(write.hangs or write.failed for write in d.writes):
            return []
        for write in d.writes:
            _, given_up, _ = self.producers.derive(d.a[write.rank].machine, ExplorableProducer.settled)
            if self.posted.values[write.posted].wid in given_up:
                return [(self.write_done, (write,))]
        reachable = any(b.listens for b in d.b)
        if not reachable and not d.budget.leave and not d.budget.discard:
            last = self.last_order(d)
            for p, a in enumerate(d.a):
                unheard = not a.discards and all(to or at != p for to, at, *_ in d.net)
                if a.done < last and unheard and self.producers.derive(a.machine, ExplorableProducer.settled)[2]:
                    return [(self.order, (p,))]
        return []

    def jumps(self, d: Draft) -> Iterator[Step]:
        """Yield jumps of ranks' clocks.

        ``early``, while something else is due, only a limited number.
        """
        for p, a in enumerate(d.a):
            if a.machine != DEAD:
                yield self.prefill_jumps, (p,)
        for c, b in enumerate(d.b):
            if b.machine != DEAD:
                yield self.decode_jumps, (c,)

    def at_last(self, d: Draft) -> Iterator[Step]:
        """Yield ends of hanging writes, in either way, and of a producer with a failed write."""
        for write in d.writes:
            if write.failed:
                yield self.prefill_dies, (write.rank,)
            elif write.hangs:
                yield self.write_done, (write,)
                yield self.write_fails, (write,)

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

    def prefill_jumps(self, d: Draft, p: int) -> None:
        self.producer(d, p, "tick", ())

    def decode_jumps(self, d: Draft, c: int) -> None:
        self.consumer(d, c, "tick", ())

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
            d.b[at] = d.b[at]._replace(may=d.b[at].may & ~(1 << by))
        self.consumer(d, at, "message", (by, number))

    def send(self, d: Draft, letter: Letter) -> None:
        """Send a message.

        A message equal to one in flight would add only a second copy, which is one of the faults.
        Messages to a dead rank, to a decode rank whose only request has ended, and a second
        Starting have no effect. These are omitted.
        """
        to_consumer, at, *_ = letter
        if to_consumer and isinstance(self.letters.messages[letter[3]], Fin | Aborted | Cancelled):
            for write in d.writes:
                if write.rank == letter[2] and self.posted.values[write.posted].consumer == at:
                    raise Broken(f"prefill {letter[2]} answers decode {at} while a write for it is in flight")
        if to_consumer and isinstance(self.letters.messages[letter[3]], Starting) and d.b[at].queue != QUEUED:
            return
        if d.b[at].listens if to_consumer else d.a[at].machine != DEAD:
            d.net.add(letter)

    def b_of(self, d: Draft, write: InFlight) -> B:
        return d.b[self.posted.values[write.posted].consumer]

    def write_done(self, d: Draft, write: InFlight) -> None:
        self.land(d, write, write.torn)
        self.producer(d, write.rank, "write_done", (self.posted.values[write.posted].wid,))

    def write_fails(self, d: Draft, write: InFlight) -> None:
        """The transport reports a failure; parts of the write are in flight, and arrive at any
        time while its producer lives.
        """
        d.writes.remove(write)
        d.writes.add(write._replace(torn=True, hangs=False, failed=True))
        self.producer(d, write.rank, "write_failed", (self.posted.values[write.posted].wid, ""))

    def write_is_not_posted(self, d: Draft, write: InFlight) -> None:
        """A slice of the write cannot be posted; those posted before it have arrived."""
        self.land(d, write, torn=True)
        self.producer(d, write.rank, "write_refused", (self.posted.values[write.posted].wid, ""))

    def write_vanishes(self, d: Draft, write: InFlight) -> None:
        """Drop a write whose consumer is dead."""
        d.writes.remove(write)
        if not write.failed:
            self.producer(d, write.rank, "write_failed", (self.posted.values[write.posted].wid, ""))

    def land(self, d: Draft, write: InFlight, torn: bool) -> None:
        d.writes.remove(write)
        posted: Posted = self.posted.values[write.posted]
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
        d.a[p] = d.a[p]._replace(done=done + 1)
        memory = self.memories[self.memory_of(d, p)]
        for write in [write for write in d.writes if write.rank == p]:
            if any(memory.get(src) != tag for _, src, tag in self.posted.values[write.posted].cells):
                d.writes.remove(write)
                d.writes.add(write._replace(torn=True))
        self.producer(d, p, method, tuple(arguments))

    def prefill_discards(self, d: Draft, p: int) -> None:
        d.a[p] = d.a[p]._replace(discards=False)
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
        d.a[p] = d.a[p]._replace(sent=True)
        if all(a.sent for a in d.a if a.machine != DEAD):
            if any(not write.failed for write in d.writes):
                raise Broken("the blocks are freed while writes read them")
            if all(a.machine != DEAD for a in d.a):
                d.budget = d.budget._replace(freed=True)

    def prefill_dies(self, d: Draft, p: int) -> None:
        for write in [write for write in d.writes if write.rank == p]:
            self.land(d, write, True)
        d.a[p] = A(DEAD)
        d.net = {letter for letter in d.net if letter[0] or letter[1] != p}

    def prefill_is_told(self, d: Draft, p: int, c: int) -> None:
        d.a[p] = d.a[p]._replace(told=d.a[p].told | 1 << c)
        self.producer(d, p, "peer_lost", (self.scenario.peer(c),))

    # ---- the decode engine ----------------------------------------------------------------------

    def decode_starts(self, d: Draft, c: int) -> None:
        d.b[c] = d.b[c]._replace(phase=STARTED)
        self.consumer(d, c, "start", (self.scenario.order,))

    def decode_queues(self, d: Draft) -> None:
        d.b[0] = d.b[0]._replace(queue=QUEUED)
        self.consumer(d, 0, "queue", ("d", "t", ENGINE))

    def due(self, d: Draft, ok: bool) -> None:
        """The scheduler allocates the request's blocks, or lets it be computed without them."""
        if d.b[0].queue != QUEUED:
            raise Broken("decode's request is due and was not queued")
        d.b[0] = d.b[0]._replace(queue=DUE)
        if not ok:
            for c, b in enumerate(d.b):
                if b.machine != DEAD:
                    d.b[c] = b._replace(phase=FAILED, aborts=False)
                    d.net = {letter for letter in d.net if not letter[0] or letter[1] != c}

    def decode_leaves(self, d: Draft, c: int) -> None:
        """The request was aborted before it had blocks."""
        d.b[c] = d.b[c]._replace(aborts=False, phase=FAILED, queue=DUE)
        self.consumer(d, c, "release", ("t", ENGINE))
        d.net = {letter for letter in d.net if not letter[0] or letter[1] != c}

    def decode_request_is_aborted(self, d: Draft) -> None:
        """Ranks that have not started do so no more if none has."""
        d.b = [b._replace(aborts=b.machine != DEAD) for b in d.b]

    def decode_aborts(self, d: Draft, c: int) -> None:
        d.b[c] = d.b[c]._replace(aborts=False)
        self.consumer(d, c, "abort", ("d",))

    def connects(self, d: Draft, c: int, works: bool) -> None:
        d.b[c] = d.b[c]._replace(connecting=False)
        if works:
            self.consumer(d, c, "connected", (ENGINE.incarnation, self.scenario.partners))
        else:
            self.consumer(d, c, "connect_failed", (ENGINE.incarnation, "refused"))

    def decode_is_told(self, d: Draft, c: int, p: int) -> None:
        d.b[c] = d.b[c]._replace(told=d.b[c].told | 1 << p, may=d.b[c].may & ~(1 << p))
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
        d.b[c] = d.b[c]._replace(machine=machine)
        for what, *details in actions:
            if what == "send":
                rank, number = details
                if d.refuses:
                    d.refuses = False
                    self.consumer(d, c, "undelivered", (rank, number))
                    continue
                if isinstance(self.letters.messages[number], Offer):
                    d.b[c] = d.b[c]._replace(may=d.b[c].may | 1 << rank)
                self.send(d, (False, rank, c, number))
            elif what == "verify":
                d.b[c] = d.b[c]._replace(verifying=tuple(sorted((*d.b[c].verifying, tuple(details)))))
            elif what == "connect":
                # For producers that know the consumer, a new handshake does what the clock's next
                # jump does: another Cancel.
                if not d.b[c].may:
                    d.b[c] = d.b[c]._replace(connecting=True)
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
        d.b[c] = d.b[c]._replace(kept=False)
        self.give_up_blocks(d, c)

    def give_up_blocks(self, d: Draft, c: int) -> None:
        b = d.b[c]
        if b.may:
            raise Broken(f"decode {c} gives its blocks up while ranks {b.may:b} have not answered")
        if b.verifying or any(self.posted.values[write.posted].consumer == c for write in d.writes):
            raise Broken(f"decode {c} gives its blocks up while a write or a comparison is in progress")
        d.b[c] = b._replace(memory=((),) * self.producer_tp)
        d.net = {letter for letter in d.net if not letter[0] or letter[1] != c}

    def decode_dies(self, d: Draft, c: int) -> None:
        d.b[c] = B(DEAD)
        d.net = {letter for letter in d.net if not letter[0] or letter[1] != c}

    # ---- the end --------------------------------------------------------------------------------

    def check_end(self, d: Draft) -> None:
        """Check a state without further events: every wait has ended, and every block is free."""
        if d.net or d.writes:
            raise Broken(f"at the end {len(d.net)} messages and {len(d.writes)} writes are in flight")
        whole = all(a.machine != DEAD for a in d.a)
        held = whole and d.budget.cut == NEVER
        for p, a in enumerate(d.a):
            if a.machine != DEAD and self.producers.derive(a.machine, counts):
                raise Broken(f"at the end prefill {p} has {self.producers.derive(a.machine, counts)}")
            if whole and a.sent != held:
                raise Broken(f"at the end prefill {p}'s request (held: {held}) is sent: {a.sent}")
        if held and not d.budget.freed:
            raise Broken("at the end prefill's blocks are not free")
        for c, b in enumerate(d.b):
            if b.machine != DEAD and (
                b.phase not in (GOT, FAILED) or b.kept or self.consumers.derive(b.machine, counts)
            ):
                left = self.consumers.derive(b.machine, counts)
                raise Broken(f"at the end decode {c} is in phase {b.phase} and has {left}")
