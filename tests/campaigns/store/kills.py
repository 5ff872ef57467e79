"""Kill pairs of engines under load, one pair after the other, with one store for all of them.

    python -m tests.campaigns.store.kills [--only llama gemma3] [--restarts 10]

All pairs share a store's path, and each has other TP sizes and another block size than the one
before (``CASES`` of ``restart.py``). Clients send prompts continuously. ``kill -9`` ends both
engines at once while requests run and while an object is being written. Checks of each pair:

loads   prefill loads tokens of prompts that it has not seen before, so an earlier pair stored them
wrong   tokens and logprobs of every answer match those of one engine without a connector, by the
        rules of ``make identity``
budget  all files fit into the budget, under load and after the kill. The budget is too small for
        all prompts, so pairs evict objects
parts   the files that the last pair was writing are removed soon after the start
damage  after the kill, header and digest of each object are right
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from connectors.errors import CorruptObjectError
from connectors.store.tiers.objects import HEADER_BYTES, PayloadDigest, check_payload, parse_header
from testing.engines import Answer
from testing.identity import difference
from testing.models import VOCABULARY
from tests.campaigns.store.engines import Engines, EnginesEndedError, Reply, as_answer
from tests.campaigns.store.restart import CASES, Case, largest_difference, with_other_chunks
from tests.campaigns.store.world import bytes_on_disk

CLIENTS = 4
ANSWERS = 30
"""Minimum number of answers of a pair before it is killed."""
ANSWER_TOKENS = 24
HOT_PROMPTS, OTHER_PROMPTS = 20, 80
BUDGET_BYTES = 48 << 20
CONTROLS = 10
PARTS_S = 30.0
"""Time in seconds after a start within which a pair removes files of dead writers."""
WRITE_S = 60.0
"""Time in seconds within which a pair under load begins a write."""


@dataclass
class Load:
    """Clients of one pair. Each sends one prompt at a time until the engines end.

    ``picks``       indices of the prompts to send
    ``replies``     index of the prompt, and reply, of each answered request
    ``first``       the replies to prompts that were sent to this pair for the first time
    ``unanswered``  number of requests that the kill has ended
    """

    engines: Engines
    prompts: Sequence[list[int]]
    picks: Iterator[int]
    replies: list[tuple[int, Reply]] = field(default_factory=list)
    first: list[tuple[int, Reply]] = field(default_factory=list)
    unanswered: int = 0
    _sent: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send_until_killed(self, killed: threading.Event) -> None:
        """Send prompts until ``killed`` is set. Raises EnginesEndedError if engines end first."""
        while not killed.is_set():
            with self._lock:
                pick = next(self.picks)
                is_first = pick not in self._sent
                self._sent.add(pick)
            try:
                reply = self.engines.ask(self.prompts[pick], ANSWER_TOKENS)
            except EnginesEndedError:
                if not killed.is_set():
                    raise
                with self._lock:
                    self.unanswered += 1
                return
            with self._lock:
                self.replies.append((pick, reply))
                if is_first:
                    self.first.append((pick, reply))


@dataclass
class Life:
    """Record of one pair, from its start to its kill.

    ``parts``       files that it was writing when it was killed
    ``objects``     names of the objects after the kill
    ``most_bytes``  largest observed sum of all file sizes
    ``problems``    findings that need no comparison with another engine
    """

    load: Load
    parts: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    most_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def see_bytes(self, path: Path) -> None:
        size = bytes_on_disk(path)
        self.most_bytes = max(self.most_bytes, size)
        if size > BUDGET_BYTES:
            self.problems.append(f"{size} bytes on disk exceed the budget of {BUDGET_BYTES}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def damaged(path: Path) -> list[str]:
    """Return a description of each object that a reader would reject."""
    found = []
    for file in (path / "objects").glob("*/*"):
        data = file.read_bytes()
        try:
            digest = PayloadDigest(memoryview(data)[HEADER_BYTES:]).digest()
            check_payload(parse_header(data[:HEADER_BYTES], len(data)), len(data) - HEADER_BYTES, digest)
        except CorruptObjectError as error:
            found.append(f"{file.name}: {error}")
    return found


def live(engines: Engines, prompts: Sequence[list[int]], picks: Iterator[int], path: Path, left: set[str]) -> Life:
    """Send prompts to a pair, and kill it during a write.

    ``left``  files that earlier pairs were writing when they were killed
    """
    life = Life(Load(engines, prompts, picks))
    killed = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        try:
            clients = [pool.submit(life.load.send_until_killed, killed) for _ in range(CLIENTS)]
            began = time.monotonic()
            while left & names(path / "parts") or len(life.load.replies) < ANSWERS:
                _raise_failure(clients)
                life.see_bytes(path)
                if time.monotonic() - began > PARTS_S and (kept := left & names(path / "parts")):
                    life.problems.append(f"{len(kept)} files of dead writers remain after {PARTS_S:.0f} s")
                    left = set()
                time.sleep(0.5)
            latest = time.monotonic() + WRITE_S
            while not names(path / "parts"):
                _raise_failure(clients)
                if time.monotonic() > latest:
                    life.problems.append(f"no write began within {WRITE_S:.0f} s")
                    break
                time.sleep(0.0002)
        finally:
            killed.set()
            engines.kill()
    _raise_failure(clients)
    life.parts, life.objects = names(path / "parts"), {file.name for file in (path / "objects").glob("*/*")}
    life.see_bytes(path)
    life.problems += damaged(path)
    return life


def _raise_failure(clients: Iterable[Future[None]]) -> None:
    for client in clients:
        if client.done():
            client.result()


def lives(case: Case, model: str, folder: Path, prompts: Sequence[list[int]], restarts: int) -> list[Life]:
    """Start ``restarts`` + 1 pairs, one after the other, and kill each under load."""
    picks, path = picked(len(prompts)), folder / "store"
    found: list[Life] = []
    for number in range(restarts + 1):
        shape = (case.first, case.second)[number % 2]
        setup = replace(case.setup(model, shape, path), disk_gib=BUDGET_BYTES / (1 << 30))
        with Engines(setup, folder / f"pair-{number}.log") as engines:
            found.append(live(engines, prompts, picks, path, found[-1].parts if found else set()))
        life = found[-1]
        print(
            f"  pair {number}, TP {' -> '.join(map(str, shape.tp_sizes))}, blocks of {engines.block_sizes}: "
            f"{len(life.load.replies)} answers, loaded {loaded(life)} of {known(found)} tokens of prompts that earlier "
            f"pairs have answered; killed during {life.load.unanswered} requests and {len(life.parts)} writes, "
            f"at most {life.most_bytes / 1e6:.1f} MB on disk",
            flush=True,
        )
    return found


def picked(count: int) -> Iterator[int]:
    """Yield indices of prompts without end: half are hot ones, half the others in order."""
    dice = random.Random(21)
    others = itertools.cycle(range(HOT_PROMPTS, count))
    while True:
        yield dice.randrange(HOT_PROMPTS) if dice.random() < 0.5 else next(others)


def loaded(life: Life) -> int:
    """Return how many tokens prefill loaded of prompts that were new to the pair."""
    return sum(reply["prefill_cached"] for _, reply in life.load.first)


def known(found: Sequence[Life]) -> int:
    """Return how many tokens the last pair could have loaded if nothing had been evicted."""
    *earlier, last = found
    answered = {pick for life in earlier for pick, _ in life.load.replies}
    return sum(len(last.load.prompts[pick]) for pick, _ in last.load.first if pick in answered)


def right_answers(
    case: Case, model: str, folder: Path, prompts: Sequence[list[int]]
) -> tuple[list[Answer], list[Answer]]:
    """Return one engine's answers to all prompts, and its answers to the control prompts.

    A control prompt has other tokens in all whole chunks, so the comparison must notice it.
    """
    controls = [with_other_chunks(prompt, case.chunk_tokens) for prompt in prompts[:CONTROLS]]
    with Engines(case.alone(model, case.second), folder / "alone.log") as engine:
        answers = [as_answer(engine.ask(prompt, ANSWER_TOKENS)) for prompt in [*prompts, *controls]]
    return answers[: len(prompts)], answers[len(prompts) :]


def check(name: str, case: Case, restarts: int) -> bool:
    """Run one case; return whether it has no problems."""
    dice, tolerance = random.Random(22), case.family.tolerance
    prompts = [
        [dice.randrange(4, VOCABULARY) for _ in range(dice.randrange(case.chunk_tokens + 20, 6 * case.chunk_tokens))]
        for _ in range(HOT_PROMPTS + OTHER_PROMPTS)
    ]
    print(f"{name}:", flush=True)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        model = case.family.build(folder / "model")
        right, controls = right_answers(case, model, folder, prompts)
        found = lives(case, model, folder, prompts, restarts)
    problems, worst, evicted, near_ties = [], 0.0, 0, 0
    for number, life in enumerate(found):
        problems += [f"pair {number}: {problem}" for problem in life.problems]
        for pick, reply in life.load.replies:
            got = as_answer(reply)
            worst = max(worst, largest_difference(right[pick], got))
            if (problem := difference(right[pick], got, tolerance)) is not None:
                problems.append(f"pair {number}, prompt {pick} of {len(prompts[pick])} tokens: {problem}")
            else:
                near_ties += right[pick].tokens != got.tokens
        if number:
            evicted += len(found[number - 1].objects - life.objects)
            if not loaded(life):
                problems.append(f"pair {number}: prefill loaded nothing that an earlier pair had stored")
    noticed = sum(difference(one, other, tolerance) is not None for one, other in zip(right, controls, strict=False))
    most_bytes = max(life.most_bytes for life in found)
    print(
        f"{name}: {restarts} restarts, {sum(len(life.load.replies) for life in found):,} answers, "
        f"{len(problems)} problems, largest difference of a logprob {worst:.1e}, {near_ties} answers differ after a "
        f"near-tie; {sum(map(loaded, found)):,} tokens loaded of prompts new to a pair; "
        f"{sum(life.load.unanswered for life in found)} requests and {sum(len(life.parts) for life in found)} writes "
        f"killed, {sum(bool(life.parts) for life in found)} of {len(found)} kills during a write; at most "
        f"{most_bytes / 1e6:.1f} of {BUDGET_BYTES / 1e6:.1f} MB on disk, at least {evicted} objects evicted; "
        f"control: {noticed} of {len(controls)} prompts noticed",
        flush=True,
    )
    for line in problems[:8]:
        print(f"  {line}", flush=True)
    return not problems


def main() -> int:
    """Run the cases; return 0 if none has problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pairs = [name for name, case in CASES.items() if len(case.first.tp_sizes) == 2 and not case.needs_amx]
    parser.add_argument("--only", nargs="+", choices=pairs, default=["llama", "gemma3", "falcon_h1"], metavar="CASE")
    parser.add_argument("--restarts", type=int, default=10)
    options = parser.parse_args()
    results = [check(name, CASES[name], options.restarts) for name in options.only]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
