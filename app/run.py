"""Start the service on this machine: `tandem run` or `make run`.

Checks the configuration, starts a Ray cluster (or joins the one at `--address`), deploys the
configuration with `serve run` in the foreground, and prints the stages of the start. After Ctrl-C,
SIGTERM, SIGHUP or a failed start, the launcher shuts Serve down, also on a cluster that it has
joined, and ends all processes that it has started. Logs of Ray, actors and engines are in the Ray
session's log directory; VERBOSE=1 also prints those of actors and engines.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from urllib.request import getproxies

import psutil
import yaml
from pydantic import BaseModel, ValidationError

from actors.engine.arguments import check_arguments
from actors.tls import local_opener
from app.installation import EXAMPLE, config_file, environment
from app.launch_environment import (
    OBJECT_STORE_BYTES,
    prepare_environment,
    ray_temporary_directory,
    shared_memory,
)
from app.start_screen import (
    EngineStages,
    Screen,
    StartFailure,
    failure_of,
    last_error,
    replicas_at_start,
)
from configs.settings.base import ROLES, SettingsError
from configs.settings.parsing import changed_limits, parse_scaling, parse_settings
from configs.settings.service import DEMO_SERVED_NAME, ServiceSettings

IMPORT_PATH = "app.main:build"

AWAITED = "to be scheduled"
"""Part of Serve's message about replicas that it has not scheduled for lack of resources."""

ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, and the loopback address that clients on this machine use instead."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEATED = (signal.SIGTERM, signal.SIGHUP)
SAME_STOP_S = 1.0
"""Seconds after a signal of REPEATED in which the same signal does nothing.

`make` forwards a SIGTERM, and a shell SIGHUP, that this process also receives as a member of its
group.
"""
SHUTDOWN_S = 30.0
"""Limit of `serve.shutdown`, after which it returns without an error."""
END_S = 1.0
POLL_S = 0.25
HEALTH_TIMEOUT_S = 5.0

CURL = (
    "curl -s {address}/v1/completions -H 'Content-Type: application/json' {header}"
    '-d \'{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 8, "temperature": 0}}\''
)
KEY_HEADER = '-H "Authorization: Bearer $KEY" '
NO_PROXY = "--noproxy '*' "
SLOW_NODE = "node timed out during startup"

DEMO_PROMPT = r"mira=427\nkelo=093\nkelo?"
"""A prompt in the format of the demo model's training data; the answer is 093."""


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; return the exit status.

    2: the configuration is invalid, the HTTP port cannot be used, or shared memory is too small;
    1: Ray or the service did not start; 0: stopped by a signal.
    """
    options = parser().parse_args(argv)
    screen = Screen()
    screen.stage(f"environment: {environment()}")
    try:
        if changed := prepare_environment():
            screen.say(changed)
        config, settings = load(config_file(options.config), options.port, options.host)
    except SettingsError as error:
        screen.error(f"{options.config}: {error}")
        return 2
    screen.stage(f"model: {', '.join(one.model_name for one in settings.each_model().values())} ({options.config})")
    if options.host in ALL_ADDRESSES and not settings.auth.all_keys():
        screen.say("clients need no API key: publish the port to trusted clients only, or set TANDEM_API_KEYS")
    if options.address is None and settings.transfer.side_channel_port:
        screen.error(
            f"{options.config}: transfer.side_channel_port must be 0 without --address: all engines are on this node, "
            "and no two of them can listen on one port"
        )
        return 2
    if options.address is None and (taken := port_taken(*listening_address(config, settings))):
        screen.error(
            f"tandem: {taken}; stop the program that uses the port, or choose another port (make run PORT=...) or host"
        )
        return 2
    if options.address is None:
        what, remedy = shared_memory(sum(replicas_at_start(settings).values()))
        if remedy:
            screen.error(f"tandem: {what}; {remedy}")
            return 2
    try:
        return serve_until_stopped(config, settings, options.address, screen)
    except Stop:  # before the deployment; a cluster that Ray started here ends with this process
        return 0


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="tandem run", description=__doc__.splitlines()[0])
    arguments.add_argument("--config", default=EXAMPLE, help="a Serve config file")
    arguments.add_argument("--host", help="HTTP address; overrides the one in the config file; 0.0.0.0: all interfaces")
    arguments.add_argument("--port", type=int, help="HTTP port; overrides the port in the config file")
    arguments.add_argument("--address", help="address of a Ray cluster to join (`auto`: this host's); unset: start one")
    return arguments


def port_taken(host: str, port: int) -> str | None:
    """Return the reason why the port cannot be used, or None.

    Also detects programs that share the port with SO_REUSEPORT.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return f"{host}:{port}: {error.strerror}"
    except OverflowError:
        return f"{host}:{port}: port must be 0-65535"


