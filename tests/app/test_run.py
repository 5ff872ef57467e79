"""Configurations and addresses that the launcher refuses before it starts a process."""

import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray import serve
from ray.serve import Application
from ray.serve.schema import ApplicationStatusOverview, ServeStatus

from app import run
from app.launch_environment import prepare_environment
from app.main import DRAIN_POLL_S, build
from app.run import (
    REPEATED,
    SHUTDOWN_S,
    STOP_SIGNALS,
    Screen,
    Stop,
    Watcher,
    listening_address,
    load,
    main,
    port_taken,
    serve_until_stopped,
    shut_down,
    start_ray,
    stop_on_signals,
    url_of,
)
from configs.settings.base import SettingsError
from configs.settings.parsing import parse_settings
from testing.serve_objects import deployment_config_of, deployment_of

LOCAL = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"


ROUTER = ("applications", 0, "deployments", 0)


def write(folder: Path, config: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("path", sorted(LOCAL.parent.glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_configurations_load(path: Path) -> None:
    """Each file has one Tandem application, with valid settings and engine arguments."""
    config, settings = load(path, port=8123)
    assert url_of(config, settings).endswith(":8123")
    assert parse_settings(config["applications"][0]["args"]) == settings
    assert (settings.model == "demo") == (path.name != "gpu.yaml")


def test_the_gpu_configuration_fits_its_gpus() -> None:
    """Both roles run on GPUs, one per rank, and no GPU's memory is used twice."""
    _, settings = load(LOCAL.with_name("gpu.yaml"), port=None)
    for role in (settings.prefill, settings.decode):
        assert role.num_gpus == role.tensor_parallel_size
        assert 0 < (settings.engine | role.engine)["gpu_memory_utilization"] < 1


@pytest.mark.parametrize(
    ("http_options", "router", "port", "address"),
    [
        ({}, {}, None, "127.0.0.1:8100"),
        ({}, {}, 81, "127.0.0.1:81"),
        ({"port": 80}, {}, None, "127.0.0.1:8100"),
        ({"host": "10.0.0.1", "port": 80}, {"http_port": None}, None, "10.0.0.1:80"),
        ({"host": "10.0.0.1", "port": 80}, {"http_port": None}, 81, "10.0.0.1:81"),
        ({"port": 80}, {"http_port": 90}, None, "127.0.0.1:90"),
        ({"port": 80}, {"http_port": 90, "http_host": "10.0.0.1"}, 91, "10.0.0.1:91"),
        ({"port": 80}, {"http_port": 90, "http_host": "0.0.0.0"}, None, "127.0.0.1:90"),
        ({}, {"http_host": "::1"}, None, "[::1]:8100"),
        ({}, {"http_host": "::"}, None, "[::1]:8100"),
        ({"host": "::1", "port": 80}, {"http_port": None}, None, "[::1]:80"),
    ],
)
def test_where_clients_go(tmp_path: Path, http_options: dict, router: dict, port: int | None, address: str) -> None:
    """The routers' address if they listen, else Serve's proxy; `--port` changes the one in use."""
    application = {"name": "t", "import_path": "app.main:build", "args": {"router": router}}
    config = {"http_options": http_options, "applications": [application]}
    assert url_of(*load(write(tmp_path, config), port)) == f"http://{address}"
    everywhere = load(write(tmp_path, config), port, "0.0.0.0")
    assert listening_address(*everywhere)[0] == "0.0.0.0"
    assert url_of(*everywhere) == f"http://127.0.0.1:{address.rpartition(':')[2]}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "^is not YAML: "),
        (b"a: [", "^is not YAML: "),
        (b"", "^must be a mapping with `applications`, as in configs/local.yaml"),
        (b"- a", "^must be a mapping with `applications`, as in configs/local.yaml"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match=message):
        load(path, None)


@pytest.mark.parametrize(
    ("path", "changed", "message"),
    [
        ((), {"http_option": {}}, r"^http_option: Ray Serve has no such key"),
        ((), {"http_options": {"hots": "x"}}, r"^http_options\.hots: Ray Serve has no such key"),
        (("applications", 0), {"arg": {}}, r"^applications\.0\.arg: Ray Serve has no such key"),
        # Serve would keep the options that the builder has set.
        (ROUTER, {"user_confg": {}}, r"^applications\.0\.deployments\.0\.user_confg: Ray Serve has no such key"),
        (ROUTER, {"ray_actor_options": {"num_cpu": 1}}, r"ray_actor_options\.num_cpu: Ray Serve has no such key"),
        (ROUTER, {"autoscaling_config": {"min_replica": 2}}, r"config\.min_replica: Ray Serve has no such key"),
        # The router would only log it, and start with the settings of `args`.
        (ROUTER, {"user_config": {"attempts": 2}}, None),
        (
            ROUTER,
            {"user_config": {"routing": {"polcy": 1}}},
            r"user_config\.routing\.polcy: .* policy",
        ),
        # A missing path is no hub id.
        (("applications", 0, "args"), {"model": "/nowhere"}, r"^model: there is no config\.json in"),
    ],
)
def test_what_serve_or_vllm_would_not_report(
    tmp_path: Path, path: tuple[Any, ...], changed: dict[str, Any], message: str | None
) -> None:
    config = yaml.safe_load(LOCAL.read_text())
    config["applications"][0]["deployments"] = [{"name": "Router"}]
    part = config
    for key in path:
        part = part[key]
    part |= changed
    with pytest.raises(SettingsError, match=message) if message else nullcontext():
        load(write(tmp_path, config), None)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """A listener with SO_REUSEPORT counts: it may be another service, whose routers would share the
    port.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = port_taken("127.0.0.1", port)
        assert taken is not None
        assert taken.startswith(f"127.0.0.1:{port}: Address already in use")
        assert main(["--config", str(LOCAL), "--port", str(port)]) == 2
    assert port_taken("127.0.0.1", port) is None


def test_a_port_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Serve checks the port of its proxy only when it binds it."""
    config = yaml.safe_load(LOCAL.read_text())
    config["applications"][0]["args"]["router"] = {"http_port": None}
    assert main(["--config", str(write(tmp_path, config)), "--port", "70000"]) == 2
    assert "127.0.0.1:70000: port must be 0-65535" in capsys.readouterr().err


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Docker's default. Ray would use the disk, and the engines would fail after minutes."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=64 * 2**8, f_frsize=2**12))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(run, "serve_until_stopped", lambda *_: pytest.fail("Ray would start"))
    assert main(["--config", str(LOCAL), "--port", str(port)]) == 2
    message = "/dev/shm: 64 MiB free; Ray and 2 engines need 448 MiB; enlarge /dev/shm (docker run --shm-size=1g"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sessions", [[], ["session_1"]], ids=["no session", "an earlier session"])
def test_a_ray_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sessions: list[str]
) -> None:
    """The error names no log directory, because this start has none."""
    for session in sessions:
        (tmp_path / "ray" / session / "logs").mkdir(parents=True)
        (tmp_path / "ray" / "session_latest").symlink_to(session)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "unset by the launcher")
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        config, settings = load(LOCAL, None)
        assert serve_until_stopped(config, settings, "no such scheme://here", Screen()) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert error.startswith("tandem: cannot start or join Ray:")
    assert "full log" not in error


def test_engines_of_one_node_cannot_have_one_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an address, the launcher starts a cluster of one node."""
    config = yaml.safe_load(LOCAL.read_text())
    config["applications"][0]["args"]["transfer"] = {"side_channel_port": 5600}
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a launcher that goes on stops at this port
        port = listener.getsockname()[1]
        assert main(["--config", str(write(tmp_path, config)), "--port", str(port)]) == 2
    assert "transfer.side_channel_port must be 0 without --address" in capsys.readouterr().err


def test_every_deployment_drains_as_long_as_its_settings_say():
    """Replaced replicas complete their requests: Serve's default would end them after 20 s."""
    drains = {role: {"drain_s": 40.0 + number} for number, role in enumerate(("prefill", "decode", "router"))}
    router = deployment_of(build(parse_settings(drains)))
    deployments = [router, *(deployment_of(one) for one in router.init_args[1][0] if isinstance(one, Application))]
    found = {one.name.lower(): deployment_config_of(one).graceful_shutdown_timeout_s for one in deployments}
    assert found == {role: own["drain_s"] for role, own in drains.items()}
    assert {deployment_config_of(one).graceful_shutdown_wait_loop_s for one in deployments} == {DRAIN_POLL_S}


SCALED = {"min_replicas": 1, "max_replicas": 2}
POLICY = {"policy_function": "actors.autoscaling.policy:ScaleTogether", "policy_kwargs": {"tpot_s": 0.05}}


def scaled(folder: Path, policy: Mapping[str, object], **roles: object) -> Path:
    config = yaml.safe_load(LOCAL.read_text())
    config["applications"][0]["autoscaling_policy"] = policy
    for role, replicas in roles.items():
        config["applications"][0]["args"][role]["replicas"] = replicas
    return write(folder, config)


def test_an_autoscaling_policy_for_both_roles(tmp_path: Path) -> None:
    _, settings = load(scaled(tmp_path, POLICY, prefill=SCALED, decode=SCALED), None)
    assert settings.prefill.scaled


@pytest.mark.parametrize(
    ("policy", "decode", "message"),
    [
        (POLICY, 2, r"^decode\.replicas: must be an autoscaling_config"),
        (POLICY | {"policy_function": "actors.autoscaling.policy.ScaleTogether"}, 2, r"^decode\.replicas: must be an"),
        (POLICY | {"policy_kwargs": {"tpot": 1}}, SCALED, r"^autoscaling_policy\.policy_kwargs\.tpot: no such setting"),
        (
            {"policy_function": POLICY["policy_function"], "policy_kwarg": {"tpot_s": 0.05}},
            SCALED,
            r"^autoscaling_policy\.policy_kwarg: Ray Serve has no such key",
        ),
        (
            POLICY,
            {"max_replica": 2},
            r"^decode\.replicas\.max_replica: Ray Serve has no such argument; did you mean max",
        ),
        (POLICY, {"min_replicas": 3, "max_replicas": 2}, r"^decode\.replicas: .*max_replicas \(2\) must be"),
    ],
)
def test_a_policy_that_could_not_work(tmp_path: Path, policy: dict[str, object], decode: object, message: str) -> None:
    """Serve would report it in its controller's log, or not at all."""
    with pytest.raises(SettingsError, match=message):
        load(scaled(tmp_path, policy, prefill=SCALED, decode=decode), None)


@pytest.mark.parametrize(("own", "name"), [({"name": "chat"}, "chat"), ({}, "default")], ids=["named", "unnamed"])
def test_the_application_that_the_launcher_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], name: str
) -> None:
    """The port is that of Tandem's application, also if the file lists another one before it."""
    other = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}
    config = {"applications": [other, {"import_path": "app.main:build", **own}]}
    watcher = Watcher(*load(write(tmp_path, config), None), tmp_path, Screen())
    states = {one: ApplicationStatusOverview("RUNNING", "", 0.0, {}) for one in ("other", name)}
    monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications=states))
    assert watcher._application() is states[name]  # noqa: SLF001 - its thread needs a cluster
    del states[name]
    assert watcher._application() is None  # noqa: SLF001


