"""Events of a consumer. Each script finds mutants that no other finds; `explore` has all orders."""

import pytest

from tests.protocol.scripts import ConsumerPlayer, scripts

STATES = {
    "new": "",
    "known": "0 connected",
    "offered": """
        0 start r | connect a
        0 connected | offer 0 #1, offer 1 #1
    """,
    "queued": """
        0 connected
        0 queue r | await_start 0 #1
    """,
}

SCRIPTS = scripts("""
== new: a handshake comes first, then every partner gets an offer
0 start r | connect a
0 counts | 1 connecting
0 awaits 0 | True
0 awaits b0 | False
1 connected b
1 connected | offer 0 #1, offer 1 #1
1 counts | 1 offered
1 start r2 | offer 0 t2 #2, offer 1 t2 #2
1 knows 0 | True
1 knows b1 | True
1 knows 2 | False
== new: a failed handshake ends the wait, and the next request starts another
0 start r | connect a
1 connect_failed a refused | failed r
1 counts
1 busy | False
2 start r2 | connect a
3 connected | offer 0 t2 #1, offer 1 t2 #1
4 connect_failed a refused
5 start r3 | connect a
6 connected | offer 0 t3 #2, offer 1 t3 #2
7 start r4 | offer 0 t4 #3, offer 1 t4 #3
== new: the wait for a handshake ends after the longer of handshake_s and progress_s
0 start r | connect a
11.9 tick
12 tick | failed r
12 counts
13 connected | cancel 0 #1, cancel 1 #1
== offered: Cancelled without a Cancel is a failure
1 cancelled 0 | cancel 1 #1
1 fin 1 | failed r
== offered: silence of one rank, whatever the other sends
9 alive 0
9.9 tick
10 tick | cancel 0 #1, cancel 1 #1
10 fin 0
10.5 cancelled 1 | failed r
== offered: Alive and a repeated Starting postpone the deadline
9 alive 0
9 starting 1
18.9 tick
19 tick | cancel 0 #1, cancel 1 #1
== offered: no deadline frees blocks to which a partner may write
0 abort r | cancel 0 #1, cancel 1 #1
0.5 cancelled 0
1.9 tick
2 tick | cancel 1 #1, connect a where met, quarantined r
2 counts | 1 quarantined
2 suspects | 1
2 awaits 0 | False
2 awaits 1 | True
2 busy | True
3.9 tick
4 tick | cancel 1 #1, connect a where met
1000 tick | cancel 1 #1, connect a where met
1000 alive 1
1000.1 start r2 t | failed r2
1000.2 abort r
1000.3 engine_lost a lost | freed r, forget 0, forget 1
1000.3 counts
== offered: an answer frees the blocks; another request may have the id of the request
0 abort r | cancel 0 #1, cancel 1 #1
2 tick | cancel 0 #1, cancel 1 #1, connect a where met, quarantined r
3 start r t2 | connect a
3 connected | offer 0 t2 #2, offer 1 t2 #2, cancel 0 #1, cancel 1 #1
3 counts | 1 offered, 1 quarantined
3.5 fin 0
3.5 cancelled 1 | freed r
4 fin 0 of=t2
4 fin 1 of=t2 | received r
== offered: a failed write of an abandoned transfer
1 abort r | cancel 0 #1, cancel 1 #1
1.5 failed 1 | quarantined r
1.6 cancelled 0
1.6 counts | 1 quarantined
== offered: workers die one after the other, with blocks in quarantine
10 tick | cancel 0 #1, cancel 1 #1
12 tick | cancel 0 #1, cancel 1 #1, connect a where met, quarantined r
20 worker_lost 1
20 suspects | 0
30 worker_lost 0 | freed r
30 counts
== new: the death of an engine ends its transfers in every stage
0 start r1 | connect a
0 connected | offer 0 t1 #1, offer 1 t1 #1
0 start r2 | offer 0 t2 #2, offer 1 t2 #2
0 start r3 engine=b | connect b
0 queue r4 t4 | await_start 0 t4 #3
1 abort r1 | cancel 0 t1 #1, cancel 1 t1 #1
2 engines | a, b
2 engine_lost a lost | due r4 failed, failed r1, failed r2, forget 0, forget 1
2 engine_lost b lost | failed r3
2 counts
2 engines
3 start r5 | connect a
== offered: messages of others change nothing
1 fin 7
1 fin b0
1 fin 0 of=t9
1 failed b0
1 counts | 1 offered
== known: a request that needs no KV
1 release t9 | cancel 0 t9 #1, cancel 1 t9 #1
2 release t8 b | connect b
3 connect_failed b refused
4 connected b
5 release t7 d | connect d
24.9 tick
24.9 awaits d0 | True
25 tick
25 awaits d0 | False
25 connected d
== offered: an id is for one request, and for lease_s after its end
0 start twin t | failed twin
0 queue twin | due twin failed
8 fin 0
8.5 fin 1 | received r
27.9 start again t | failed again
28.5 tick
28.5 start again t | offer 0 #2, offer 1 #2
== offered: an offer that cannot be sent
1 unsent 0 fin
1 start r2 | offer 0 t2 #2, offer 1 t2 #2
1 unsent 0 offer t2 | cancel 1 t2 #2
2 cancelled 1 of=t2 | failed r2
3 start r3 | connect a
3 release t4 | connect a
4 connected | offer 0 t3 #3, offer 1 t3 #3, cancel 0 t4 #4, cancel 1 t4 #4
5 start r5 | offer 0 t5 #5, offer 1 t5 #5
== offered: an unused engine is removed after half of forget_s, with a Forget for each rank once
1 fin 0
1 fin 1 | received r
1 release t2 | cancel 0 t2 #2, cancel 1 t2 #2
1 unsent 0 cancel t2
1 knows 0 | True
1800 tick
1801 tick | forget 0, forget 1
1801 knows 0 | False
1802 start r2 | connect a
== known: engines are removed in the order of their last use, not of first contact
0 connected b
5 release t9 | cancel 0 t9 #1, cancel 1 t9 #1
1800 tick | forget b0, forget b1
1805 tick | forget 0, forget 1
== offered: the owner drops an engine
1 fin 0
1 forget
2 start r2 | connect a
3 fin 1 | received r
4 connected | offer 0 t2 #2, offer 1 t2 #2
5 fin 0 of=t2
5 fin 1 of=t2 | received r2
6 forget | forget 0, forget 1
7 queue r3 t3 | connect a
7 forget
== new: a queued request is due when its prompt starts
0 queue r | connect a
1 connected | await_start 0 #1
1 counts | 1 queued
1 connected
1 busy | True
1 starting 1
1 fin 0
1 cancelled 0
1 starting 0 | due r
1 counts
2 start r | offer 0 #2, offer 1 #2
== new: a handshake of a queued request fails
0 queue r | connect a
1 connect_failed a refused | due r failed
1 busy | False
== queued: a request that starts leaves the queue
1 start r | offer 0 #2, offer 1 #2
1 counts | 1 offered
== queued: silence ends the wait of a queued request
5 alive 0
14.9 tick
15 tick | due r failed cancelled, cancel 0 #2, cancel 1 #2
== queued: the end of its worker
1 worker_lost 1
1 worker_lost 0 | due r failed cancelled
2 queue r2 t2 | connect a
== queued: a queued request leaves
0 awaits 0 | True
1 release | cancel 0 #2, cancel 1 #2
1 counts
2 starting 0
== offered: an engine with a transfer is not removed
0 abort r | cancel 0 #1, cancel 1 #1
1800 tick | cancel 0 #1, cancel 1 #1, connect a where met, quarantined r
1800 knows 0 | True
== queued: an AwaitStart that cannot be sent
1 unsent 0 await_start t9
1 unsent 0 await_start | due r failed cancelled
1 counts
""")

