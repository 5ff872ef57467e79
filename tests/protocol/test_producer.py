"""Events of a producer. Each script finds mutants that no other finds; `explore` has all orders."""

import pytest

from tests.protocol.scripts import ProducerPlayer, scripts

STATES = {
    "new": "",
    "live": "0 expect",
    "asked": """
        0 expect
        0 await_start 0
    """,
    "open": """
        0 expect
        0.5 offer 0
    """,
    "held": """
        0 expect
        1 progress 12
        2 held
    """,
}

SCRIPTS = scripts("""
== new: an offer before its request is remembered, and chunks are written as they complete
0 offer 0
0 counts | 1 early
5 expect
5 counts | 1 live
6 progress 7 | write 0 1>50
6 counts | 1 live, 1 writes
6 in_flight | 1
7 progress 10 | write 0 2>51
8 progress 12 | write 0 3>52 6>60
8 done 2
8 done 1
8 done 3 | fin 0 31
9 held | sent r
9 counts | 1 remembered
9 busy | False
== new: an early transfer expires, and its id after another lease
0 offer 0
19.9 tick
20 tick | aborted 0
20 counts | 1 remembered
39.9 tick
39.9 counts | 1 remembered
40 tick
40 counts
== open: a Fin waits for all writes, a Cancel for those in flight
0.5 serves 0 | True
1 progress 8 | write 0 1>50 2>51
1.5 cancel 0
1.5 wants 1 | False
1.6 cancel 0
2 progress 12
3 done 1 | cancelled 0
3 serves 0 | False
4 cancel 0 | cancelled 0
== open two: a failed write is never acknowledged
1 progress 8 | write 0 1>50 2>51
2 progress 12 | write 0 3>52 6>60
2.5 broken 1 | failed 0
2.5 suspects | 0
2.6 cancel 0 | failed 0
3 broken 2
3.5 offer 1 | write 1 1>50 2>51 3>52 6>60
4 done 3 | fin 1 31
5 held | sent r
5 cancel 0 | failed 0
26 tick
3605 tick | forget d0, forget 1, forget 0
3605 knows 0 | False
3605 engines | c
3606 welcome 0
3606 cancel 0 | failed 0
3606 offer 0 | failed 0
3606 await_start 0 | failed 0
3606 cancel 0 t2 | cancelled 0 t2
3607 worker_lost 0
3607 suspects
3608 welcome 0
3608 cancel 0 | cancelled 0
== held: a write that fails after the end of its consumer
3 offer 0 | write 0 1>50 2>51 3>52 6>60
4 engine_lost c
5 broken 1 | sent r
5 suspects
6 welcome 0
6 cancel 0 | cancelled 0
== new: an offer ahead of its request that cannot be served
0 offer 0 end=13
1 expect | aborted 0
== open: the last unit waits for the whole prompt
1 progress 11 | write 0 1>50 2>51
1.5 done 1
2 progress 12 | write 0 3>52 6>60
2.5 done 2 | fin 0 31
== live: what is complete is finished before the prompt is
0.5 offer 0 end=8
1 progress 8 | write 0 1>50 2>51
1.5 done 1 | fin 0 20
== open: blocks that never come are missed
1 progress 12 blocks=1 | write 0 1>50
1 done 1 | aborted 0
== open: a write that ends before the fence counts
1 progress 8 | write 0 1>50 2>51
1.5 preempted r
1.55 offer 1
1.6 done 1
1.7 fenced r
3 progress 12 | write 0 13>52 16>60, write 1 11>50 12>51 13>52 16>60
== open late: late orders delay a Fin to the next step
1 progress 12 | write 0 1>50 2>51 3>52 6>60
1.2 done 1
1.2 orders_applied
1.3 orders_applied | fin 0 31
1.4 orders_applied
== open late: late orders: a preemption takes a finished write back
1 progress 8 | write 0 1>50 2>51
1.2 done 1
1.3 preempted r
1.4 fenced r | aborted 0
1.5 orders_applied
== open late: late orders: a held request needs no confirmation
1 progress 12 | write 0 1>50 2>51 3>52 6>60
1.2 done 1
1.3 held | fin 0 31, sent r
1.4 orders_applied
== live: layers leave during a step, and the rest at its end
0.5 offer 0 digest=yes
1 begin 8
1 layers 0 1 | write 0 1>50/0-1 2>51/0-1
1 layers 0 1
1 layers 1 1
1.1 progress 8 | write 0 1>50/1-2 2>51/1-2
1.2 done 1
1.3 done 2 | alive 0 1 1
2 begin 12
2 layers 0 1 | write 0 3>52/0-1
2 layers 1 1 | write 0 6>60/0-1
2.1 progress 12 | write 0 3>52/1-2 6>60/1-2
2.2 done 3
2.3 done 4
2.4 done 5 | fin 0 30 digest
== open: a preemption aborts a delivery with a part of a step's layers
1 begin 8
1 layers 0 1 | write 0 1>50/0-1 2>51/0-1
1.1 preempted r
1.2 done 1 | aborted 0
== open two: a preemption aborts every such delivery before another could be served
0.6 offer 1
1 begin 8
1 layers 0 1 | write 0 1>50/0-1 2>51/0-1, write 1 1>50/0-1 2>51/0-1
1.1 preempted r
1.2 done 1 | aborted 0
1.2 done 2 | aborted 1
== open: a worker that returns finds its delivery ended
1 peer_lost 0
2 welcome 0
3 progress 12
4 held | sent r
== open: a transfer belongs to the first engine that names it
1 offer d0 | aborted d0
1 cancel d0 | cancelled d0
2 progress 12 | write 0 1>50 2>51 3>52 6>60
== open: a request ends during a write: its final message waits
1 progress 12 | write 0 1>50 2>51 3>52 6>60
2 left
2 counts | 1 writes, 1 remembered
2.5 offer 0
2.6 await_start 0
30 tick
30 done 1 | aborted 0
60 tick
60 counts
== new: a discard before everything
1 discard t
1 offer 0 | aborted 0
2 expect
4 held | sent r
== new: requests that this rank does not know
0 held unknown | sent unknown
0 left unknown
0 progress 4 unknown
0 preempted unknown
0 fenced unknown
0 starting unknown
0 in_flight
== live: an id is for one request
1 expect again
1 progress 12 again
2 offer 0
2 held again | sent again
3 left again
3 counts | 1 live
== new: Alive goes to every open offer of a known request, every alive_s
0 offer 0
1 tick
1.5 expect
2 tick | alive 0
2.9 tick
3 tick | alive 0
3.5 cancel 0 | cancelled 0
5 tick
== live: an engine that finishes no step for step_s is not alive
0 offer 0
49.9 tick | alive 0
50 tick
51 stepped
52 tick | alive 0
101 tick
== live: a held request needs no step; a write without progress is no sign of life
0 offer 0
1 progress 12 | write 0 1>50 2>51 3>52 6>60
2 held
10 tick | alive 0
11 tick
11 done 1 | fin 0 31, sent r
== held: a write that hangs: its blocks wait for its end
3 offer 0 | write 0 1>50 2>51 3>52 6>60
3 tick
22.9 tick
22.9 counts | 1 held, 1 writes
23 tick
23 counts | 1 held, 1 writes, 1 hanging
600 tick
700 unposted 1 | aborted 0, sent r
700 counts | 1 remembered
== held: a write that hangs and ends well
3 offer 0 | write 0 1>50 2>51 3>52 6>60
23 tick
50 done 1 | aborted 0, sent r
== live: which units have arrived
0.5 offer 0 digest=yes
1 progress 4 | write 0 1>50
1 progress 8 | write 0 2>51
1 progress 12 | write 0 3>52 6>60
2 done 2
2 done 1 | alive 0 1 1
2 done 3 | fin 0 31 digest
== new: a silent consumer is removed after forget_s
10 cancel 1 | cancelled 1
40 tick
3599 tick
3600 tick | forget 0, forget d0
3600 knows 0 | False
3600 knows 1 | True
3610 tick | forget 1
9999 tick
== open: a consumer with an open delivery is not removed
7200 tick | forget 1, forget d0
7200 knows 0 | True
== held: a removed consumer is served like a new one
3 peer_lost 0
3 tick | forget 0
4 welcome 0
5 offer 0 | write 0 1>50 2>51 3>52 6>60
6 done 1 | fin 0 31, sent r
== new: a worker that returns before it is removed stays
0 peer_lost 0
1 welcome 0
1 tick
1 knows 0 | True
== new: a cancelled offer that arrives late is never new
0 cancel 0 t 3 | cancelled 0
20 tick
40 tick
40 counts
50 offer 0 number=3 | aborted 0
50 await_start 0 number=3 | aborted 0
50 counts
50 offer 0 number=4
50 offer 1 number=3
== new: all open offers have at most the consumer's pool
0 wide 0 60 a
0 wide 0 60 b | aborted 0 b
0 wide 0 10 b | aborted 0 b
0 wide 1 60 a
0 cancel 0 a | cancelled 0 a
0 wide 0 100 c
== asked: the start of a prompt is reported, and repeated until the offer
1 starting r | starting 0
2 tick | starting 0
2.5 offer 0 number=2
3.5 tick | alive 0
== live: an AwaitStart for held blocks, whose lease expires
1 starting r
1 progress 12
2 held
3 await_start 0 | starting 0
22 tick | starting 0, aborted 0, sent r
== asked: so does a discard
1 discard t | aborted 0
2 await_start 1 | aborted 1
== held: a lease expires
21.9 tick
22 tick | sent r
23 offer 0 | aborted 0
42 tick
42 counts
== held: a lease does not end under a write
21 offer 0 | write 0 1>50 2>51 3>52 6>60
22 tick | alive 0
30 done 1 | fin 0 31, sent r
""")


@pytest.mark.parametrize("title", SCRIPTS)
def test_transitions(title: str) -> None:
    """Scripts of ``two`` serve two ranks of the consumer, those of ``late`` have late orders."""
    state, script = SCRIPTS[title]
    state, *options = state.split()
    ranks = (0, 1) if "two" in options else (0,)
    player = ProducerPlayer(ranks, "late" in options)
    player.play(f"{STATES[state]}\n{script}")
    player.leaves_nothing()
