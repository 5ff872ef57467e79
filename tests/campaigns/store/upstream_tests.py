"""Run vLLM's own tests of offloading tiers on TandemStoreTier (``make store-upstream-tests``).

    HF_HUB_OFFLINE=1 python -m tests.campaigns.store.upstream_tests vllm-0.32.0.tar.gz

vLLM's wheel has no tests; its source distribution on the package index has them. Their files are
not changed, but these names in them are replaced:

ExampleSecondaryTierManager  ``ExampleTier``: waits for each operation, as the example answers at
                             once
FileSystemTierManager        ``FileTier``
drain                        helper of the tests, which calls ``drain_jobs``; Tandem's also forgets
                             all chunks
offloading specs and views   those that are mocks

NOT_APPLICABLE lists the tests that do not run, with reasons; all others must pass.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from connectors.vllm_hma.offloading_tier import TandemStoreTier

FILES = ("test_factory.py", "test_fs_tier.py", "test_tiering_offloading.py")
"""Tests of vLLM that create one of the two tiers; the folder's other tests define their own."""

NOT_APPLICABLE = {
    "test_invalid_path_raises_at_construction": "an unusable path raises ConfigurationError, not OSError",
    "test_invalid_locality_raises_at_construction": "an unknown locality raises ConfigurationError with another text",
    "test_shutdown_discards_pending_tasks": "inspects the queues of vLLM's thread pool",
    "test_store_load_roundtrip_without_o_direct": "replaces vLLM's probe of O_DIRECT",
    "test_wait_idle_blocks_until_tasks_complete": "tests vLLM's thread pool",
    "test_batch_lookup_c_extension": "tests vLLM's C extension",
    "test_batch_lookup_dispatch": "tests vLLM's C extension",
    "test_mixed_job_results_emit_event_only_for_successful_job": "replaces vLLM's function that writes files",
    "test_batched_load_first_block_fails_marks_whole_batch": "a failed chunk does not end a load of other chunks",
    "test_transient_load_failure_leaves_file": "replaces the file by a symbolic link, which the store removes",
    "test_partially_failed_store_emits_no_event": "a store that fails in part reports the chunks it stored",
}
"""Tests that do not apply to TandemStoreTier, with the reason."""

_WAIT_S = 10.0


class _Adapted(TandemStoreTier):
    """TandemStoreTier with the arguments of vLLM's tiers, patient, and without a real model."""

    started: ClassVar[list[_Adapted]] = []

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        path: str,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(
            offloading_spec if isinstance(offloading_spec.config, OffloadingConfig) else _spec(),
            primary_kv_view if isinstance(primary_kv_view, memoryview) else memoryview(np.zeros((4, 16), np.int8)),
            tier_type,
            backpressure_detector,
            path=path,
            disk_gib=1,
            revision="0" * 40,
            enable_kv_events=enable_kv_events,
            locality=locality,
            lookup_s=_WAIT_S,
            load_s=_WAIT_S,
            store_s=_WAIT_S,
        )
        self.started.append(self)

    def wait(self) -> None:
        """Wait until the calls of all jobs have ended."""
        _wait(lambda: self._read_lane.pending == 0 and self._write_lane.pending == 0)


class ExampleTier(_Adapted):
    """Replaces ``ExampleSecondaryTierManager``; the tests set and read its dictionary of chunks."""

    medium: ClassVar[Medium] = Medium.CPU
    parent: ClassVar[str]

    def __init__(self, *args: Any, custom_param: int = 0, **options: Any) -> None:
        del custom_param
        super().__init__(*args, path=tempfile.mkdtemp(dir=ExampleTier.parent), **options)
        self.chunks = _Chunks(self)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if super().lookup(key, req_context) is LookupResult.RETRY:
            self.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
            _wait(lambda: self._lookup_lane.pending == 0)
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self.wait()

    def submit_load(self, job_metadata: TransferJob) -> None:
        super().submit_load(job_metadata)
        self.wait()

    @property
    def completed_jobs(self) -> list[JobResult]:
        self._end_jobs(time.monotonic())
        return self._finished

    def get_num_chunks(self) -> int:
        return sum(1 for each in Path(self._settings.path).glob("objects/*/*"))


class _Chunks:
    """Stores the first chunk of the CPU tier under each key that a test sets."""

    def __init__(self, tier: ExampleTier) -> None:
        self._tier = tier

    def __setitem__(self, key: OffloadKey, present: bool) -> None:
        assert present
        context = ReqContext(req_id="stored by a test")
        self._tier.submit_store(TransferJob(-1, [key], np.zeros(1, np.int64), False, context))
        finished = self._tier.completed_jobs
        assert [each.success for each in finished if each.job_id == -1] == [True]
        finished[:] = [each for each in finished if each.job_id != -1]


