"""Starts the service on this machine: `python -m app.run [--config FILE] [--port N]`, behind `make run`.

Checks the configuration first, starts a Ray cluster of its own (or joins the one at `--address`), runs `serve run`
on the file in the foreground, and says when the service is ready. Ctrl-C, SIGTERM or a failed start stops what it
started.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from configs.settings import DEMO_SERVED_NAME, RoleName, ServiceSettings, SettingsError, parse_scaling, parse_settings

IMPORT_PATH = "app.main:build"
POLL_S = 1.0
REPORT_S = 15.0

CURL = (
    "curl -s http://{address}/v1/completions -H 'Content-Type: application/json' {header}"
    '-d \'{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 8, "temperature": 0}}\''
)
KEY_HEADER = '-H "Authorization: Bearer $KEY" '
DEMO_PROMPT = r"mira=427\nkelo=093\nkelo?"
"""What the demo model was trained for; its answer is 093."""


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; the exit status is 2 for a configuration that cannot be started."""
    parser = argparse.ArgumentParser(prog="python -m app.run", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/local.yaml", help="a Serve config file")
    parser.add_argument("--port", type=int, help="HTTP port instead of the file's")
    parser.add_argument("--address", help="join the Ray cluster there (`auto`: this host's) instead of starting one")
    options = parser.parse_args(argv)
    say(f"checking {options.config}")
    try:
        config, settings = load(Path(options.config), options.port)
    except SettingsError as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 2
    host, _, port = address_of(config, settings).rpartition(":")
    if options.address is None and (taken := port_taken(host, int(port))):
        print(f"tandem: {taken}; stop what listens there, or choose another port (make run PORT=...)", file=sys.stderr)
        return 2
    return serve_until_stopped(config, settings, options.address)


def port_taken(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None; also where another program would share the port."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return f"{host}:{port}: {error.strerror}"


def say(message: str) -> None:
    print(f"tandem: {message}", flush=True)


def load(path: Path, port: int | None) -> tuple[dict[str, Any], ServiceSettings]:
    """What `read` reads, with a model that is there if it is a path, and `port` in place of the file's."""
    config, settings = read(path)
    check_model(settings)
    if port is not None and settings.router.http_port is not None:
        _ours(config)["args"]["router"]["http_port"] = port
        settings = parse_settings(_ours(config)["args"])
    elif port is not None:
        config.setdefault("http_options", {})["port"] = port
    return config, settings


def _ours(config: dict[str, Any]) -> dict[str, Any]:
    """Our application among those of a Serve config."""
    return next(one for one in config["applications"] if one["import_path"] == IMPORT_PATH)


def address_of(config: dict[str, Any], settings: ServiceSettings) -> str:
    """Where clients reach the service: its routers themselves, or Serve's proxy."""
    if settings.router.http_port is not None:
        host = settings.router.http_host
        return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{settings.router.http_port}"
    http = config.get("http_options", {})
    return f"{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}"


def read(path: Path) -> tuple[dict[str, Any], ServiceSettings]:
    """The Serve config in `path` and our settings in it; SettingsError says what is wrong with either."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from actors.arguments import check_arguments

    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"is not YAML: {error}") from None
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    problems = _unknown_keys(config)
    if problems:
        raise SettingsError("\n".join(problems))
    ours = [one for one in config["applications"] if one["import_path"] == IMPORT_PATH]
    if len(ours) != 1:
        raise SettingsError(f"applications: exactly one must have import_path {IMPORT_PATH}")
    settings = parse_settings(ours[0].get("args") or {})
    check_arguments(settings)
    check_policy(ours[0].get("autoscaling_policy") or {}, settings)
    return config, settings


def check_policy(policy: dict[str, Any], settings: ServiceSettings) -> None:
    """Raises SettingsError for what our autoscaling policy cannot use; Serve would say so in a log only."""
    from actors.scaling_policy import POLICY

    if policy.get("policy_function") != POLICY:
        return
    roles: tuple[RoleName, ...] = ("prefill", "decode")
    fixed = [name for name in roles if not settings.role(name).scaled]
    if fixed:
        lines = [f"{name}.replicas: must be an autoscaling_config, or {POLICY} has nothing to choose" for name in fixed]
        raise SettingsError("\n".join(lines))
    try:
        parse_scaling(policy.get("policy_kwargs") or {})
    except SettingsError as error:
        lines = [f"autoscaling_policy.policy_kwargs.{line}" for line in str(error).splitlines()]
        raise SettingsError("\n".join(lines)) from None


def _unknown_keys(config: dict[str, Any]) -> list[str]:
    """Serve ignores keys that it does not know, and with a misspelt `args` all of ours."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    levels: list[tuple[str, Any, Any]] = [("", config, ServeDeploySchema)]
    levels.append(("http_options.", config.get("http_options") or {}, HTTPOptionsSchema))
    levels += [(f"applications.{i}.", one, ServeApplicationSchema) for i, one in enumerate(config["applications"])]
    return [
        f"{where}{key}: Ray Serve has no such key"
        for where, mapping, schema in levels
        for key in mapping
        if key not in schema.model_fields
    ]


def check_model(settings: ServiceSettings) -> None:
    """A path that holds no model would be taken for a hub id, and fail there after a while, less clearly."""
    path = Path(settings.model_path)
    if (path.is_absolute() or settings.model_path.startswith(".")) and not (path / "config.json").is_file():
        raise SettingsError(f"model: there is no config.json in {settings.model_path!r}")


def serve_until_stopped(config: dict[str, Any], settings: ServiceSettings, cluster: str | None) -> int:
    """`serve run` on the Ray cluster at `cluster`, or on one of this process alone."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import click
    import ray
    from ray.serve.scripts import cli

    address = address_of(config, settings)
    interrupt_on_signals()
    if cluster is None:
        say("starting a Ray cluster for this run")
        ray.init(address="local", namespace="serve", include_dashboard=False, log_to_driver=True)
    else:
        say(f"joining the Ray cluster at {cluster}")
        ray.init(address=cluster, namespace="serve", log_to_driver=True)
    interrupt_on_signals()  # Ray has put a handler of its own in their place, which prints a stack trace
    watcher = Watcher(address, settings.model_name, bool(settings.auth.operators_keys()))
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(config, file)
            file.flush()
            watcher.start()
            cli.main(["run", file.name], standalone_mode=False)
    except (KeyboardInterrupt, SystemExit, click.Abort):
        pass
    finally:
        watcher.stop()
        say("stopping Ray")
        ray.shutdown()
        say("stopped")
    return 1 if watcher.failure else 0


def interrupt_on_signals() -> None:
    """Make SIGINT and SIGTERM a KeyboardInterrupt; a shell's background job comes with SIGINT ignored."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)


class Watcher:
    """A thread that reports the start's progress, once says how to use the service, and ends a failed start."""

    def __init__(self, address: str, model: str, wants_key: bool = False) -> None:
        self.failure: str | None = None
        self._address = address
        self._model = model
        self._header = KEY_HEADER if wants_key else ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        began = reported = time.monotonic()
        say(f"starting the engines of {self._model!r}; this takes one to three minutes, more on a busy machine")
        while not self._stopped.wait(POLL_S):
            application = self._application()
            if application is None:
                continue
            if application.status == "DEPLOY_FAILED":
                self.failure = application.message
                print(f"tandem: the service could not start: {self.failure}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGINT)
                return
            if application.status == "RUNNING" and self._healthy():
                say(f"ready after {time.monotonic() - began:.0f} s; try:")
                prompt = DEMO_PROMPT if self._model == DEMO_SERVED_NAME else "Hello"
                curl = CURL.format(address=self._address, model=self._model, prompt=prompt, header=self._header)
                print(curl, flush=True)
                return
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                say(f"still starting ({reported - began:.0f} s): {_progress(application)}")

    def _application(self) -> Any:
        """Serve's view of our application, or None while there is none."""
        from ray import serve

        return next(iter(serve.status().applications.values()), None)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def _progress(application: Any) -> str:
    deployments = [f"{name} {one.status.value.lower()}" for name, one in application.deployments.items()]
    return ", ".join(deployments) or "building the application"


if __name__ == "__main__":
    sys.exit(main())
