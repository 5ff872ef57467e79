"""The KV store as a secondary tier of vLLM's OffloadingConnector, without Tandem's connectors.

KVTransferConfig(
    kv_connector="OffloadingConnector",
    kv_role="kv_both",
    kv_connector_extra_config={
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10 << 30,
        "secondary_tiers": [
            {
                "type": "TandemStoreTier",
                "module_path": "connectors.vllm_hma.offloading_tier",
                "path": "/mnt/nvme/tandem",
                "disk_gib": 200,
            }
        ],
    },
)

vLLM copies chunks between the accelerator and its own CPU tier; this tier copies them between the
CPU tier and files. An object is one chunk of one KV cache group, as vLLM lays it out. The byte
budget, digests, deadlines and shared folders are those of the store (``connectors/store``).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm
from transformers import PretrainedConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from connectors.errors import ConfigurationError, StoreError
from connectors.store.keys.names import KEY_BYTES, NAMESPACE_BYTES
from connectors.store.settings import parse_settings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import CallState, Lane, LaneCall
from connectors.store.tiers.objects import ObjectName
from connectors.store.tiers.reads import Progress, TierReads
from connectors.vllm_hma.handshake.processes import process_start_s
from connectors.vllm_hma.model.identity import is_commit, named_weights
from connectors.vllm_hma.model.media import processor_files

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

_READ_THREADS = 4
_WRITE_THREADS = 2
_QUEUED_LOOKUPS = 256
_QUEUED_READS = 4096
_QUEUED_WRITES = 1024
# vLLM does not report the time to compute a chunk: all objects cost the same per byte.
_COST_NS_PER_BYTE = 1
_KNOWN_KEYS = 100_000
# Keys per lookup call. Answers for a long prompt arrive in parts: parts answered in time count even
# if a later part is late.
_KEYS_PER_LOOKUP = 64


@dataclass(slots=True, eq=False)
class _Lookup:
    """Lookup of one key, for all requests that need it.

    ``asked_at``  time of the lookup call in ``time.monotonic()`` seconds; None before the call
    ``exists``    whether the tier has the object; None until the lookup is answered. False also for
                  a late or rejected lookup, and after a failed load or ``drain_jobs``
    """

    key: OffloadKey
    asked_at: float | None = None
    exists: bool | None = None
    request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Job:
    """Transfer job of vLLM: a load (promotion) or a store of some chunks.

    ``began_at``   time of its submission, in ``time.monotonic()`` seconds
    ``ends_at``    its deadline, on the same clock
    ``calls``      call on a ``Lane``, by key; None if the lane rejected it
    ``progress``   progress of each key's read; empty for stores
    ``abandoned``  True once the job has ended or the tier is shut down: vLLM may then reuse or
                   release the job's chunks of the CPU tier
    """

    job: TransferJob
    began_at: float
    ends_at: float
    calls: dict[OffloadKey, LaneCall[bool] | None] = field(default_factory=dict)
    progress: dict[OffloadKey, Progress] = field(default_factory=dict)
    abandoned: bool = False


_MEDIA_WORDS = frozenset({"vision", "audio", "image", "img", "video", "vq"})
"""Words of the keys that configure images or audio in models' config.json."""


