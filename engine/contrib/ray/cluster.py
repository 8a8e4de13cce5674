"""The actors of a job on a Ray cluster, and what their failures mean. Only this module imports Ray."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import penstock.base.interrupts as interrupts
from penstock.base.errors import PeerError, PenstockError, UsageError
from penstock.contrib.ray.owners import Owner
from penstock.contrib.ray.readers import JobReader
from penstock.model.frames import Float32, Int64
from penstock.rows.state_hash import KeyArrays

# How long to wait for the port of a cluster.
CONNECT_S = 10.0
# Between two checks for a signal.
TICK_S = 0.5
# How long an actor that died may take to be placed and started again.
RESTART_S = 300.0
_PAUSE_S = 0.5
# The accelerators that an owner can have one of, and the options of Ray that give it to an actor.
ACCELERATORS: Mapping[str, Mapping[str, Any]] = {"gpu": {"num_gpus": 1}, "tpu": {"resources": {"TPU": 1}}}


# Ray reads it when it is imported. 0: the processes of a cluster listen on the loopback interface, as on macOS.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

log = logging.getLogger("penstock")


class LostError(Exception):
    """An actor, a node or an object of the job was lost: the job can continue from its last commit."""


def with_accelerator(options: Mapping[str, Any], accelerator: str | None) -> Mapping[str, Any]:
    """Return options of Ray for an actor that has one accelerator of its node to itself.

    Ray names it in the variables of the actor's process (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS) before jax is loaded.
    accelerator : of ACCELERATORS; None: the options are enough
    Raises UsageError for another one, or options that request some too.
    """
    if accelerator is None:
        return options
    if accelerator not in ACCELERATORS:
        raise UsageError(f"accelerator: expected one of {', '.join(ACCELERATORS)}, got {accelerator!r}")
    resources = dict(options.get("resources") or {})
    if "num_gpus" in options or "TPU" in resources:
        raise UsageError(
            f"owner_options: accelerator='{accelerator}' gives each owner one {accelerator.upper()}; leave out "
            "num_gpus and TPU, or accelerator"
        )
    resources |= ACCELERATORS[accelerator].get("resources", {})
    return {**ACCELERATORS[accelerator], **options, "resources": resources}


def started(address: str | None, num_actors: int, accelerators: tuple[str, int] | None = None) -> Any:
    """Return the module ``ray``, connected to a cluster.

    address : as ``ray.init`` takes it; None: "auto"; "local" starts a cluster with room for ``num_actors``
    accelerators : of ACCELERATORS, and how many of them the cluster must have; None: it needs none

    Raises UsageError if Ray is not installed, PeerError if the cluster cannot be reached or has fewer accelerators.
    """
    # Ray prints messages about dead nodes to standard output, which may be the report or deltas; it reads this once.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    with _loopback() if address == "local" else nullcontext():
        try:
            import ray
        except ImportError as error:
            raise UsageError(f"a job on a cluster needs Ray: pip install 'penstock[ray]' ({error})") from None
        if not ray.is_initialized():
            _connect(ray, address, num_actors)
    if accelerators is not None:
        name, count = accelerators[0].upper(), accelerators[1]
        has = int(ray.cluster_resources().get(name, 0))
        if has < count:
            raise PeerError(
                f"{count} shares need one {name} each, and the Ray cluster has {has}; add nodes, or ask for fewer "
                "shares"
            )
    return ray


@contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray, and the processes that it starts in the block, listen on this machine only, unless _LOOPBACK is set."""
    if _LOOPBACK in os.environ:
        yield
        return
    if "ray" in sys.modules:
        log.warning("Ray was imported before %s=0 was set: a local cluster listens on all interfaces", _LOOPBACK)
    os.environ[_LOOPBACK] = "0"
    try:
        yield
    finally:
        del os.environ[_LOOPBACK]


def _connect(ray: Any, address: str | None, num_actors: int) -> None:
    """Connect to a cluster or start one, as ``started`` does. Raises PeerError, or KeyboardInterrupt after a signal."""
    try:
        _check_reachable(address)
        # A cluster that ends with its job needs no dashboard.
        room = {"num_cpus": max(num_actors, os.cpu_count() or 1), "include_dashboard": False}
        ray.init(
            address=address or "auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(room if address == "local" else {}),
        )
    except SystemExit:  # from the handler that Ray has for SIGTERM
        raise KeyboardInterrupt from None
    except Exception as error:  # Ray raises a bare Exception if a node is too slow to start
        problem = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        if address == "local":
            advice = "try again when the machine is less busy, or give the address of a cluster"
            raise PeerError(f"Ray started no cluster on this machine: {problem}; {advice}") from None
        raise PeerError(f"no Ray cluster at {address or 'auto'}: {problem}") from None
    finally:
        interrupts.reinstall()  # Ray replaces the handler of SIGTERM
    interrupts.check()


