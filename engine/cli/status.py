"""``penstock status``: show what a running service has done and holds."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.base.errors import InputError, listed
from penstock.base.events import printable
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, duration, several, size_text
from penstock.core.freshness import STAGES, age_s
from penstock.serving.flight import Client
from penstock.serving.flight.answers import Status
from penstock.serving.flight.connection import Address, Connection, as_source

EXAMPLE = "penstock status grpc://127.0.0.1:8815"
# Of a call that the service answers at once.
TIMEOUT_S = 10.0


def add(command: Parser) -> None:
    command.add_argument("address", metavar="ADDRESS", help="of the service: grpc://HOST:PORT or grpc+tls://HOST:PORT")


def run(args: argparse.Namespace, out: Output) -> None:
    with client_of(args.address, TIMEOUT_S) as client:
        status = status_of(client)
    show(client.connection.uri, status, out)
    out.result({**status, "age_s": ages_of(status)})


def client_of(address: str, timeout_s: float | None, patience_s: float = 0) -> Client:
    """Return a client. timeout_s : of each action, but not of streams; patience_s : how long to retry"""
    return Client(Connection(Address.of(address), None, None, patience_s, timeout_s))


def status_of(client: Client) -> Status:
    """Return the status. Raises InputError if there is no service of penstock, UsageError for wrong credentials."""
    with as_source():
        status = client.status()
    if not {"global_step", "committed_step", "version", "seconds", "penstock"} <= status.keys():
        raise InputError("it answers 'status' with something else than penstock does", source=client.connection.uri)
    return status


def ages_of(status: Status) -> dict[str, float]:
    """Return how old the newest frames are that rows, deltas and the last commit have, as far as known."""
    ages = {stage: age_s(status.frame_times.get(stage)) for stage in STAGES}
    return {stage: age for stage, age in ages.items() if age is not None}


def show(uri: str, status: Status, out: Output) -> None:
    """Print a status as text."""
    is_replica = status.get("service") == "replica"
    kind = "replica" if is_replica else "service"
    program = f"penstock {printable(str(status['penstock']))}"
    out.say(f"{kind:<10}{uri}: {status.get('state', 'serving')}, up {duration(status['seconds'])}, {program}")
    committed = status["committed_step"]
    text = "without a checkpoint" if committed is None else f"committed {count(committed)}"
    out.say(f"step      {count(status['global_step'])}, {text}")
    out.say(f"version   {printable(str(status['version']))}")
    if ages := ages_of(status):
        out.say(f"age       {', '.join(f'{stage} {duration(age)}' for stage, age in ages.items())}")
    if is_replica:
        out.say(f"tables    {printable(listed(map(str, status['tables'])))}")
    else:
        stale = f", {count(status['stale'])} stale" if status["stale"] else ""
        text = f"{count(status['frames'])}: {count(status['rows'])} rows, {several(status['steps'], 'step')}{stale}"
        out.say(f"frames    {text}, {count(status['pending'])} pending")
        if "rounds" in status:
            out.say(f"rounds    {_rounds_text(status['rounds'])}")
        queued = f"{several(status['queued_rows'], 'row')} ({size_text(status['queued_bytes'])}) queued"
        out.say(f"producers {count(status['producers'])}, {several(status['streams'], 'open stream')}, {queued}")
        for reason, number in status["dropped"].items():
            out.say(f"dropped   {several(number, 'row')}: {printable(reason)}")
    text = f"{several(status['connections'], 'connection')}, {several(status['calls'], 'call')} in progress"
    out.say(f"callers   {text}, {count(status['refused'])} refused")
    if "lookups" in status:
        out.say(f"lookups   {count(status['lookups'])}: {several(status['looked_up_rows'], 'row')}")


def _rounds_text(rounds: dict[str, Any]) -> str:
    """Return whom the steps are of, and whom this one waits for."""
    workers = several(len(rounds["workers"]), "worker")
    if not rounds["missing"]:
        return f"{workers}, none missing"
    return f"{workers}, waits for {printable(listed(rounds['missing']))}, for {duration(rounds['waited_s'])}"
