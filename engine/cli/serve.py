"""``penstock serve``: run the Flight service for the tables of a configuration."""

from __future__ import annotations

import argparse
import math
import signal
import ssl
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import penstock.base.interrupts as interrupts
from penstock.api.deltas import form_of
from penstock.base.errors import ConfigError, ListenError, PeerError, PenstockError, UsageError, listed
from penstock.base.events import report
from penstock.base.filesystem.descriptors import raise_limit
from penstock.base.flag_values import local_path, number, whole
from penstock.base.validation import is_loopback
from penstock.checkpoint.store import Folder
from penstock.cli.command_line import Parser, add_flags, keywords_of, policy_of
from penstock.cli.output import (
    Output,
    cache_texts,
    check_writable,
    count,
    keys_texts,
    place_text,
    several,
    writing,
)
from penstock.cli.replay import make_engine
from penstock.cli.replay_flags import check_checkpoint
from penstock.cli.watching import check_library, page_addresses, pages, watching
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.partitions.partition_source import partitions_of, topic_kinds
from penstock.io.patience import Patience
from penstock.model.command_options import options_of
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.learning_rates import LearningRates
from penstock.model.options import DeltaOptions, OneReaderOptions, ReadingOptions, WatchingOptions
from penstock.serving.flight.connection import Address
from penstock.serving.service.auth import Certificates, Tokens, certificates, check_protected, may_read, tokens_of
from penstock.serving.service.connections import wait_for_descriptors
from penstock.serving.service.limits import Limits
from penstock.serving.service.replica import ReplicaService
from penstock.serving.service.sequencer import Saving
from penstock.serving.service.server import Service
from penstock.serving.shared.table_reader import NoTablesError, Reader

EXAMPLE = "penstock serve tables.pbtxt --listen grpc://127.0.0.1:8815 --checkpoint state --every 100 --resume"
SCALES = {"N": 1, "S": 1, "MB": 1 << 20}
LimitFlags = dict[str, tuple[str, str, str, str]]
# Flag → the field of Limits, the unit, the help before and after the default.
LIMITS: LimitFlags = {
    "--max-calls": ("calls", "N", "concurrent calls", ""),
    "--max-connections": ("connections", "N", "concurrent connections; above it, those without a call are closed", ""),
    "--idle-timeout": (
        "idle_s",
        "S",
        "seconds that a connection may stay without a call",
        "; 10 before the first call",
    ),
    "--max-queued-rows": ("queued_rows", "N", "rows of incomplete frames, over all producers", ""),
    "--queued-memory": ("queued_bytes", "MB", "memory of incomplete frames, over all producers", ""),
}
DELTA_MEMORY: LimitFlags = {"--delta-memory": ("delta_bytes", "MB", "memory of the deltas kept for readers", "")}
# The arguments that a replica uses.
REPLICA_FLAGS: tuple[str, ...] = ("replica", "listen", "tls_cert", "tls_key", "token_file", "insecure", "grace", "json")
REPLICA_FLAGS += tuple(options_of("serve", WatchingOptions))
REPLICA_FLAGS += ("max_message", *(field for field, *_ in LIMITS.values()))
# Seconds between two lines about one wait for workers.
SAY_EVERY_S = 60.0
# Seconds between two checks for a signal.
TICK_S, MOST_TICK_S = 0.1, 1.0