def load(path: Path, port: int | None, host: str | None = None) -> tuple[dict[str, Any], ServiceSettings]:
    """Return the Serve config in `path` and Tandem's settings in it.

    ``port``, ``host``  replace the HTTP port and address of the routers, or of Serve's proxy if the
                        routers have none; None: keep them

    Raises SettingsError if the file is invalid or cannot be read, if the path of a model has no
    `config.json`, or if the environment has invalid API keys.
    """
    config, settings = read(path)
    for one in settings.each_model().values():
        check_model(one)
    settings.auth.all_keys()  # refuses invalid keys in the environment
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if given and settings.router.http_port is not None:
        router = ours(config).setdefault("args", {}).setdefault("router", {})
        router |= {f"http_{name}": value for name, value in given.items()}
        settings = parse_settings(ours(config)["args"])
    elif given:
        config.setdefault("http_options", {}).update(given)
    return config, settings


def ours(config: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in config["applications"] if one["import_path"] == IMPORT_PATH)


def listening_address(config: dict[str, Any], settings: ServiceSettings) -> tuple[str, int]:
    if settings.router.http_port is not None:
        return settings.router.http_host, settings.router.http_port
    http = config.get("http_options", {})
    return http.get("host", "127.0.0.1"), http.get("port", 8000)


def url_of(config: dict[str, Any], settings: ServiceSettings) -> str:
    host, port = listening_address(config, settings)
    host = ALL_ADDRESSES.get(host, host)
    scheme = "https" if settings.router.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def read(path: Path) -> tuple[dict[str, Any], ServiceSettings]:
    from ray.serve.schema import ServeDeploySchema

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"is not YAML: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"must be a mapping with `applications`, as in {EXAMPLE}")
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    problems = _unknown_keys(config, ServeDeploySchema)
    if problems:
        raise SettingsError("\n".join(problems))
    ours = [one for one in config["applications"] if one["import_path"] == IMPORT_PATH]
    if len(ours) != 1:
        raise SettingsError(f"applications: exactly one must have import_path {IMPORT_PATH}")
    settings = parse_settings(ours[0].get("args") or {})
    check_arguments(settings)
    check_policy(ours[0].get("autoscaling_policy") or {}, settings)
    check_user_config(ours[0].get("deployments") or [], settings)
    return config, settings


def check_user_config(deployments: list[dict[str, Any]], settings: ServiceSettings) -> None:
    """Raise SettingsError for a `user_config` of the router that has an invalid key or value.

    Serve would accept it, and the router would log the error and keep its settings.
    """
    for i, one in enumerate(deployments):
        if one.get("name") != "Router" or one.get("user_config") is None:
            continue
        with errors_in(f"deployments.{i}.user_config."):
            changed_limits(settings.router.limits(), one["user_config"])


def check_policy(policy: dict[str, Any], settings: ServiceSettings) -> None:
    """Raise SettingsError for a policy at which Serve's controller would at most log an error."""
    from ray.serve.config import AutoscalingPolicy

    from actors.autoscaling.policy import POLICY

    if unknown := _unknown_keys(policy, AutoscalingPolicy, "autoscaling_policy."):
        raise SettingsError("\n".join(unknown))
    # Serve also accepts a dot instead of the colon.
    if str(policy.get("policy_function")).replace(":", ".") != POLICY.replace(":", "."):
        return
    fixed = [name for name in ROLES if not settings.role(name).scaled]
    if settings.models:
        raise SettingsError(f"autoscaling_policy: {POLICY} scales one model; scale each role of `models` by itself")
    if fixed:
        lines = [f"{name}.replicas: must be an autoscaling_config: {POLICY} scales both roles" for name in fixed]
        raise SettingsError("\n".join(lines))
    with errors_in("autoscaling_policy.policy_kwargs."):
        parse_scaling(policy.get("policy_kwargs") or {})


