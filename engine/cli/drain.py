"""``penstock drain``: let a running service take no more frames, commit, and end."""

from __future__ import annotations

import argparse
import threading
from concurrent.futures import Future, wait
from typing import Any

import penstock.base.interrupts as interrupts
from penstock.base.errors import TargetError
from penstock.base.events import printable
from penstock.cli.output import Output, count, several
from penstock.cli.status import TIMEOUT_S, client_of, status_of
from penstock.cli.status import add as add
from penstock.serving.flight import Client
from penstock.serving.flight.connection import as_source

EXAMPLE = "penstock drain grpc://127.0.0.1:8815"
TICK_S = 0.1


def run(args: argparse.Namespace, out: Output) -> None:
    with client_of(args.address, TIMEOUT_S) as client:
        status_of(client)  # something else than a service would not answer what follows, which has no time limit
    client = client_of(args.address, None)
    with client:
        drained = _drained(client)
    if (error := drained.get("error")) is not None:
        raise TargetError(f"{client.connection.uri}: the service ends without its last commit: {error}")
    committed = drained.get("committed_step")
    text = "without a checkpoint" if committed is None else f"committed {count(committed)}"
    out.say(f"drained   {printable(client.connection.uri)}: step {count(drained.get('global_step', 0))}, {text}")
    if pending := drained.get("pending"):
        outcome = "they are lost" if committed is None else "the checkpoint has them"
        out.say(f"pending   {several(pending, 'frame')} in the gate: {outcome}")
    out.result(drained)


def _drained(client: Client) -> dict[str, Any]:
    """Drain a service, and return its last status. Raises KeyboardInterrupt if a signal arrives before the answer."""
    answer = Future[dict[str, Any]]()

    def call() -> None:
        try:
            with as_source():
                answer.set_result(client.connection.act("drain", wait=True))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="penstock-drain", daemon=True).start()
    while not answer.done():
        wait([answer], TICK_S)
        interrupts.check()
    return answer.result()