def add(command: Parser) -> None:
    command.add_argument(
        "config", metavar="CONFIG", nargs="?", help="TPUEmbeddingConfiguration or EngineConfig, text or binary"
    )
    command.add_argument(
        "--replica",
        type=local_path,
        metavar="DIR",
        help="in place of CONFIG: answer lookups from the files of penstock follow --into shared:DIR, once it has "
        "written them",
    )
    command.add_argument(
        "--listen",
        default="grpc://127.0.0.1:0",
        metavar="URI",
        help="grpc://HOST:PORT or grpc+tls://HOST:PORT (default grpc://127.0.0.1:0: a free port, printed at the start)",
    )
    # A service has no end at which to write a page.
    command.set_defaults(report=None, serve_command=command)
    groups = add_flags(command, "serve")
    reading, deltas = groups["reading"], groups["deltas"]
    for kind in topic_kinds():
        reading.add_argument(
            kind.flag,
            dest="topics",
            action="append",
            default=[],
            metavar="URI",
            help=f"{kind.form}: also take frames from there, one per message; may be repeated",
        )
    reading.add_argument(
        "--on-bad-row",
        choices=("error", "drop"),
        default="error",
        help="error (default): refuse the frame; drop: leave the row out and count it",
    )
    gate = groups["the gate"]
    gate.add_argument(
        "--round-timeout",
        type=number("seconds, above 0", 0.001, 1e9),
        metavar="S",
        help="rounds: seconds that a step may wait for a worker (default: without end)",
    )
    gate.add_argument(
        "--on-missing",
        choices=("end", "skip"),
        default="end",
        help="rounds, after --round-timeout: end (default): commit, and exit 6; skip: step without the workers",
    )
    _add_limit_flags(deltas, DELTA_MEMORY)
    access = command.add_argument_group("access")
    access.add_argument("--tls-cert", type=local_path, metavar="FILE", help="certificate chain, PEM; for grpc+tls://")
    access.add_argument("--tls-key", type=local_path, metavar="FILE", help="its key, PEM")
    access.add_argument(
        "--token-file",
        type=local_path,
        metavar="FILE",
        help="a line per token: its role (producer, reader, operator) and the token, or a token alone (operator)",
    )
    access.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without TLS, or without tokens; --ui and --metrics answer everybody there",
    )
    limits = command.add_argument_group("limits")
    _add_limit_flags(limits, LIMITS)
    limits.add_argument(
        "--grace", type=whole(0), default=5, metavar="S", help="seconds for callers to leave at the end (default 5)"
    )


def _add_limit_flags(group: Any, flags: LimitFlags) -> None:
    for flag, (field, unit, before, after) in flags.items():
        default = int(getattr(Limits, field)) // SCALES[unit]
        text = f"{before} (default {default}{after})"
        group.add_argument(flag, dest=field, type=whole(1), default=default, metavar=unit, help=text)


def run(args: argparse.Namespace, out: Output) -> None:
    interrupts.reserve(signal.SIGHUP)  # which reloads tokens and certificates
    raise_limit()
    wait_for_descriptors()
    if args.replica is not None:
        serve_replica(args, out)
        return
    if args.config is None:
        raise UsageError("give CONFIG, or --replica DIR")
    check_library(args)
    config = EmbeddingConfig.load(args.config)
    # Report invalid flags and missing files before allocating the tables.
    rates = LearningRates(config.num_tags, args.learning_rates, config.schedules)
    keywords = keywords_of(args, "serve", ReadingOptions, OneReaderOptions) | {"on_bad_row": args.on_bad_row}
    reading = ReadOptions.of_config(config, keywords, rates_needed=rates.missing, unvalidated=True)
    if rates.missing:
        report(
            "learning_rate_missing",
            tags=list(rates.missing),
            advice=f"frames need a 'learning_rates' column, or add --learning-rate {rates.missing[0]}=VALUE",
        )
    access = Access(args)
    policy, most = policy_of(args, config), min(args.calls, Limits.producers)
    if policy.workers is not None and policy.num_required >= most:
        raise UsageError(f"{policy.num_required:,} workers: their streams take all of {most:,} calls (--max-calls)")
    check_checkpoint(args)
    form_of(config.tables, DeltaOptions(last=args.last))
    for place in (args.out, args.checkpoint):
        check_writable(place)
    partitions = [partition for uri in args.topics for partition in partitions_of(uri, args.patience)]
    engine = make_engine(args, config)
    watched = watching(args, engine, access.pages)  # before the service accepts callers
    with writing(args.checkpoint) if args.checkpoint else nullcontext():  # commits its epoch before it listens
        service = Service(
            engine,
            access.address,
            reading,
            rates,
            saving=None if args.checkpoint is None else Saving(Folder(args.checkpoint), args.every, args.resume),
            limits=_limits(args),
            tls=access.tls,
            tokens=access.tokens,
            per_steps=args.per_steps,
            last=args.last,
            partitions=partitions,
            patience_s=args.patience,
        )
    with watched:
        _serve(args, service, access, watched, out)


