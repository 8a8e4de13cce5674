"""``python -m fuzz``: thousands of damaged inputs through the command line, each in a separate process.

Every case is known by --seed and its number: what is damaged, how, and the command that reads it. A fifth as many
cases are checkpoints with a forged manifest, whose digest fits. A case must end with a result, or
with exit code 3 or 4 (5 of a checkpoint) and one line; never with a traceback, a signal or a hang, and never take more
than --most-mib beyond what the same command takes on a small good file. A case that fails is kept and named with the
command that repeats it. Prints one line of figures per container at the end; exit code 1 where a case failed.
"""

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from fuzz import cases, server
from limits import HANG_S


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=3000, help="how many (default 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="CASE", help="one case: its number, or the name of a crafted one")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where the files of failed cases go")
    parser.add_argument("--limit-s", type=float, default=20.0, help="more is looked at again (default 20)")
    parser.add_argument("--most-mib", type=float, default=256.0, help="memory beyond a good run (default 256)")
    parser.add_argument("--manifests", type=int, default=0, metavar="N", help="only so many drawn manifests, no files")
    parser.add_argument("--no-crafted", action="store_true", help="only the drawn cases")
    parser.add_argument(
        "--handmade", type=int, default=0, metavar="N", help="also one in N of the messages made by hand (handmade.py)"
    )
    parser.add_argument(
        "--no-replay", action="store_true", help="only validate and inspect, which are 20 times as fast"
    )
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        failed, counts = run(args, Path(folder))
    for kind, ended in sorted(counts.items()):
        texts = ", ".join(f"{number} {how}" for how, number in sorted(ended.items()))
        print(f"{kind:24} {sum(ended.values()):6}: {texts}")
    total = sum(sum(ended.values()) for ended in counts.values())
    print(f"{total} cases, {failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def run(args: argparse.Namespace, folder: Path) -> tuple[int, dict[str, collections.Counter[str]]]:
    """How many failed, and how the others ended, by what was damaged."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    baselines: dict[str, float] = {}
    failed = 0
    for case in chosen(args):
        words = case.written(folder)
        if words[0] not in baselines:
            baselines[words[0]] = server.run(cases.good(words[0], folder), HANG_S).anon_mib
        ended = server.run(words, args.limit_s)
        if ended.code is None:  # on a busy machine slow is not hanging
            ended = server.run(words, HANG_S)
        problem = ended.problem(baselines[words[0]], args.most_mib, case.codes) or case.wrong(ended)
        counts[case.kind]["failed" if problem else f"exit {ended.code}"] += 1
        if problem:
            failed += 1
            tell(case, problem, ended, args)
        number = sum(sum(ended.values()) for ended in counts.values())
        if number % 500 == 0:
            print(f"{number} cases, {failed} failed", flush=True)
    return failed, counts


def chosen(args: argparse.Namespace) -> list[cases.Case]:
    if args.only is not None and args.only.startswith("manifest-"):
        return [cases.drawn_manifest(args.seed, int(args.only.removeprefix("manifest-")))]
    if args.only is not None and args.only.isdigit():
        return [cases.drawn(args.seed, int(args.only), args.no_replay)]
    crafted = [] if args.no_crafted else cases.crafted(args.no_replay, args.only)
    crafted += cases.by_hand(args.handmade) if args.handmade else []
    if args.only is not None:
        return [case for case in crafted if case.name == args.only]
    manifests = [cases.drawn_manifest(args.seed, number) for number in range(args.manifests or args.cases // 5)]
    damaged = [] if args.manifests else [cases.drawn(args.seed, number, args.no_replay) for number in range(args.cases)]
    return [*crafted, *damaged, *manifests]


def tell(case: cases.Case, problem: str, ended: server.Ended, args: argparse.Namespace) -> None:
    kept = case.kept(args.keep)
    flags = f" --handmade {args.handmade}" if case.kind == "handmade" else " --no-replay" if args.no_replay else ""
    again = f"python -m fuzz --seed {args.seed} --only {case.name}{flags}"
    print(f"FAILED {case.name}: {problem}\n  {case.change}\n  kept as {kept}\n  again: {again}", flush=True)
    for line in (ended.stderr.splitlines() or ["(nothing on stderr)"])[-6:]:
        print(f"  | {line[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