@contextlib.contextmanager
def errors_in(section: str) -> Iterator[None]:
    """Add the path of a section to the keys in a SettingsError."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError("\n".join(section + line for line in str(error).splitlines())) from None


def _unknown_keys(given: dict[str, Any], schema: type[BaseModel], where: str = "") -> list[str]:
    """Return an error for each key that Serve's schema lacks, and that Serve would ignore."""
    problems = [f"{where}{key}: Ray Serve has no such key" for key in given if key not in schema.model_fields]
    for key, field in schema.model_fields.items():
        value, inner = given.get(key), _model_in(field.annotation)
        below = [(f"{key}.{i}", one) for i, one in enumerate(value)] if isinstance(value, list) else [(key, value)]
        for path, one in below:
            if inner is not None and isinstance(one, dict):
                problems += _unknown_keys(one, inner, f"{where}{path}.")
    return problems


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def check_model(settings: ServiceSettings) -> None:
    """Raise SettingsError if a path in `model` has no `config.json`.

    A path is absolute or begins with a dot. vLLM would report a missing path as an invalid hub id.
    """
    path = Path(settings.model_path)
    if (path.is_absolute() or settings.model_path.startswith(".")) and not (path / "config.json").is_file():
        raise SettingsError(f"model: there is no config.json in {settings.model_path!r}")


def ray_logs() -> str:
    logs = Path(ray_temporary_directory(), "ray", "session_latest", "logs").resolve()
    return str(logs) if logs.is_dir() else ""


def start_ray(init: Callable[[], object], screen: Screen) -> None:
    """Call `init`, and once more if the Ray node timed out during its start on a busy machine."""
    try:
        init()
    except Exception as error:
        if SLOW_NODE not in str(error):
            raise
        screen.say("Ray did not start in time; trying once more")
        init()


def serve_until_stopped(config: dict[str, Any], settings: ServiceSettings, cluster: str | None, screen: Screen) -> int:
    """Run `serve run` on the Ray cluster at `cluster`, or on a new one; return the exit status.

    Raises Stop if a signal arrives before the deployment.
    """
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    verbose = os.environ.get("VERBOSE", "0") not in ("", "0")
    logging.getLogger("ray").setLevel(logging.INFO if verbose else logging.ERROR)
    import ray
    from ray.serve.scripts import cli

    from actors.upstream.ray_processes import start_in_own_sessions

    stop_on_signals()
    start_in_own_sessions()
    options = {"namespace": "serve", "log_to_driver": verbose} | ({} if verbose else {"logging_level": logging.ERROR})
    own = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    where = own if cluster is None else {"address": cluster}
    earlier = ray_logs()
    try:
        start_ray(lambda: ray.init(**where, **options), screen)
    except Exception as error:  # for example a timeout, a wrong address, or another Ray release there
        found = "" if ray_logs() == earlier else ray_logs()
        screen.error(str(StartFailure("cannot start or join Ray:", f"{type(error).__name__}: {error}", found)))
        return 1
    screen.stage("Ray: started" if cluster is None else f"Ray: joined the cluster at {cluster}")
    stop_on_signals()  # Ray has installed a handler that prints a stack trace
    from actors.upstream.ray_private import log_directory

    logs = log_directory()
    if not verbose:
        screen.quiet(logs / "launcher.log")
    watcher = Watcher(config, settings, logs, screen)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
            yaml.safe_dump(config, file)
            file.flush()
            watcher.start()
            cli.main(["run", file.name], standalone_mode=False)
    except Stop:
        pass
    except SystemExit:  # `serve run` has printed its error
        printed = (logs / "launcher.log").read_text(encoding="utf-8", errors="replace") if not verbose else ""
        watcher.failure = StartFailure("service did not start:", last_error(printed), str(logs / "launcher.log"))
    finally:
        with contextlib.suppress(Stop):  # after a second signal, do not wait for running requests
            if watcher.failure is None:
                screen.say("stopping")
            watcher.stop()
            if watcher.is_ready or cluster is not None:
                drains = (one.role(name).drain_s for one in settings.each_model().values() for name in ROLES)
                shut_down(max(settings.router.drain_s, *drains))
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end_ray([] if cluster is not None else psutil.Process().children(recursive=True))
        screen.stage("stopped")
    if watcher.failure is None:
        return 0
    screen.error(str(watcher.failure))
    return 1