def serve_replica(args: argparse.Namespace, out: Output) -> None:
    """Serve shared files until a caller requests a drain, or a signal arrives."""
    for action in args.serve_command._actions:
        if action.dest not in (*REPLICA_FLAGS, "help") and getattr(args, action.dest) != action.default:
            raise UsageError(f"{(action.option_strings or [action.metavar])[0]}: has no effect with --replica; omit it")
    access = Access(args)
    check_library(args)
    reader = _reader_of(args.replica)
    service = ReplicaService(reader, access.address, limits=_limits(args), tls=access.tls, tokens=access.tokens)
    try:
        with watching(args, service, access.pages) as watched:
            _wait(args, service, access, reader.version.step, watched, out)
    finally:
        interrupts.ignore()
        status = service.status()
        if not service.close(args.grace):
            args.leave_at_once()
    out.result(status)


def _reader_of(folder: Path) -> Reader:
    """Return a reader of shared tables, once their writer has published them. Raises KeyboardInterrupt for a signal."""
    return Patience(math.inf).call(lambda: Reader(folder), NoTablesError, (NoTablesError,))


class Access:
    """Who may call a service and read its pages: its address, tokens and certificates. Raises UsageError.

    tokens, tls : as of the last time that their files were read
    pages : who may read the pages that other machines reach; None: everybody, as ``--insecure`` says
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self.address = args, Address.of(args.listen)
        self.tokens, self.tls = self._read()
        check_protected(self.address, bool(self.tokens), args.insecure)
        self.pages = self._pages()

    def reload(self, service: Service | ReplicaService, out: Output) -> None:
        """Read the files again. If they are not valid, say why, and keep what there is."""
        try:
            tokens, tls = self._read()
        except (UsageError, ConfigError) as error:
            report("reload_failed", error=f"{error}; tokens and certificate stay those before")
            return
        has_new_tls = service.renew(tokens, tls)
        self.tokens, self.tls = tokens, tls
        if self.pages is not None and self.pages.tls is not None and has_new_tls:
            self.pages.tls.load_cert_chain(self._args.tls_cert, self._args.tls_key)
        report("reloaded", tokens=len(tokens), new_certificate=has_new_tls)
        with suppress(OSError):  # a terminal that was closed sends the signal too
            certificate = ", a new certificate" if has_new_tls else ""
            out.say(f"reloaded  {several(len(tokens), 'token')}{certificate}", flush=True)

    def _read(self) -> tuple[Tokens, Certificates]:
        args = self._args
        return tokens_of(args.token_file), certificates(self.address, args.tls_cert, args.tls_key)

    def _pages(self) -> Any:
        """Return who may read the pages; None: everybody. Raises UsageError if a page needs a token and there is none.

        A service without TLS and tokens has nothing to protect: everybody may already read all of it.
        """
        args = self._args
        reachable = [(flag, host) for flag, (host, _) in page_addresses(args).items() if not is_loopback(host)]
        if args.insecure or not reachable or not (self.tokens or self.tls):
            return None
        if not self.tokens:
            flag = reachable[0][0]
            raise UsageError(
                f"--{flag} {getattr(args, flag)}: others can reach this address, and the service has no token "
                "(--token-file); give one, listen on 127.0.0.1, or say --insecure"
            )
        context = None
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(args.tls_cert, args.tls_key)
        return pages("http_server").PageAccess(lambda authorization: may_read(self.tokens, authorization), context)


def _wait(
    args: argparse.Namespace,
    service: Service | ReplicaService,
    access: Access,
    step: int,
    watched: Any,
    out: Output,
) -> None:
    """Say that the service listens, and wait until a caller requests a drain, or for SIGTERM. SIGHUP reloads tokens.

    Raises KeyboardInterrupt for SIGINT.
    """
    waits = RoundWaits(args)
    out.say(f"listening {service.address.uri}, step {count(step)}", flush=True)
    try:
        while not service.wants_to_end.wait(TICK_S):
            interrupts.check()
            if interrupts.requested(signal.SIGHUP):
                access.reload(service, out)
            watched.tick()
            if isinstance(service, Service):
                waits.look(service)
    except KeyboardInterrupt:
        if not interrupts.is_terminated():
            raise


class RoundWaits:
    """Says for which workers a step waits, and ends the wait as the flags say."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._timeout_s, self._skips = args.round_timeout, args.on_missing == "skip"
        self._said: tuple[int, int] = (0, 0)  # the step, and how often
        self._looked_s = time.monotonic()

    def look(self, service: Service) -> None:
        """Look at the wait of the service. Raises PeerError where it ends the service."""
        # A process that was stopped for a while has not waited: frames may have come that it has not read.
        slept, self._looked_s = time.monotonic() - self._looked_s > MOST_TICK_S, time.monotonic()
        wait = service.sequencer.waits()
        step, workers, seconds = wait
        if not workers:
            return
        times = int(seconds // SAY_EVERY_S)
        if times and self._said != (step, times):
            self._said = step, times
            report("round_waits", step=step, workers=workers, seconds=int(seconds))
        if self._timeout_s is None or seconds < self._timeout_s or slept:
            return
        if not self._skips:
            raise PeerError(
                f"step {step} has waited for {listed(workers)} for {seconds:.0f} s (--round-timeout "
                f"{self._timeout_s:g}); start them again, and the service with --resume"
            )
        with suppress(PenstockError):  # the service ends then, and says why
            service.sequencer.skip(wait)


def _serve(args: argparse.Namespace, service: Service, access: Access, watched: Any, out: Output) -> None:
    """Serve until a caller requests a drain, or a signal arrives. Raises KeyboardInterrupt for SIGINT."""
    engine, interrupted = service.engine, False
    lost: ListenError | PeerError | None = None  # the port, between two certificates, or a worker
    try:
        _wait(args, service, access, engine.global_step, watched, out)
    except KeyboardInterrupt:
        interrupted = True
    except (ListenError, PeerError) as error:
        lost = error
    interrupts.ignore()
    _end(args, service, out)
    if lost is not None:
        raise lost
    if interrupted:
        kept = "nothing was committed"
        if args.checkpoint:
            kept = f"committed to {place_text(args.checkpoint)} (--resume continues)"
        raise KeyboardInterrupt(f"interrupted after step {engine.global_step}; {kept}")


def _end(args: argparse.Namespace, service: Service, out: Output) -> None:
    """Commit, write the tables and report, and only then wait for callers to disconnect."""
    try:
        with writing(args.checkpoint) if args.checkpoint else nullcontext():
            service.end()
        status, files = service.status(), []
        hashed = {"state_hash": service.engine.state_hash()} if args.state_hash else {}
        if args.out is not None:
            with writing(args.out):
                files = [str(path) for path in service.engine.write_tables(args.out)]
    finally:
        if not service.close(args.grace):
            args.leave_at_once()
    text = f"{count(status['frames'])}: {count(status['rows'])} rows, {several(status['steps'], 'step')}"
    out.say(f"frames    {text}" + (f", {count(status['stale'])} stale" if status["stale"] else ""))
    reports = service.engine.core.table_reports()
    out.say_tables("keys      ", keys_texts(reports))
    out.say_tables("cache     ", cache_texts(reports))
    out.say_tables("wrote     ", files)
    for name, value in hashed.items():
        out.say(f"{name.partition('_')[0]:<10}{value}")
    out.result({**status, **hashed, "out": files})


def _limits(args: argparse.Namespace) -> Limits:
    flags = LIMITS | DELTA_MEMORY
    scaled = {field: getattr(args, field) * SCALES[unit] for field, unit, *_ in flags.values()}
    return Limits(message_bytes=args.max_message, **scaled)
