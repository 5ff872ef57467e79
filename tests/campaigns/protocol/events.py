"""Possible events in a state of the world, in any order:

- a message arrives, arrives twice, is lost, or cannot be sent; the network keeps no order
- a write ends, fails, or never ends; a failed one may arrive until its producer rank dies
- a rank carries out its scheduler's next order, at its own time
- a rank's clock jumps; a digest is found equal, or not
- ranks die, the rest of their engine after them; decode learns of each death, prefill once all
  are dead
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from connectors.protocol.wire import Cancel
from tests.campaigns.protocol.automata import ExplorableConsumer, ExplorableProducer
from tests.campaigns.protocol.states import DEAD, DUE, UNASKED, WAITING, Draft, Step
from tests.campaigns.protocol.transfers import Scenario
from tests.campaigns.protocol.world import World

JUMP = ("tick", ())
"""A jump of a rank's clock."""


class Events(World):
    """The events of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        # Of messages, writes, prefill and decode ranks.
        self._faults: tuple[tuple[tuple[str, Callable[..., None]], ...], ...] = (
            (("drop", self.is_lost), ("double", self.arrives_and_stays)),
            (("fail", self.write_fails), ("unposted", self.write_is_not_posted), ("hang", self.write_hangs)),
            (("crash_prefill", self.prefill_dies),),
            (("crash_decode", self.decode_dies),),
        )

    def orderly(self, d: Draft) -> Iterator[Step]:
        """Yield the events that happen eventually without a further fault, the most urgent
        first; without clocks.
        """
        for letter in d.net:
            yield self.arrives, (letter,)
        for write in d.writes:
            if d.b[self.posted_of(write).consumer].machine == DEAD:
                yield self.write_vanishes, (write,)
            elif not write.hangs and not write.failed:
                yield self.write_done, (write,)
        for c in d.decodes:
            b = d.b[c]
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
                yield self.connects, (c, len(d.prefills) == self.producer_tp)
        last = self.last_order(d)
        for p in d.prefills:
            if d.a[p].done < last:
                yield self.order, (p,)
            if d.a[p].discards:
                yield self.prefill_discards, (p,)
        yield from self.deaths(d)

    def last_order(self, d: Draft) -> int:
        """Return how many orders a rank can have carried out by now: an engine's ranks compute
        each step together.
        """
        return min(self.orders_of(d), 1 + min((d.a[p].done for p in d.prefills), default=0))

    def deaths(self, d: Draft) -> Iterator[Step]:
        """Yield deaths of the rest of an engine that has lost a rank; decode learns of each,
        prefill once all are dead.
        """
        prefills, decodes = d.prefills, d.decodes
        if len(prefills) < self.producer_tp:
            yield from ((self.prefill_dies, (p,)) for p in prefills)
            for c in decodes:
                for p in set(range(self.producer_tp)) - set(prefills):
                    if not d.b[c].told >> p & 1:
                        yield self.decode_is_told, (c, p)
        if len(decodes) < self.consumer_tp:
            yield from ((self.decode_dies, (c,)) for c in decodes)
            if self.scenario.words_to_prefill and not decodes:
                for p in prefills:
                    for c in range(self.consumer_tp):
                        if not d.a[p].told >> c & 1:
                            yield self.prefill_is_told, (p, c)

    def faults(self, d: Draft) -> Iterator[Step]:
        budget = d.budget
        sound = [write for write in d.writes if not write.failed and not write.hangs]
        faulty: tuple[Iterable[object], ...] = (d.net, sound, d.prefills, d.decodes)
        for subjects, kinds in zip(faulty, self._faults, strict=True):
            for name, then in kinds:
                if getattr(budget, name):
                    yield from ((self.fault, (name, then, one)) for one in subjects)
        for c in d.decodes:
            if budget.refuse and d.b[c].connecting:
                yield self.fault, ("refuse", self.connects, c, False)
        if budget.unsent:
            for then, arguments in self.orderly(d):
                if then in (self.arrives, self.connects, self.decode_queues, self.decode_starts, self.decode_aborts):
                    yield self.fault, ("unsent", self.cannot_send, then, *arguments)
            for c in d.decodes:
                yield self.fault, ("unsent", self.cannot_send, self.consumer, c, *JUMP)
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
        living = not d.budget.crash_prefill and len(d.prefills) == self.producer_tp
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
            if self.posted_of(write).wid in given_up:
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
        yield from ((self.producer, (p, *JUMP)) for p in d.prefills)
        yield from ((self.consumer, (c, *JUMP)) for c in d.decodes)

    def at_last(self, d: Draft) -> Iterator[Step]:
        """Yield ends of hanging writes, in either way, and of a producer with a failed write."""
        for write in d.writes:
            if write.failed:
                yield self.prefill_dies, (write.rank,)
            elif write.hangs:
                yield self.write_done, (write,)
                yield self.write_fails, (write,)