class FileTier(_Adapted):
    """Replaces ``FileSystemTierManager``; the tests read the paths of its files."""

    def __init__(
        self, *args: Any, root_dir: str, n_read_threads: int = 1, n_write_threads: int = 1, **options: Any
    ) -> None:
        del n_read_threads, n_write_threads
        super().__init__(*args, path=root_dir, **options)
        self.file_mapper = SimpleNamespace(get_file_name=self._path_of, base_path=self.space.hex())

    def _path_of(self, key: OffloadKey) -> str:
        name = self.name(key)
        return str(Path(self._settings.path) / "objects" / name.space.hex() / name.key.hex())

    # Attributes of vLLM's tier that the tests read: answered and queued lookups, whether KV events
    # are on, and the keys of store jobs in progress.

    @property
    def _lookup_manager(self) -> SimpleNamespace:
        answered = SimpleNamespace(empty=lambda: not any(call.over for _, call in self._asked))
        return SimpleNamespace(_pending_results=answered, _lookup_batch=self._unasked)

    @property
    def events(self) -> object | None:
        return self._known

    @property
    def _store_job_keys(self) -> dict[int, object]:
        return {each.job.job_id: each.job.keys for each in self._jobs if not each.job.is_promotion}


class _NotReplaced:
    """Fails a test that still gets one of vLLM's two tiers."""

    def __init__(self, *_: object, **__: object) -> None:
        raise AssertionError("this test creates a tier of vLLM, so its name for the tier was not replaced")


def _drain(tier: _Adapted) -> list[JobResult]:
    tier.wait()
    return list(tier.get_finished_jobs())


def _spec() -> SimpleNamespace:
    """Return an offloading spec for tests that pass a mock."""
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="upstream-tests",
        model=OffloadingModelConfig(name="test-model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
    )
    events = OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


def _wait(done: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"the tier was not idle within {_WAIT_S} s"
        time.sleep(0.0005)


class Plugin:
    """Pytest plugin: deselects NOT_APPLICABLE, closes the tiers of each test, counts outcomes.

    ``with_tier``  number of tests that created the tier, by file
    ``repeated``   number of deselected tests that differ from another one in ``use_c_ext`` only, a
                   switch of vLLM's file tier
    """

    def __init__(self) -> None:
        self.passed = 0
        self.skipped = 0
        self.failed: list[str] = []
        self.not_applicable: dict[str, int] = dict.fromkeys(NOT_APPLICABLE, 0)
        self.repeated = 0
        self.with_tier = dict.fromkeys(FILES, 0)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            name = getattr(item, "originalname", item.name)
            if name in NOT_APPLICABLE:
                self.not_applicable[name] += 1
                config.hook.pytest_deselected(items=[item])
            elif isinstance(item, pytest.Function) and _parameters(item).get("use_c_ext"):
                self.repeated += 1
                config.hook.pytest_deselected(items=[item])
            else:
                kept.append(item)
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if isinstance(item, pytest.Function) and hasattr(item.module, "drain"):
            item.module.drain = _drain
        try:
            return (yield)
        finally:
            self.with_tier[item.path.name] += bool(_Adapted.started)
            for tier in _Adapted.started:
                tier.shutdown()
            _Adapted.started.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1


def _parameters(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def unpack(sdist: Path, folder: Path) -> Iterable[str]:
    """Write FILES of vLLM's source distribution into ``folder``; return their paths.

    Exits with a message if the distribution is of another version than the installed vLLM.
    """
    version = vllm.__version__.partition("+")[0]
    with tarfile.open(sdist) as archive:
        for name in FILES:
            try:
                found = archive.extractfile(f"vllm-{version}/tests/v1/kv_offload/tiering/{name}")
            except KeyError:
                found = None
            if found is None:
                raise SystemExit(f"{sdist} has no {name} of vLLM {version}, the installed version")
            (folder / name).write_bytes(found.read())
            yield str(folder / name)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if all tests that apply pass.

    Return 1 also if NOT_APPLICABLE names a test that does not exist, or if a file has no test that
    creates the tier.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="source distribution of the installed vLLM, from the package index")
    sdist = parser.parse_args(argv).sdist
    if not sdist.is_file():
        parser.error(
            f"no file {str(sdist)!r}: give vLLM's source distribution (of make: SDIST), from the package index"
        )
    for tier in (example.ExampleSecondaryTierManager, fs.FileSystemTierManager):
        tier.__init__ = _NotReplaced.__init__
    example.ExampleSecondaryTierManager = ExampleTier
    fs.FileSystemTierManager = FileTier
    with tempfile.TemporaryDirectory() as temporary:
        ExampleTier.parent = temporary
        plugin = Plugin()
        paths = list(unpack(sdist, Path(temporary)))
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", temporary, "--no-header", "--tb=short"]
        status = pytest.main([*paths, *options], plugins=[plugin])
    for name, count in plugin.not_applicable.items():
        print(f"not applicable ({count}): {name}: {NOT_APPLICABLE[name]}")
    unused = [name for name, count in plugin.not_applicable.items() if not count]
    unused += [name for name, count in plugin.with_tier.items() if not count]
    print(
        f"vLLM {vllm.__version__}: {plugin.passed} passed ({sum(plugin.with_tier.values())} create the tier), "
        f"{len(plugin.failed)} failed, {plugin.skipped} skipped by vLLM, "
        f"{sum(plugin.not_applicable.values())} not applicable, {plugin.repeated} repetitions"
    )
    if unused:
        print(f"tests that do not exist, or files whose tests do not create the tier: {', '.join(unused)}")
    return 1 if status or plugin.failed or unused else 0


if __name__ == "__main__":
    sys.exit(main())