def test_the_printed_command_needs_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/e2e/test_service.py starts the launcher with proxies in its environment."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert "--noproxy" in Watcher(*load(LOCAL, None), tmp_path, Screen())._options  # noqa: SLF001


@pytest.mark.parametrize("second", STOP_SIGNALS)
@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_only_a_repeated_signal_is_ignored(first: signal.Signals, second: signal.Signals) -> None:
    """After a second signal the launcher does not drain. A later one is a second signal."""
    repeated = first == second and first in REPEATED
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        stop_on_signals()
        with pytest.raises(Stop):
            signal.raise_signal(first)
        with nullcontext() if repeated else pytest.raises(Stop):
            signal.raise_signal(second)
        run.SAME_STOP_S = 0.0
        with pytest.raises(Stop):
            signal.raise_signal(second)
    finally:
        run.SAME_STOP_S = 1.0
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("drain_s", "needed_s", "calls"), [(30.0, 20.0, 1), (30.0, 31.0, 2), (120.0, 100.0, 4), (120.0, math.inf, 5)]
)
def test_a_stop_waits_for_the_drain(
    monkeypatch: pytest.MonkeyPatch, drain_s: float, needed_s: float, calls: int
) -> None:
    """`serve.shutdown` waits at most 30 s; the launcher then would end Ray, and cut streams."""
    waits: list[float] = []

    def shutdown() -> None:
        waits.append(min(SHUTDOWN_S, needed_s - sum(waits)))

    monkeypatch.setattr(serve, "shutdown", shutdown)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waits))
    shut_down(drain_s)
    assert len(waits) == calls


@pytest.mark.parametrize("home", ["none", "file"])
def test_a_home_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """Another directory takes its place; a second start uses the same one."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "PYTHONUTF8"):
        monkeypatch.setenv(name, str(tmp_path / home))
    assert "is not a directory" in str(prepare_environment())
    assert Path.home().parent == tmp_path
    assert prepare_environment() is None
    monkeypatch.setenv("HOME", str(tmp_path / home))
    Path(tmp_path, f"tandem-home-{os.getuid()}").chmod(0o777)
    with pytest.raises(SettingsError, match="not a private directory"):
        prepare_environment()


TIMED_OUT = "The current node timed out during startup."


@pytest.mark.parametrize(
    ("errors", "attempts"),
    [([], 1), ([TIMED_OUT], 2), ([TIMED_OUT] * 2, 2), (["no such address"], 1)],
)
def test_a_slow_ray_is_started_once_more(errors: list[str], attempts: int) -> None:
    left, starts = list(errors), list[int]()

    def init() -> None:
        starts.append(1)
        if left:
            raise RuntimeError(left.pop(0))

    with nullcontext() if attempts > len(errors) else pytest.raises(RuntimeError, match=errors[-1]):
        start_ray(init, Screen())
    assert len(starts) == attempts
