"""`dflash serve`: from a config file to a listening server, and back to nothing on Ctrl-C."""

import contextlib
import json
import logging
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from cluster import death_notes
from cluster.cli import haproxy, local_ray
from cluster.cli.console import BAD_USAGE, FAILED, fail, stderr, user_errors
from cluster.cli.deployment_watch import (
    AppState,
    DrainFailedError,
    StartFailedError,
    drain_replicas,
    look,
    wait_until_running,
)
from cluster.cli.ray_notes import RayNotes
from cluster.config import FABRICATIONS, ClusterConfig, ConfigError, load_config
from cluster.config_check import check_local_cpus, check_models, num_gpus_needed

# A stop is over after 30 s, whatever the config's drain_s: requests get most of it, the end of the ranks and of Ray the
# rest, and what still runs then is ended the hard way.
DRAIN_LIMIT_S = 20.0
_RANKS_LIMIT_S = 5.0  # after the last request
STOP_LIMIT_S = 29.0
_HEALTH_TIMEOUT_S = 60.0
_WATCH_S = 2.0


class _StopRequested(BaseException):
    """SIGINT or SIGTERM arrived. A BaseException, so that no library takes it for an ordinary failure."""


def serve(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config file.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on, over the config's http.host.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port, over the config's http.port.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Use the Ray cluster at this address (or auto) instead of starting one.")
    ] = None,
    allow_simulated: Annotated[
        bool,
        typer.Option(
            "--allow-simulated", help="Serve a simulated device or synthetic acceptance: no answer means anything."
        ),
    ] = False,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard too.")] = False,
    verbose: Annotated[bool, typer.Option(help="Show the logs of Ray and of the replicas.")] = False,
) -> None:
    """Serve the model of a config file over HTTP until Ctrl-C."""
    if dashboard and address is not None:
        fail("--dashboard: applies to a Ray started here; leave it out with --address", status=BAD_USAGE)
    with user_errors(ConfigError):
        loaded = load_config(config)
    if loaded.fabrication is not None and not allow_simulated:
        fail(f"{config}: {FABRICATIONS[loaded.fabrication]}; if that is meant, add --allow-simulated", status=BAD_USAGE)
    http = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    loaded = loaded.model_copy(update={"http": loaded.http.model_copy(update=http)})
    with user_errors(ValueError):
        if address is None:
            check_local_cpus(loaded, local_ray.available_cpus())
            local_ray.check_port_free(loaded.http.host, loaded.http.port)
            if loaded.http.proxy == "haproxy":
                haproxy.check_binary()
    _Server(loaded, address=address, dashboard=dashboard, verbose=verbose).run()


