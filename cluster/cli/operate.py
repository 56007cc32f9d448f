"""`dflash status` and `dflash schedule`: what the speculation controller does, and orders to it."""

import contextlib
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from cluster.cli import local_ray
from cluster.cli.console import BAD_USAGE, FAILED, fail, stderr, stdout, user_errors
from cluster.control.messages import Order
from cluster.control.status import BoundStatus, ControllerStatus, LineStatus, ReplicaStatus
from engine.speculative.schedule import check_schedule

schedule = typer.Typer(no_args_is_help=True, help="Pin, freeze, release and explain draft lengths; reset gates.")

_TIMEOUT_S = 15.0

Address = Annotated[str, typer.Option(help="Address of the Ray cluster; auto: the one that runs on this machine.")]
App = Annotated[str | None, typer.Option(help="Name of the application; needed if there are several.")]


def status(address: Address = "auto", app: App = None) -> None:
    """Show replicas, draft lengths, schedule versions, acceptance and gates of a running application."""
    with _controller(address, app) as controller:
        shown = controller.status()
    out = stdout()
    for line in status_lines(shown):
        out.print(line, markup=False)
    out.print(_replica_table(shown.replicas))
    for accelerator_line in shown.lines:
        out.print(_line_table(accelerator_line))


@schedule.command()
def pin(
    lengths: Annotated[
        str, typer.Argument(metavar="SCHEDULE", help='Batch size:K pairs such as "4:7,16:3", or one K for all sizes.')
    ],
    address: Address = "auto",
    app: App = None,
) -> None:
    """Give every replica this schedule until unpin or freeze."""
    with user_errors(ValueError):
        entries = parse_schedule(lengths)
    _order("pin", address, app, entries)
    stdout().print(f"pinned: {_entries(entries)}", markup=False)


@schedule.command()
def freeze(address: Address = "auto", app: App = None) -> None:
    """Keep the schedules as they are until unpin or pin."""
    _order("freeze", address, app, {})
    stdout().print("frozen")


@schedule.command()
def unpin(address: Address = "auto", app: App = None) -> None:
    """End a pin or a freeze: the controller decides again."""
    _order("release", address, app, {})
    stdout().print("the controller decides again")


@schedule.command("reset-gate")
def reset_gate(address: Address = "auto", app: App = None) -> None:
    """Let replicas whose acceptance gate has tripped draft again."""
    with _controller(address, app) as controller:
        done = controller.call("reset_gates")
    stdout().print(f"gates reset in {len(done)} replica(s): {', '.join(sorted(done))}", markup=False)


@schedule.command()
def why(
    batch_size: Annotated[int | None, typer.Argument(min=1, help="Only for this batch size.")] = None,
    address: Address = "auto",
    app: App = None,
) -> None:
    """Say for each batch size why its draft length is what it is."""
    with _controller(address, app) as controller:
        shown = controller.status()
    out = stdout()
    for line in reasons(shown, batch_size):
        out.print(line, markup=False)


def parse_schedule(text: str) -> dict[int, int]:
    """Batch size -> K from "4:7,16:3", or from one K, which then counts for every batch size.

    Raises:
        ValueError: of neither form, or no schedule.
    """
    try:
        if ":" not in text:
            return {1_000_000: int(text)}
        pairs = [part.split(":") for part in text.split(",")]
        given = [(int(size), int(length)) for size, length in pairs]
    except ValueError as error:
        raise ValueError(f'SCHEDULE: {text!r} is neither K nor of the form "4:7,16:3"') from error
    entries = dict(given)
    if len(entries) < len(given):
        raise ValueError(f"SCHEDULE: {text!r} names a batch size twice; give each one K")
    check_schedule(entries, max_draft_len=max(entries.values()))
    return entries


def status_lines(shown: ControllerStatus) -> Iterator[str]:
    """The state of the controller in a few lines."""
    yield (
        f"application {shown.app}: {len(shown.replicas)} replica(s), controller epoch "
        f"{'not chosen yet' if shown.epoch is None else shown.epoch}, {shown.num_changes} changes of draft length, "
        f"a report every {shown.interval_s:g} s"
    )
    if shown.order is not None:
        what = f"pinned to {_entries(shown.order.schedule)}" if shown.order.mode == "pin" else "frozen"
        yield f"{what} by an operator {time.time() - shown.order.issued_at:.0f} s ago"
    for width, hazards in sorted(shown.hazards.items()):
        chances = " ".join(f"{chance:.2f}" for chance in itertools.accumulate(hazards, operator.mul))
        yield f"accepted up to position 1, 2, .. of blocks of {width}: {chances}"
    changed = [bound for line in shown.lines for bound in line.bounds if bound.changed_s_ago is not None]
    if changed:
        last = min(changed, key=lambda bound: bound.changed_s_ago or 0.0)
        yield f"last change {last.changed_s_ago:.0f} s ago, batch size up to {last.batch_size}: {last.reason}"