class TandemStoreTier(SecondaryTierManager):
    """Tier of vLLM's offloading that keeps chunks in files below ``path``.

    Only the constructor, ``drain_jobs`` and ``shutdown`` wait for the file system. The constructor
    raises ConfigurationError for invalid arguments and unusable folders, and OSError if a weight
    file cannot be read.

    ``path``, ``disk_gib``, ``lookup_s``  as in ``StoreSettings``
    ``load_s``            time limit of a load job, in seconds
    ``store_s``           time limit of a store job, in seconds
    ``revision``          commit of a Hugging Face Hub model, required for such a model
    ``identity``          text that must differ between engines with different settings that vLLM
                          does not report to tiers: hf_overrides, quantization, content of adapters,
                          dtype if the cache is quantized, max_model_len of a LongRoPE model
    ``media_is_hashed``   whether vLLM names images and audio by content: with
                          ``mm_processor_cache_gb`` above 0 or with prefix caching. Must be True for
                          models with images or audio
    ``enable_kv_events``  whether to report stored and removed chunks, if vLLM's KV events are on
    ``locality``          LOCAL or REMOTE, for vLLM's tier filters
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        path: str,
        disk_gib: float = 64.0,
        lookup_s: float = 0.015,
        load_s: float = 2.0,
        store_s: float = 30.0,
        revision: str | None = None,
        identity: str = "",
        media_is_hashed: bool = False,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not media_is_hashed:
            _check_media(offloading_spec.config.model.name, revision)
        self.locality = _locality(locality)
        limits = {"lookup_s": lookup_s, "load_s": load_s, "store_s": store_s}
        settings = parse_settings({"store": {"path": path, "disk_gib": disk_gib, **limits}})
        self._settings = settings
        # Held while a thread copies from or to the CPU tier, and while ``abandoned`` is set.
        self._memory_lock = threading.Lock()
        self.space = _namespace(offloading_spec, self.block_size_bytes, revision, identity)
        self.folder = FolderTier(Path(settings.path), settings.tiers[0][2])
        self._verified = TierReads(self.folder)
        # The CPU tier, one row of bytes per chunk. Set after the checks that may raise. None after
        # shutdown, so that vLLM can release the memory.
        self._rows: np.ndarray | None = np.asarray(primary_kv_view).view(np.uint8)
        self._lookup_lane = Lane("store-find", 1, _QUEUED_LOOKUPS)
        self._read_lane = Lane("store-read", _READ_THREADS, _QUEUED_READS)
        self._write_lane = Lane("store-write", _WRITE_THREADS, _QUEUED_WRITES)
        # Read the index in the background: only eviction needs it.
        self._write_lane.submit(self.folder.open, time.monotonic() + settings.store_s)
        self._lookups: dict[OffloadKey, _Lookup] = {}
        self._requests: dict[str, set[OffloadKey]] = {}
        self._unasked: list[_Lookup] = []
        self._asked: list[tuple[list[_Lookup], LaneCall[list[bool]]]] = []
        self._jobs: list[_Job] = []
        self._finished: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._known: dict[tuple[bytes, bytes], OffloadKey] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._known = {}
            self.folder.removed = deque(maxlen=_KNOWN_KEYS)

    @property
    def idle(self) -> bool:
        """True if no job is in progress and no call of a lane is queued or running."""
        lanes = (self._lookup_lane, self._read_lane, self._write_lane)
        return not self._jobs and not any(lane.pending for lane in lanes)

    @property
    def remembered(self) -> int:
        """Number of lookups in memory, plus the number of requests with lookups."""
        return len(self._lookups) + len(self._requests)

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT or MISS once the lookup is answered, MISS if it is late, and RETRY before.

        The first call for a key records a new lookup. ``on_schedule_end`` submits it; it is late
        ``lookup_s`` after that.
        """
        self._take_lookups()
        found = self._lookups.get(key)
        if found is None:
            found = self._lookups[key] = _Lookup(key)
            self._unasked.append(found)
        found.request_ids.add(req_context.req_id)
        self._requests.setdefault(req_context.req_id, set()).add(key)
        if found.exists is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found.exists else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        for key in self._requests.pop(req_context.req_id, ()):
            found = self._lookups[key]
            found.request_ids.discard(req_context.req_id)
            if not found.request_ids:
                del self._lookups[key]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Submit the step's new lookups, in the order of the ``lookup`` calls.

        If the lane rejects them, they are misses.
        """
        self._take_lookups()
        waiting, self._unasked = [each for each in self._unasked if each.request_ids], []
        now = time.monotonic()
        for begin in range(0, len(waiting), _KEYS_PER_LOOKUP):
            asked = waiting[begin : begin + _KEYS_PER_LOOKUP]
            names = [self.name(each.key) for each in asked]
            call = self._lookup_lane.submit(partial(self.folder.find_all, names), now + self._settings.lookup_s)
            for each in asked:
                each.asked_at = now
                if call is None:
                    each.exists = False
            if call is not None:
                self._asked.append((asked, call))

    def _take_lookups(self) -> None:
        now, waiting = time.monotonic(), []
        for asked, call in self._asked:
            if call.over:
                answers = call.result if call.state is CallState.ENDED and call.result else [False] * len(asked)
                for each, exists in zip(asked, answers, strict=True):
                    if each.exists is None:  # else a job with this key has ended meanwhile
                        each.exists = exists
            elif asked[0].asked_at is not None and now >= asked[0].asked_at + self._settings.lookup_s:
                for each in asked:
                    if each.exists is None:
                        each.exists = False
            else:
                waiting.append((asked, call))
        self._asked = waiting

    # Transfers.

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata, self._settings.store_s)
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            work = partial(self._store, job, self.name(key), int(chunk))
            job.calls[key] = self._write_lane.submit(work, job.ends_at)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata, self._settings.load_s)
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            progress = job.progress[key] = Progress()
            work = partial(self._load, job, self.name(key), int(chunk), progress)
            job.calls[key] = self._read_lane.submit(work, job.ends_at)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call, complete or not.

        A job ends when its calls have ended, at its deadline, or if its load makes no progress for
        ``lookup_s``.
        """
        self._end_jobs(time.monotonic())
        finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Wait for all jobs, at most until their deadlines. Use a random namespace from now on.

        vLLM calls this before it resets its caches, for example after weights have changed in
        memory, and does not pass the reason. Until vLLM submits the next job, no thread accesses
        the CPU tier. All known lookups become misses, and all known chunks are reported as removed.
        """
        while True:
            self._end_jobs(time.monotonic())
            if not self._jobs:
                break
            time.sleep(0.001)
        self.space = os.urandom(NAMESPACE_BYTES)
        if self._known:
            self._events.append(self._event(list(self._known.values()), removed=True))
            self._known.clear()
        self._asked.clear()
        for each in self._lookups.values():
            each.exists = False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of chunks stored and removed since the last call; evictions come last.

        Reports only chunks that this process has stored (the latest _KNOWN_KEYS), and only removals
        by this process. A chunk that was evicted and stored again since the last call is therefore
        last reported as removed.
        """
        self._note_removals()
        events, self._events = self._events, []
        return events

    def _note_removals(self) -> None:
        removed = []
        while self._known is not None and self.folder.removed:
            name = self.folder.removed.popleft()
            # The folder may have chunks of other models and namespaces.
            key = self._known.pop((name.space, name.key), None)
            removed += [key] if key is not None else []
        if removed:
            self._events.append(self._event(removed, removed=True))

    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys, self.medium, removed=removed, locality=self.locality)

    def shutdown(self) -> None:
        """Stop, and lose the chunks whose writes are queued."""
        for lane in (self._lookup_lane, self._read_lane, self._write_lane):
            lane.close()
        with self._memory_lock:
            for job in self._jobs:
                job.abandoned = True
            self._rows = None
        self.folder.close()

    def _begin(self, job_metadata: TransferJob, limit_s: float) -> _Job:
        now = time.monotonic()
        job = _Job(job_metadata, now, now + limit_s)
        self._jobs.append(job)
        return job

    def _end_jobs(self, now: float) -> None:
        running = []
        for job in self._jobs:
            over = all(call is None or call.over for call in job.calls.values())
            if over or now >= job.ends_at or self._hangs(job, now):
                self._end(job, now)
            else:
                running.append(job)
        self._jobs = running

    def _hangs(self, job: _Job, now: float) -> bool:
        """Return whether no read of a load has progressed for ``lookup_s``; False for stores.

        A queued read progresses with the other reads of the tier (``store/tiers/reads.py``).
        """
        if not job.job.is_promotion:
            return False
        heard = (self._verified.progress_at(each) for each in job.progress.values())
        return now - max(job.began_at, *heard, 0.0) >= self._settings.lookup_s

    def _end(self, job: _Job, now: float) -> None:
        with self._memory_lock:
            # A thread that returns later checks this flag and does not access the chunks.
            job.abandoned = True
        done = [key for key, call in job.calls.items() if call is not None and call.result]
        failed = set(job.calls) - set(done)
        if job.job.is_promotion:
            for key in failed & self._lookups.keys():
                # A miss from now on, so that the requests do not try this load again.
                self._lookups[key].exists = False
        else:
            self._stored(done)
        self._finished.append(
            JobResult(
                job.job.job_id,
                success=not failed,
                successful_keys=tuple(done) if failed and done and job.job.is_promotion else None,
                transfer_time=now - job.began_at,
                transfer_bytes=len(done) * self.block_size_bytes,
            )
        )

    def _stored(self, keys: list[OffloadKey]) -> None:
        for key in self._lookups.keys() & keys:
            self._lookups[key].exists = True
        if self._known is None or not keys:
            return
        self._known.update({(self.space, self.name(key).key): key for key in keys})
        while len(self._known) > _KNOWN_KEYS:
            del self._known[next(iter(self._known))]
        self._events.append(self._event(keys, removed=False))

    # On threads.

    def _store(self, job: _Job, name: ObjectName, chunk: int) -> bool:
        with self._memory_lock:
            # A copy: the write may last longer than vLLM keeps the chunk.
            payload = self._row(job, chunk).copy()
        self.folder.write(name, payload.data, payload.nbytes * _COST_NS_PER_BYTE, job.ends_at)
        return True

    def _load(self, job: _Job, name: ObjectName, chunk: int, progress: Progress) -> bool:
        if job.abandoned:
            raise StoreError("the load job has ended, so its chunk is not read")  # queued behind a disk that hung
        payload = np.empty(self.block_size_bytes, np.uint8)
        self._verified.read(name, payload.data, progress)
        with self._memory_lock:
            self._row(job, chunk)[:] = payload
        return True

    def _row(self, job: _Job, chunk: int) -> np.ndarray:
        """Return a chunk of the CPU tier as an array of bytes. Requires ``_memory_lock``.

        Raises StoreError if the job has ended, the tier is shut down, or the chunk does not exist.
        """
        if job.abandoned or self._rows is None:
            raise StoreError("the job has ended or the tier is shut down, so its chunk is not copied")
        if not 0 <= chunk < len(self._rows):
            raise StoreError(f"vLLM's CPU tier has no chunk {chunk}, so nothing is copied")
        return self._rows[chunk]

    def name(self, key: OffloadKey) -> ObjectName:
        """Return the name of a chunk's object."""
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"tandem-tier").digest()
        return ObjectName(self.space, digest, get_offload_group_idx(key))


