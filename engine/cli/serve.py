"""``penstock serve``: run the Flight service for the tables of a configuration."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import penstock.interrupts as interrupts
from penstock.checkpoint.store import Folder
from penstock.cli.engine_options import (
    add_checkpoint_options,
    add_gate_options,
    add_machine_options,
    add_table_options,
)
from penstock.cli.monitoring import Watching, add_watching_options
from penstock.cli.options import (
    Parser,
    add_command,
    add_row_options,
    columns_of,
    learning_rates_of,
    whole,
)
from penstock.cli.output import Output, check_writable, count, several, writing
from penstock.cli.replay import check_checkpoint, make_engine
from penstock.config.embedding import EmbeddingConfig
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.flight.connection import Address
from penstock.io.storage.descriptors import raise_limit
from penstock.learning_rates import LearningRates
from penstock.service.auth import certificates, check_protected, tokens_of
from penstock.service.limits import Limits
from penstock.service.server import Saving, Service

MB = 1 << 20
# Seconds between two checks for a signal.
TICK_S = 0.1


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "serve",
        run,
        "take gradients over Arrow Flight and give out deltas, tables and rows",
        "penstock serve tables.pbtxt --listen grpc://127.0.0.1:8815 --checkpoint state --every 100 --resume",
    )
    command.add_argument("config", metavar="CONFIG", help="TPUEmbeddingConfiguration or EngineConfig, text or binary")
    command.add_argument(
        "--listen",
        default="grpc://127.0.0.1:0",
        metavar="URI",
        help="grpc://HOST:PORT or grpc+tls://HOST:PORT (default grpc://127.0.0.1:0: any free port, which is told)",
    )
    command.set_defaults(peers=None)  # a single process; make_engine reads it
    add_table_options(command)
    command.add_argument("--no-hash", action="store_true", help="do not compute the state hash at the end")
    _add_reading(command)
    add_gate_options(command)
    _add_saving(command)
    _add_access(command)
    _add_limits(command)
    add_watching_options(command, ends=False)
    add_machine_options(command)


def _add_reading(command: Parser) -> None:
    reading = command.add_argument_group("reading")
    add_row_options(reading)
    reading.add_argument(
        "--on-bad-row",
        choices=("error", "drop"),
        default="error",
        help="error (default): refuse the frame; drop: leave the row out and count it",
    )


def _add_saving(command: Parser) -> None:
    saving = add_checkpoint_options(command, "checkpoint and deltas", "when a producer waits for it")
    saving.add_argument(
        "--delta-steps",
        type=whole(1),
        metavar="N",
        help="one delta per N steps (default: per commit; without a checkpoint per step while a reader follows)",
    )
    saving.add_argument(
        "--delta-memory", type=whole(1), default=256, metavar="MB", help="of deltas kept for readers (default 256)"
    )


def _add_access(command: Parser) -> None:
    access = command.add_argument_group("access")
    access.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM; for grpc+tls://")
    access.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    access.add_argument("--token-file", type=Path, metavar="FILE", help="tokens, one per line: callers must give one")
    access.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine without TLS, or without tokens"
    )


def _add_limits(command: Parser) -> None:
    limits = command.add_argument_group("limits")
    limits.add_argument("--max-calls", type=whole(1), default=256, metavar="N", help="at once (default 256)")
    limits.add_argument(
        "--max-connections",
        type=whole(1),
        default=1024,
        metavar="N",
        help="at once; beyond it those without a call are closed (default 1024)",
    )
    limits.add_argument(
        "--idle-timeout",
        type=whole(1),
        default=300,
        metavar="S",
        help="seconds that a connection may stay without a call (default 300; 10 before the first call)",
    )
    limits.add_argument(
        "--max-message", type=whole(1), default=64, metavar="MB", help="of one record batch (default 64)"
    )
    limits.add_argument(
        "--max-queued-rows",
        type=whole(1),
        default=1 << 22,
        metavar="N",
        help="of frames that are not whole yet, of all producers (default 4194304)",
    )
    limits.add_argument(
        "--queued-memory",
        type=whole(1),
        default=1024,
        metavar="MB",
        help="that such frames keep, of all producers (default 1024)",
    )
    limits.add_argument(
        "--shared-memory",
        type=whole(0),
        default=256,
        metavar="MB",
        help="for producers on this machine, 16 for each (default 256; 0: none)",
    )
    limits.add_argument(
        "--grace", type=whole(0), default=5, metavar="S", help="seconds for callers to leave at the end (default 5)"
    )


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # penstock reports errors in one line
    raise_limit()
    config = EmbeddingConfig.load(args.config)
    # Report invalid flags and missing files before allocating the tables.
    rates = LearningRates(config.num_tags, learning_rates_of(args), config.schedules)
    reading = _reading(args, config, rates)
    address, tokens = Address.of(args.listen), tokens_of(args.token_file)
    tls = certificates(address, args.tls_cert, args.tls_key)
    check_protected(address, bool(tokens), args.insecure)
    check_checkpoint(args)
    for place in (args.out, args.checkpoint):
        if place is not None:
            check_writable(place)
    engine = make_engine(args, config)
    watching = Watching(args, engine)  # before the service accepts callers
    service = Service(
        engine,
        address,
        reading,
        rates,
        saving=_saving(args),
        limits=_limits(args),
        tls=tls,
        tokens=tokens,
        per_steps=args.delta_steps,
    )
    with watching:
        return _serve(args, service, watching)


def _serve(args: argparse.Namespace, service: Service, watching: Watching) -> int:
    """Serve until a caller requests a drain (exit code 0) or a signal arrives (130)."""
    out = Output(args.json)
    engine = service.engine
    out.say(f"listening {service.address.uri}, step {count(engine.global_step)}")
    (sys.stderr if args.json else sys.stdout).flush()
    interrupted = False
    try:
        while not service.wants_to_end.wait(TICK_S):
            interrupts.check()
            watching.tick()
    except KeyboardInterrupt:
        interrupted = True
    interrupts.leave_to_caller(at_once=False)  # shutdown has begun; ignore further signals
    _end(args, service, out)
    if interrupted:
        kept = f"committed to {args.checkpoint} (--resume goes on)" if args.checkpoint else "nothing was committed"
        raise KeyboardInterrupt(f"interrupted after step {engine.global_step}; {kept}")
    return 0


def _end(args: argparse.Namespace, service: Service, out: Output) -> None:
    """Commit, write the tables and report, and only then wait for callers to disconnect."""
    try:
        with writing(args.checkpoint) if args.checkpoint else nullcontext():
            service.end()
        status, files = service.status(), []
        hashed = {} if args.no_hash else {"state_hash": service.engine.state_hash()}
        if args.out is not None:
            with writing(args.out):
                files = [str(path) for path in service.engine.write_tables(args.out)]
    finally:
        if not service.close(args.grace):
            args.leave_at_once()
    text = f"{count(status['frames'])}: {count(status['rows'])} rows, {several(status['steps'], 'step')}"
    out.say(f"frames    {text}" + (f", {count(status['stale'])} stale" if status["stale"] else ""))
    out.say_tables("wrote     ", files)
    for name, value in hashed.items():
        out.say(f"{name.partition('_')[0]:<10}{value}")
    out.result({**status, **hashed, "out": files})


def _reading(args: argparse.Namespace, config: EmbeddingConfig, rates: LearningRates) -> ReadOptions:
    return ReadOptions(
        sizes=config.sizes,
        features=config.features,
        num_tags=config.num_tags,
        rates_needed=rates.missing,
        table=args.table,
        columns=columns_of(args),
        on_bad_row=args.on_bad_row,
        gradient_dtype=args.gradient_dtype,
        unvalidated=True,
    )


def _saving(args: argparse.Namespace) -> Saving | None:
    return None if args.checkpoint is None else Saving(Folder(args.checkpoint), args.every, args.resume)


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        calls=args.max_calls,
        connections=args.max_connections,
        idle_s=args.idle_timeout,
        message_bytes=args.max_message * MB,
        queued_rows=args.max_queued_rows,
        queued_bytes=args.queued_memory * MB,
        memory_bytes=args.shared_memory * MB,
        delta_bytes=args.delta_memory * MB,
    )
