"""Every fault, in numbers: ``python tests/support/faults/run.py --kills 1000`` (make faults).

Kills at random moments, a kill before and inside every file operation, every file operation failing
in three ways, and files that may not grow beyond a limit. Each is followed by --resume and a
comparison with the unbroken run. ``--only NAME`` runs one case again.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faults.harness import FAULTS, Harness, PromiseError


def names(args, num_calls):
    ranges = {"moment": range(args.first, args.first + args.kills)}
    ranges |= dict.fromkeys(FAULTS, range(1, num_calls + 1, args.stride))
    ranges["limit"] = range(2000, 60_000, 2000 * args.stride)
    for kind in args.kinds or ranges:
        yield from (f"{kind}:{n}" for n in ranges[kind])


def one(harness, name, done, happened):
    """Whether every promise held."""
    kind = name.partition(":")[0]
    try:
        happened[kind] += harness.check(name)
    except PromiseError as problem:
        print(f"FAILED {problem}", flush=True)
        return False
    finally:
        done[kind] += 1
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="at random moments")
    parser.add_argument("--first", type=int, default=0, help="of those moments, to test them in several runs")
    parser.add_argument("--kinds", nargs="+", choices=("moment", *FAULTS, "limit"), help="only these (default: all)")
    parser.add_argument("--stride", type=int, default=1, help="of the file operations, every so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, metavar="K", help="of the replays, each over a share of the rows")
    parser.add_argument(
        "--placement", choices=("device", "host", "cached", "shared"), default="device", help="of all tables"
    )
    parser.add_argument("--only", metavar="NAME", help="one case, such as moment:17 or eio:3")
    args = parser.parse_args()
    done, happened, failed, started = Counter(), Counter(), 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder,
        Harness(folder, args.seed, args.passes, args.placement) as harness,
    ):
        print(f"an unbroken run: {harness.seconds:.2f} s, {harness.num_calls} file operations", flush=True)
        try:
            for name in [args.only] if args.only else names(args, harness.num_calls):
                failed += not one(harness, name, done, happened)
                if done.total() % 50 == 0:
                    print(f"{done.total()} cases, {failed} failed, {time.monotonic() - started:.0f} s", flush=True)
        except KeyboardInterrupt:
            print("stopped", flush=True)
    for kind, count in done.items():
        print(f"{kind:>10}: {count} cases, {happened[kind]} ended the run early")
    print(f"{done.total()} cases, {failed} failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