def _check_reachable(address: str | None) -> None:
    """Raise OSError if HOST:PORT is not reachable: Ray itself retries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_S).close()


class Actors:
    """The readers and owners of a job. Ray starts one again that has died, without its state: ``begin`` creates that.

    readers, owners : arguments of each ``JobReader`` and ``Owner``
    reader_options, owner_options : of Ray, such as resources

    interruptible : whether a signal ends waiting
    """

    def __init__(
        self,
        ray: Any,
        readers: Sequence[tuple[Any, ...]],
        owners: Sequence[tuple[Any, ...]],
        reader_options: Mapping[str, Any],
        owner_options: Mapping[str, Any],
    ) -> None:
        self._ray = ray
        self.interruptible = True
        # A task of an actor that has died must not be repeated by the next one: the job goes back to its last commit.
        lasting = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 1}
        reader, owner = (
            ray.remote(kind).options(**{**lasting, "scheduling_strategy": "SPREAD", **options})
            for kind, options in ((JobReader, reader_options), (Owner, owner_options))
        )
        self.readers = [reader.remote(*arguments) for arguments in readers]
        self.owners = [owner.remote(*arguments) for arguments in owners]
        named = {"reader": self.readers, "owner": self.owners}
        self._names = {
            actor._actor_id.hex(): f"{kind} {n}" for kind, group in named.items() for n, actor in enumerate(group)
        }

    def get(self, refs: Any, deadline: float = math.inf) -> Any:
        """Return the results of tasks. Raises LostError, KeyboardInterrupt, or an error that a task raised.

        deadline : by the monotonic clock; after it PeerError is raised
        """
        errors = self._ray.exceptions
        while True:
            try:
                return self._ray.get(refs, timeout=TICK_S)
            except errors.GetTimeoutError:
                if self.interruptible:
                    interrupts.check()
                if time.monotonic() > deadline:
                    _, waiting = self._ray.wait(refs, num_returns=len(refs), timeout=0)
                    raise PeerError(
                        f"{len(waiting)} of {len(refs)} actors of the job found no place for {RESTART_S:.0f} s; "
                        "add nodes, or ask for fewer shares and readers"
                    ) from None
            except errors.RayTaskError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, errors.RayError):
                    raise self._lost_error(cause) from None
                raise (cause if isinstance(cause, PenstockError | OSError | MemoryError) else error) from None
            except errors.RayError as error:
                raise self._lost_error(error) from None

    def begin(self, calls: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of calls that create the state of actors, again until those that died are back.

        Raises PeerError if that takes too long.
        """
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                return list(self.get(calls(), deadline))
            except LostError as failure:
                if time.monotonic() > deadline:
                    raise PeerError(f"the job could not begin: {failure}") from None
                time.sleep(_PAUSE_S)

    def _lost_error(self, error: BaseException) -> LostError:
        if name := self._names.get(getattr(error, "actor_id", None) or ""):
            return LostError(f"{name} died or cannot be reached")
        if isinstance(error, self._ray.exceptions.ObjectLostError):
            return LostError("a block of frames was lost with its node")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return LostError(": ".join([type(error).__name__, *lines[:1]]))

    def close(self) -> None:
        """End all actors."""
        for actor in (*self.readers, *self.owners):
            self._ray.kill(actor, no_restart=True)


class RemoteTables:
    """The tables of one owner, as ``WholeTables`` reads them."""

    def __init__(self, actors: Actors, rank: int) -> None:
        self._actors, self._owner = actors, actors.owners[rank]

    def rows_in_hash_order(self, name: str) -> tuple[Int64, KeyArrays]:
        ordered: tuple[Int64, KeyArrays] = self._actors.get(self._owner.rows_in_hash_order.remote(name))
        return ordered

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32:
        values: Float32 = self._actors.get(self._owner.read_rows.remote(name, part, rows))
        return values
