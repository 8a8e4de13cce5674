"""``python -m histories``: random histories of services, stores and followers, each in a separate folder.

Exit code 1 after a fault, whose history is printed with the command that repeats it.
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from histories import history
from histories.pools import KINDS, store_of
from histories.world import FaultError

RESULTS = Path(__file__).with_name("results.txt")


def main():
    parser = argparse.ArgumentParser(prog="python -m histories", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="histories in all, shared among the kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of stores, separated by commas")
    parser.add_argument("--only", type=int, help="the number of one history")
    parser.add_argument("--first", type=int, default=0, help="the number of the first history of each kind")
    parser.add_argument("--record", action="store_true", help=f"write the table to {RESULTS.name}")
    args = parser.parse_args()
    kinds, lines, num_faults = args.kinds.split(","), [], 0
    each = -(-args.cases // len(kinds))
    numbers = range(args.first, args.first + each) if args.only is None else [args.only]
    for kind in kinds:
        begin_s, counts, faults = time.monotonic(), Counter(), 0
        with (
            tempfile.TemporaryDirectory(prefix="penstock-histories-") as root,
            store_of(kind, Path(root)) as next_store,
        ):
            for number in numbers:
                folder = Path(root) / "history"
                folder.mkdir()
                try:
                    counts.update(history.run(next_store(folder), folder, args.seed, number))
                except Exception as error:
                    faults += 1
                    print(f"\n{kind}, history {number}: {error!r}", *getattr(error, "__notes__", []), sep="\n  ")
                    traceback.print_tb(error.__traceback__) if not isinstance(error, FaultError) else None
                    print(f"again: python -m histories --seed {args.seed} --kinds {kind} --only {number}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - begin_s
        lines.append(
            f"{kind:9} {len(numbers):5} histories, seed {args.seed}: {faults} faults; {counts['checks']:,} checks, "
            f"{counts['named']:,} of them of a named position; {counts['ended']:,} followers ended because another one "
            f"was ahead; {seconds:.0f} s"
        )
        print(lines[-1], flush=True)
        num_faults += faults
    if args.record:
        RESULTS.write_text("\n".join(lines) + "\n")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