def reasons(shown: ControllerStatus, batch_size: int | None) -> Iterator[str]:
    """Why each draft length is what it is: the last change, and what is weighed now."""
    own = [replica for replica in shown.replicas if replica.own is not None]
    titled: list[tuple[str, LineStatus]] = [(line.accelerator, line) for line in shown.lines]
    titled += [(f"replica {replica.replica_id}", replica.own) for replica in own if replica.own is not None]
    for title, line in titled:
        yield f"{title}:"
        for bound in _covering(line.bounds, batch_size):
            ago = "from the start" if bound.changed_s_ago is None else f"for {bound.changed_s_ago:.0f} s"
            yield f"  batch size up to {bound.batch_size}: K {bound.draft_len} {ago}: {bound.reason}"
            if bound.now:
                yield f"    now: {bound.now}"


def _covering(bounds: tuple[BoundStatus, ...], batch_size: int | None) -> tuple[BoundStatus, ...]:
    if batch_size is None:
        return bounds
    return tuple(bound for bound in bounds if bound.batch_size >= batch_size)[:1]


def _replica_table(replicas: tuple[ReplicaStatus, ...]) -> Table:
    table = Table("replica", "accelerator", "requests", "K", "version", "gate", "schedule", "seen", title="Replicas")
    for replica in replicas:
        version = ".".join(str(number) for number in replica.version)
        if replica.version < replica.target:
            version += f" (-> {'.'.join(str(number) for number in replica.target)})"
        table.add_row(
            replica.replica_id,
            replica.accelerator,
            str(replica.num_running),
            str(replica.draft_len),
            version,
            "tripped" if replica.gate_disabled else "open",
            _entries(replica.schedule) + (" (its own)" if replica.own is not None else ""),
            f"{replica.seen_s_ago:.1f} s ago",
        )
    return table


def _line_table(line: LineStatus) -> Table:
    table = Table("batch size", "K", "since", title=f"Schedule of {line.accelerator} ({line.num_replicas} replica(s))")
    for bound in line.bounds:
        since = "start" if bound.changed_s_ago is None else f"{bound.changed_s_ago:.0f} s"
        table.add_row(f"<= {bound.batch_size}", str(bound.draft_len), since)
    return table


def _entries(entries: dict[int, int]) -> str:
    return ", ".join(f"{size}:{length}" for size, length in sorted(entries.items()))


def _order(mode: str, address: str, app: str | None, entries: dict[int, int]) -> None:
    order = msgspec.convert({"mode": mode, "issued_at": time.time(), "schedule": entries}, Order)
    with _controller(address, app) as controller:
        controller.call("give", msgspec.msgpack.encode(order))


@dataclass(frozen=True, slots=True)
class _Controller:
    """Calls to the controller actor that wait for the answer."""

    handle: Any

    def call(self, method: str, *arguments: object) -> Any:
        import ray

        try:
            return ray.get(getattr(self.handle, method).remote(*arguments), timeout=_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                fail(str(error.cause), status=BAD_USAGE)
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            fail(f"the controller does not answer: {type(error).__name__}", status=FAILED)

    def status(self) -> ControllerStatus:
        return msgspec.msgpack.decode(self.call("status"), type=ControllerStatus)


@contextlib.contextmanager
def _controller(address: str, app: str | None) -> Iterator[_Controller]:
    """The controller of an application in the cluster at `address`."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    connected_before = ray.is_initialized()
    if not connected_before:
        with user_errors(ValueError):
            local_ray.connect(address, verbose=False)
    try:
        yield _Controller(_find(ray.util.list_named_actors, app))
    finally:
        if not connected_before:
            ray.shutdown()


def _find(list_named_actors: Callable[..., list[dict[str, str]]], app: str | None) -> Any:
    from cluster.control.controller import NAMESPACE, controller_apps, find_controller

    apps = controller_apps(
        [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    )
    if app is None and len(apps) > 1:
        fail(f"several applications run here: {', '.join(sorted(apps))}; choose one with --app", status=BAD_USAGE)
    name = app or next(iter(apps), None)
    if name not in apps:
        what = "no application" if app is None else f"no application {app!r}"
        stderr().print(f"{what} with a speculation controller runs there; controller.enabled: true starts one")
        raise typer.Exit(FAILED)
    return find_controller(name, apps[name])