class Stop(BaseException):
    """Exception that stops the launcher after Ctrl-C, another signal or a failed start.

    Not a KeyboardInterrupt: after one, `serve run` waits up to 30 s for starting replicas.
    """


def stop_on_signals() -> None:
    latest: dict[int, float] = {}

    def stop(number: int, _: object) -> None:
        now = time.monotonic()
        if number not in REPEATED or now - latest.get(number, -math.inf) >= SAME_STOP_S:
            latest[number] = now
            raise Stop

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: started by `nohup`
            signal.signal(number, stop)


def shut_down(drain_s: float) -> None:
    """Shut Serve down; wait until replicas that drain for `drain_s` have ended."""
    from ray import serve

    for _ in range(int(drain_s / SHUTDOWN_S) + 1):
        began_at = time.monotonic()
        serve.shutdown()
        if time.monotonic() - began_at < SHUTDOWN_S:
            return


def end_ray(family: list[psutil.Process]) -> None:
    """Disconnect from Ray, which ends an own cluster, then kill those in `family` that still run.

    Engines interrupted during their start do not detect the end of their actor within END_S.
    """
    import ray

    ray.shutdown()
    _, left = psutil.wait_procs(family, timeout=END_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=END_S)


class Watcher:
    """Thread that prints the stages of the start, then an example request; stops a failed start."""

    def __init__(self, config: dict[str, Any], settings: ServiceSettings, logs: Path, screen: Screen) -> None:
        from ray.serve.schema import ServeApplicationSchema

        from actors.engine.startup.start_progress import StartWatch

        self.failure: StartFailure | None = None
        self.is_ready = False
        self._address = url_of(config, settings)
        self._name = ServeApplicationSchema.model_validate(ours(config)).name
        self._model = next(iter(settings.each_model().values())).model_name
        self._options = (KEY_HEADER if settings.auth.all_keys() else "") + (NO_PROXY if getproxies() else "")
        self._logs = logs
        self._screen = screen
        self._stages = EngineStages(replicas_at_start(settings))
        self._watch = StartWatch()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start-watcher", daemon=True)

    def start(self) -> None:
        self._watch.open()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(HEALTH_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(POLL_S) and not self._look():
                pass
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._watch.close()

    def _look(self) -> bool:
        application = self._application()
        if application is None:
            return False
        reports = self._watch.reports()
        messages = [one.message.strip() for one in application.deployments.values()]
        waiting = next((message.splitlines()[0] for message in messages if AWAITED in message), "")
        for line in self._stages.advance(reports, self._screen.elapsed_s, waiting):
            self._screen.line(line)
        if application.status == "DEPLOY_FAILED":
            failed = {f"deployment {name}": one.message for name, one in application.deployments.items()}
            failed = {name: text for name, text in failed.items() if "Error" in text or "error" in text}
            self.failure = failure_of(reports, failed | {"service": application.message}, str(self._logs))
            self._screen.stage("the start failed; stopping")
            os.kill(os.getpid(), signal.SIGINT)
            return True
        if application.status == "RUNNING" and self._healthy():
            self._print_ready()
            self.is_ready = True
            return True
        return False

    def _print_ready(self) -> None:
        prompt = DEMO_PROMPT if self._model == DEMO_SERVED_NAME else "Hello"
        curl = CURL.format(address=self._address, model=self._model, prompt=prompt, header=self._options)
        self._screen.say(f"ready after {self._screen.elapsed_s:.1f} s at {self._address}")
        self._screen.line(curl)
        self._screen.say(f"status page: {self._address}/")
        self._screen.say(f"logs: {self._logs}")

    def _application(self) -> Any:
        from ray import serve

        return serve.status().applications.get(self._name)

    def _healthy(self) -> bool:
        try:
            with local_opener().open(f"{self._address}/health", timeout=HEALTH_TIMEOUT_S) as reply:
                return bool(json.load(reply)["status"] == "ok")
        except (OSError, ValueError):
            return False


if __name__ == "__main__":
    sys.exit(main())
