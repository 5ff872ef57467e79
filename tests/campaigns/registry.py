"""All campaigns by name: where they are, what they show, and whether they decide a release."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

TABLE = """
manifests           manifests:manifests 1 . computes k8s/ fits schemas and settings
alerts              manifests:alerts 1 - promtool promtool's tests of the alerts
plans               suites:plans 2 . computes plans of all shapes equal an oracle's
corruption          suites:corruption 3 . computes digests detect all damaged transfers
fuzz-connector      fuzz.connector:connector 3 COUNT=100 computes hostile peers damage no transfer
explore             protocol.explore:explore 10 PART=1/6 computes every interleaving of small transfers
schedules           schedules.scheduling:schedules 3 . computes random steps of vLLM's scheduler, with drafts too
store-faults        store.campaign:store_faults 5 . computes faults in the KV store
store-schedules     store.scheduling:store_schedules 4 STEPS=24000 computes steps of vLLM's scheduler with a store
gpu-check           gpu.campaign:gpu_check 1 . computes transport, digests and engines on NVIDIA GPUs
identity            shapes.families:identity 3 COUNT=30 - tokens and logprobs of one engine, by TP sizes
families            shapes.families:families 6 COUNT=3,FEWER=1 - every kind of KV cache, unequal shapes
ranks               shapes.families:ranks 2 COUNT=8,ONLY=gemma3 - data-parallel ranks on either side
speculation         shapes.requests:speculation 2 COUNT=6,PAIRS=1:2 - drafts after a handover: tokens, acceptance
adapters            shapes.requests:adapters 1 COUNT=100,PAIRS=1:2 - KV of another LoRA adapter is not used
images              shapes.requests:images 2 COUNT=12,PAIRS=1:2 - KV of another image is not used; encoder runs
store-restart       store.restart:store_restart 4 COUNT=6,KILLS=2,ONLY=llama - others load the KV of killed pairs
faults              faults.campaign:faults 6 COUNT=40,LANES=2 - kill, stop, cancel, forge: right or refused
fault-pairs         faults.campaign:pairs 4 COUNT=8,LANES=2 - two faults at once
differential        differential.campaign:differential 8 . - 1,397 requests answered as one vLLM server does
seam                differential.campaign:seam 4 COUNT=200 - streams whose first token prefill samples
streams             differential.deaths:streams 6 KILLS=4 - streams of every kind, and at the seam, outlive decode
continued           differential.continued:continued 4 . - streams killed or moved at any step, TP 1:2 and 2:1
rank-deaths         service.restarts:rank_deaths 3 KILLS=2 - data-parallel ranks die under load; prefill scales
rolling-restart     service.restarts:rolling_restart 4 COUNT=1 - all replicas replaced under load, and scaled
upgrade             service.upgrades:upgrade 12 - - two releases: pairs stay inside one, under load
head-killed         service.restarts:head_killed 3 ONLY=redis redis-server Ray's head dies, with and without Redis
commands            service.commands:commands 2 . - serve run, status, config, deploy, build, shutdown
models              service.models:models 5 - - two models at one endpoint, adapters under load
fuzz                fuzz.http:http 3 COUNT=1500 - hostile HTTP: no 500, hang or growth
ray-serve-llm       suites:ray_serve_llm 4 . - Ray Serve LLM's own application with TandemConnector
placement           suites:placement 2 . - where Serve places replicas and ranks, on four nodes
overlay-serves      manifests:overlay_serves 2 . - the configuration in an overlay serves
two-hosts           hosts.on_two_hosts:two_hosts 6 . root the link between two hosts is cut and restored
"""
"""Columns: name; module and function below ``tests.campaigns``; minutes of the release run on two
quiet cores; options of the release run (``.``: none, ``-``: it decides no release); ``root`` or a
program that it needs, or ``computes`` if it starts no engines; what it shows.
"""


@dataclass(frozen=True)
class Campaign:
    """One row of the table; ``computes`` campaigns run beside those that start engines."""

    name: str
    where: str
    minutes: float
    release: tuple[str, ...] | None
    needs: str
    purpose: str

    @property
    def computes(self) -> bool:
        return self.needs == "computes"

    @property
    def missing(self) -> bool:
        """Whether this machine lacks what the campaign needs."""
        if self.needs == "root":
            return os.geteuid() != 0
        return self.needs not in ("-", "computes") and shutil.which(self.needs) is None

    def function(self) -> Callable[..., None]:
        module, _, name = self.where.partition(":")
        found: Callable[..., None] = getattr(importlib.import_module(f"tests.campaigns.{module}"), name)
        return found


def _campaign(line: str) -> Campaign:
    name, where, minutes, release, needs, purpose = line.split(maxsplit=5)
    options = None if release == "-" else tuple(release.split(",")) if release != "." else ()
    return Campaign(name, where, float(minutes), options, needs, purpose)


CAMPAIGNS = {one.name: one for one in map(_campaign, TABLE.strip().splitlines())}
