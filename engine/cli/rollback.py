"""``penstock rollback``: step a service, or a checkpoint, forward to the rows of an earlier commit."""

from __future__ import annotations

import argparse

from penstock.checkpoint.rollbacks import roll_back_folder
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, place_text, several, writing
from penstock.serving.flight import connect
from penstock.serving.flight.connection import as_source

EXAMPLE = "penstock rollback run1 --to good"


def add(command: Parser) -> None:
    command.add_argument(
        "place",
        metavar="DIR|ADDRESS",
        help="a checkpoint that no run or service writes; or grpc://HOST:PORT of a service",
    )
    command.add_argument("--to", required=True, metavar="VERSION", help="a tag or the step of a commit")


def run(args: argparse.Namespace, out: Output) -> None:
    if args.place.startswith(("grpc://", "grpc+tcp://", "grpc+tls://")):
        with connect(args.place) as client, as_source():
            done = client.rollback(args.to)
    else:
        with writing(args.place):
            rollback = roll_back_folder(args.place, args.to)
        done = {"global_step": rollback.step, "to_step": rollback.target.step, "rolled_back": rollback.num_frames}
    step, to_step = count(done["global_step"]), count(done["to_step"])
    out.say(f"rolled back  {place_text(args.place)}: step {step}, with the rows of step {to_step}")
    if done["rolled_back"]:
        out.say(f"dropped      {several(done['rolled_back'], 'frame')} that were in the gate")
    out.result(done)