class _Server:
    """One run of the command. Stages are shown as they go; any failure tears down what was started."""

    def __init__(self, config: ClusterConfig, *, address: str | None, dashboard: bool, verbose: bool) -> None:
        self._config = config
        self._address = address
        self._dashboard = dashboard
        self._verbose = verbose
        self._console = stderr()
        self._stopping = False
        self._ray_started = False
        self._serve_started = False
        self._app_started = False
        self._is_announced = False
        self._is_waiting_told = False
        self._files: tempfile.TemporaryDirectory[str] | None = None  # HAProxy's
        listen_host = "127.0.0.1" if config.http.host in ("0.0.0.0", "::") else config.http.host
        prefix = "" if config.deployment.route_prefix == "/" else config.deployment.route_prefix
        self.url = f"http://{f'[{listen_host}]' if ':' in listen_host else listen_host}:{config.http.port}{prefix}"

    def run(self) -> None:
        """Start, announce, wait for a signal, stop. Leaves with a non-zero status if the server cannot start."""
        if self._verbose:
            self._run()
        else:
            with contextlib.redirect_stdout(RayNotes(sys.stdout)):
                self._run()

    def _run(self) -> None:
        failure: str | None = None
        self._handle_signals()
        try:
            self._start()
            self._is_announced = True
            self._announce()
            self._watch()
        except _StopRequested:
            self._console.print()
        except (StartFailedError, ValueError) as error:
            failure = str(error)
        self._stopping = True
        self._stop(graceful=failure is None)
        if failure is not None:
            fail(f"the server cannot start: {failure}", status=FAILED)

    def _handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            local_ray.end_at_once()
        self._stopping = True
        raise _StopRequested

    def _start(self) -> None:
        self._fetch_models()
        with self._stage("starting Ray" if self._address is None else f"connecting to Ray at {self._address}"):
            if self._address is None:
                if self._config.http.proxy == "haproxy":
                    self._files = tempfile.TemporaryDirectory(prefix="dflash-")
                    haproxy.apply(haproxy.environment(Path(self._files.name), num_cpus=local_ray.available_cpus()))
                self._ray_started = True
                local_ray.start(num_cpus=local_ray.available_cpus(), dashboard=self._dashboard, verbose=self._verbose)
                local_ray.check_gpus(num_gpus_needed(self._config))
            else:
                local_ray.connect(self._address, verbose=self._verbose)
        with self._stage("starting Ray Serve"):
            proxy = self._start_serve()
        with self._stage("starting the engine") as status:
            self._deploy()
            wait_until_running(
                self._config.deployment.app,
                lambda state: self._show_start(state, status, proxy),
            )
        with self._stage("waiting for the first health check"):
            self._wait_for_proxy(proxy)
            wait_until_healthy(f"{self.url}/health", _HEALTH_TIMEOUT_S)

    def _show_start(self, state: AppState, show: Callable[[str | None], None], proxy: "Future[None]") -> None:
        if proxy.done():  # one that failed ends the start, however long the engine would still take
            self._wait_for_proxy(proxy)
        show(f"starting the engine ({state.replicas})" if state.replicas else None)
        if state.waiting is not None and not self._is_waiting_told:
            self._is_waiting_told = True
            self._console.print(state.waiting, style="yellow", markup=False)

    def _fetch_models(self) -> None:
        """Download and convert before Ray starts, so that progress is visible and replicas find everything there.

        It also resolves the engine's config, so that a model and a drafter that do not fit are refused here.
        """
        with self._stage("preparing the model"):
            check_models(self._config, download=True)

    def _start_serve(self) -> "Future[None]":
        """Returns once Serve takes applications: its proxy, which takes as long, starts beside the engine. The future
        is done with it."""
        from ray import serve as ray_serve

        if not self._verbose:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        http, proxy = self._config.http, Future[None]()
        if local_ray.serve_runs():
            self._console.print(
                "Ray Serve runs there already; it keeps the address, port and proxy it was started with", style="yellow"
            )
            proxy.set_result(None)
            return proxy
        if self._address is not None and http.proxy == "haproxy":
            self._console.print(
                "http.proxy: haproxy has no effect with --address; Ray Serve listens there with what the environment "
                "of the cluster's own processes says, Python's proxy by default",
                style="yellow",
                markup=False,
            )
        self._serve_started = True
        options: dict[str, Any] = {
            "proxy_location": "EveryNode",
            "http_options": {"host": http.host, "port": http.port},
            "logging_config": {"log_level": "INFO" if self._verbose else "WARNING"},
        }

        def start() -> None:
            try:
                ray_serve.start(**options)
                proxy.set_result(None)
            except BaseException as error:
                proxy.set_exception(error)

        threading.Thread(target=start, name="serve-start", daemon=True).start()
        while not proxy.done() and not local_ray.serve_runs():
            time.sleep(0.1)
        if proxy.done():
            self._wait_for_proxy(proxy)
        return proxy

    def _wait_for_proxy(self, proxy: "Future[None]") -> None:
        from ray.exceptions import RayError

        try:
            proxy.result()
        except (RayError, TimeoutError) as error:
            raise StartFailedError(f"Ray Serve's {self._config.http.proxy} proxy did not start: {error}") from error

    def _deploy(self) -> None:
        from ray import serve as ray_serve

        from cluster.app import ALLOW_SIMULATED, build

        deployment = self._config.deployment
        death_notes.take(deployment.app)  # a running cluster may keep some from an application that is gone
        self._app_started = True
        target = ray_serve.RunTarget(
            target=build({**self._config.to_plain(), ALLOW_SIMULATED: self._config.fabrication is not None}),
            name=deployment.app,
            route_prefix=deployment.route_prefix,
        )
        ray_serve.run_many([target], wait_for_applications_running=False)

    def _announce(self) -> None:
        name = self._config.served_name
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
        out = self._console
        out.print(f"\n{name} is served at {self.url}/v1\n", style="bold green", markup=False)
        if self._config.fabrication is not None:
            out.print(
                f"Tokens are {self._config.fabrication}: no answer means anything.\n", style="yellow", markup=False
            )
        out.print(
            f"  curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n",
            markup=False,
        )
        out.print(f"  dflash chat --url {self.url}      talk to it here", markup=False)
        out.print("  Ctrl-C                                      stop", markup=False)

    def _watch(self) -> None:
        """Until a signal: say when the application stops or starts to run (Serve replaces failed replicas itself)."""
        running = True
        while True:
            time.sleep(_WATCH_S)
            for cause in death_notes.take(self._config.deployment.app):
                self._console.print(f"the engine died and is being replaced: {cause}", style="red", markup=False)
            state = look(self._config.deployment.app)
            if state.running != running:
                running = state.running
                reason = f": {state.failure.strip().splitlines()[0]}" if state.failure else ""
                text = "all replicas run again" if running else f"{state.status.lower()} ({state.replicas}){reason}"
                self._console.print(text, style="yellow", markup=False)

    def _stop(self, *, graceful: bool) -> None:
        """Drain the replicas, remove the application, then end Serve and Ray if they were started here."""
        import ray

        if not ray.is_initialized():
            return
        last_resort = threading.Timer(STOP_LIMIT_S, local_ray.end_at_once)
        last_resort.daemon = True
        last_resort.start()
        drain_s = min(self._config.deployment.drain_s, DRAIN_LIMIT_S) if graceful else 0.0
        worker = threading.Thread(target=self._stop_serve, args=(drain_s,), name="stop", daemon=True)
        worker.start()
        worker.join(timeout=drain_s + _RANKS_LIMIT_S)
        if self._ray_started:
            local_ray.shutdown()
        else:
            ray.shutdown()
        if self._files is not None:
            self._files.cleanup()
        last_resort.cancel()
        self._console.print("stopped")

    def _stop_serve(self, drain_s: float) -> None:
        from ray import serve as ray_serve

        from cluster.app import DEPLOYMENT
        from cluster.control.controller import remove_controller

        # First the requests, while the application still has its route: one that arrives now is answered 503, not 404.
        # Serve in a Ray of our own ends with that Ray; one that was there before us stays, without the application.
        is_drained = self._is_announced and self._drain(drain_s)
        if self._app_started and not (is_drained and self._ray_started):
            ray_serve.delete(self._config.deployment.app)
            remove_controller(self._config.deployment.app, DEPLOYMENT)
        if self._serve_started and not self._ray_started:
            ray_serve.shutdown()

    def _drain(self, drain_s: float) -> bool:
        """Whether every replica has ended its requests and its ranks; says how many requests were cut."""
        self._console.print(
            f"stopping; requests in progress get up to {drain_s:g} s. Ctrl-C again ends at once.", markup=False
        )
        try:
            num_cut = drain_replicas(self._config.deployment.app, drain_s, timeout_s=drain_s + _RANKS_LIMIT_S)
        except DrainFailedError as error:
            self._console.print(f"the requests in progress are cut off: {error}", style="yellow", markup=False)
            return False
        if num_cut:
            self._console.print(
                f"{num_cut} request{'s' if num_cut > 1 else ''} did not end in time and got an error", style="yellow"
            )
        return True

    @contextlib.contextmanager
    def _stage(self, label: str) -> Iterator[Any]:
        """Show a stage while it runs (a spinner on a terminal) and its time once it is done."""
        begin_s = time.monotonic()
        if self._console.is_terminal and not self._verbose:
            with self._console.status(label) as spinner:
                yield lambda text: spinner.update(text or label)
        else:
            self._console.print(f"{label} ...", markup=False)
            yield lambda text: None
        self._console.print(f"{label}: done in {time.monotonic() - begin_s:.1f} s", style="dim", markup=False)


def wait_until_healthy(address: str, timeout_s: float) -> None:
    """Poll a health address until it answers 200.

    Raises:
        StartFailedError: it does not within `timeout_s`; the message has the last answer.
    """
    deadline_s = time.monotonic() + timeout_s
    last = "no answer"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not for us
    while time.monotonic() < deadline_s:
        try:
            with opener.open(address, timeout=5) as response:
                if response.status == 200:
                    return
                last = f"HTTP {response.status}"
        except urllib.error.HTTPError as error:
            last = f"HTTP {error.code}"
        except OSError as error:
            last = str(error)
        time.sleep(0.2)
    raise StartFailedError(f"{address} did not become healthy in {timeout_s:g} s: {last}")
