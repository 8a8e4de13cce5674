"""Rendezvous of the processes of a job: ``jax.distributed`` assigns their ranks and exchanges their addresses.

Once every process is connected to every other, the coordination service is shut down. Programs never span processes,
so it is no longer needed, and while it runs, the death of one process ends the others without a message (the
coordinator's at once, another's after the heartbeat timeout). The connections can report which process is gone.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

import jax
from jax._src import distributed  # its key-value store has no public name; Orbax reaches it the same way

import penstock.interrupts as interrupts
from penstock.errors import PeerError, UsageError

# Seconds; enough for processes that are started by hand, one after the other.
JOIN_S = 300
_TOKEN_BYTES = 32
# A machine that disappears silently is detected after 10 + 3 · 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def join(
    coordinator: str | None, rank: int | None, count: int | None, timeout_s: int = JOIN_S
) -> tuple[int, int, dict[int, socket.socket]]:
    """Return this process's rank, the number of processes, and a connection to each of the others by rank.

    coordinator : "host:port" on which process 0 listens; None, with rank and count None: from JAX's cluster detection
        (SLURM, Open MPI, Kubernetes, TPU pods, JAX_COORDINATOR_ADDRESS)
    Raises UsageError if that is not enough information, PeerError if a process does not join in time.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the command line
    # Every client that can connect can take part: listen on the coordinator's address only, not on all.
    bind = None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else coordinator
    try:
        jax.distributed.initialize(
            coordinator, count, rank, initialization_timeout=timeout_s, coordinator_bind_address=bind
        )
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the job's processes are not known: give --coordinator HOST:PORT, --process-id and --processes ({error})"
        ) from error
    except RuntimeError as error:
        raise PeerError(f"cannot join the job at {coordinator}: {str(error).splitlines()[0]}") from error
    state = distributed.global_state
    rank, count = state.process_id, state.num_processes
    try:
        connections = _connected(rank, count, str(state.coordinator_address), state.client, timeout_s)
        jax.devices()  # exchanges the devices of all processes while the service still runs
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"process {rank} cannot meet the others: {str(error).splitlines()[0]}") from error
    finally:
        jax.distributed.shutdown()
    return rank, count, connections


def _connected(rank: int, count: int, coordinator: str, store: Any, timeout_s: int) -> dict[int, socket.socket]:
    """Return connections by rank: every process accepts those of higher ranks and connects to the lower ones."""
    connections: dict[int, socket.socket] = {}
    with socket.create_server((_address_towards(coordinator), 0)) as listener:
        host, port = listener.getsockname()[:2]
        if rank == 0:
            store.key_value_set("penstock/token", secrets.token_hex(_TOKEN_BYTES // 2))
        store.key_value_set(f"penstock/address/{rank}", f"{host} {port}")
        get = store.blocking_key_value_get
        token = get("penstock/token", timeout_s * 1000).encode()
        for other in range(rank):
            host, port = get(f"penstock/address/{other}", timeout_s * 1000).split()
            connections[other] = _call(host, int(port), token, rank, timeout_s)
        listener.settimeout(1)
        deadline = time.monotonic() + timeout_s
        while len(connections) < count - 1:
            interrupts.check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(count)) - {rank} - set(connections))
                raise PeerError(f"process {missing[0]} of {count} has not come within {timeout_s} s")
            with suppress(TimeoutError):
                _answer(listener.accept()[0], token, connections)
    return connections


def _address_towards(coordinator: str) -> str:
    """Return the address of this machine's interface towards the coordinator: the only one to listen on."""
    host, _, port = coordinator.rpartition(":")
    family, kind, *_, to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _call(host: str, port: int, token: bytes, rank: int, timeout_s: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout_s)
    connection.sendall(token + rank.to_bytes(4, "little"))
    return _lasting(connection)


def _answer(connection: socket.socket, token: bytes, connections: dict[int, socket.socket]) -> None:
    """Add an accepted connection by its rank; close it if it does not send the job's token."""
    said = b""
    connection.settimeout(5)
    with suppress(OSError):
        while len(said) < _TOKEN_BYTES + 4 and (more := connection.recv(_TOKEN_BYTES + 4 - len(said))):
            said += more
    if not hmac.compare_digest(said[:_TOKEN_BYTES], token):
        connection.close()
        return
    connections[int.from_bytes(said[_TOKEN_BYTES:], "little")] = _lasting(connection)


def _lasting(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