def _namespace(spec: OffloadingSpec, block_bytes: int, revision: str | None, identity: str) -> bytes:
    """Return the namespace of a model's chunks.

    vLLM's FileMapper describes the layout and decides whether other TP sizes can read it. Reads all
    weights of a local model, or their cached digests. Raises ConfigurationError if ``revision`` of
    a Hugging Face Hub model is not a commit, and as ``named_weights``.
    """
    model = spec.config.model.name
    if not Path(model).exists() and not is_commit(revision):
        # vLLM does not report its --revision to tiers.
        raise ConfigurationError(
            f"secondary_tiers: revision must be the commit of {model} that the engine serves, 40 hexadecimal digits, "
            f"not {revision!r}; otherwise, KV of another revision could be loaded"
        )
    layout = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    config = Path(model) / "config.json"
    described = {
        "layout": layout.get_run_config() | {"model_name": "", "rank": layout.rank},
        "kv_cache_layout": [spec.config.kv_cache_layout, os.environ.get("VLLM_KV_CACHE_LAYOUT")],
        "weights": named_weights(model, revision, True, process_start_s()),
        "config": hashlib.blake2b(config.read_bytes() if config.is_file() else b"").hexdigest(),
        "image_processing": processor_files(model),
        "identity": identity,
        "block_bytes": block_bytes,
        "engine_version": vllm.__version__,
    }
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES, person=b"tandem-tier").digest()


def _locality(name: str | None) -> Locality | None:
    """Return vLLM's locality of this name; None for None.

    Raises ConfigurationError for an unknown name.
    """
    try:
        return None if name is None else Locality(name)
    except ValueError:
        names = " or ".join(each.value for each in Locality)
        raise ConfigurationError(f"secondary_tiers: locality must be {names}, not {name!r}") from None


def _check_media(model: str, revision: str | None) -> None:
    """Raise ConfigurationError if a model's configuration has a key for images or audio.

    vLLM may name images and audio by counters, so different ones could have the same name.
    """
    try:
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    except (OSError, ValueError):  # without a readable config.json, vLLM serves no images
        return
    if found := _media_key(config):
        raise ConfigurationError(
            f"secondary_tiers: the configuration of {model} has a {found}; set media_is_hashed to true if vLLM names "
            "images and audio by content: with mm_processor_cache_gb above 0, or with prefix caching"
        )


def _media_key(config: Mapping[str, Any]) -> str | None:
    """Return the first key, at any depth, that configures images or audio; None without one."""
    for key, value in config.items():
        if _MEDIA_WORDS & set(key.split("_")):
            return key
        if isinstance(value, Mapping) and (found := _media_key(value)):
            return found
    return None