WITH_DIGESTS = scripts("""
== offered: a verification that hangs
1 fin 0 | verify 0 4 5 6 7 all
1 fin 1 | verify 1 4 5 6 7 all
2 verified 0
20.9 tick
21 tick | failed r
21 verified 1
== offered: a verification that hangs, with blocks in quarantine
1 fin 0 | verify 0 4 5 6 7 all
2 abort r | cancel 1 #1
4 tick | cancel 1 #1, connect a where met, quarantined r
10 cancelled 1
21 tick | freed r
== offered: units are hashed as they arrive, in any order of the messages
1 alive 0 left=21 | verify 0 4
1 alive 0 left=31
1 alive 0 left=11 | verify 0 5
1 alive 0 left=21
1 alive 0 left=11
1 alive 0
1 alive 0 left=0
1 alive 0 left=000
2 fin 0 | verify 0 6 7 all
2 fin 1 | verify 1 4 5 6 7 all
3 verified 0
3 verified 0
3 verified 1
3 verified 0 | received r
== offered: damage of what arrived early is found at the end
1 alive 0 left=11 | verify 0 4 5
2 fin 0 digest=5467 | verify 0 6 7 all wrong
""")


@pytest.mark.parametrize("title", SCRIPTS)
def test_transitions(title: str) -> None:
    state, script = SCRIPTS[title]
    player = ConsumerPlayer()
    player.play(f"{STATES[state]}\n{script}")
    player.leaves_nothing()


@pytest.mark.parametrize("title", WITH_DIGESTS)
def test_transitions_with_digests(title: str) -> None:
    state, script = WITH_DIGESTS[title]
    player = ConsumerPlayer(digests=True)
    player.play(f"{STATES[state]}\n{script}")
    player.leaves_nothing()
