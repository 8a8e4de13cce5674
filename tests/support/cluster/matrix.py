"""Jobs of every size against one process: ``python tests/support/cluster/matrix.py`` (make cluster).

Shares × readers × nodes × static and dynamic tables, unbroken, and stopped and resumed with every other number of
shares: state hash and the bytes of the deltas must equal those of one process with --merge round, stopped at the same
frame.
"""

import argparse
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.jobs import KINDS, NUM_REQUIRED, Nodes, Sources

from penstock.contrib.ray import Job

SHARES, READERS, NODES = (1, 2, 3, 5), (1, 2), (1, 2)
STOP = 17  # frames


def run(sources, place, shares, readers, **options):
    return Job(
        sources.config, sources.logs, shares=shares, readers=readers, num_required=NUM_REQUIRED[sources.kind],
        rounds_per_block=3, checkpoint=place / "commits", deltas=place / "deltas.arrows", **sources.form, **options,
    ).run()  # fmt: skip


def differences(sources, place, shares, readers, wanted):
    """Yield what differs from one process, after a job that resumes what is in ``place``, if anything."""
    report = run(sources, place, shares, readers, flush=True, resume=(place / "commits").exists())
    state_hash, deltas = wanted
    if report.state_hash != state_hash:
        yield f"state {report.state_hash}, expected {state_hash}"
    if (place / "deltas.arrows").read_bytes() != deltas.read_bytes():
        yield "other deltas"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES)
    parser.add_argument("--readers", type=int, nargs="+", default=READERS)
    parser.add_argument("--resumes", type=int, default=len(SHARES) - 1, help="numbers of shares to resume with")
    args = parser.parse_args()
    import ray

    failed, num_cases, started = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-matrix-") as name:
        folder = Path(name)
        made = {kind: Sources(folder, kind, 12) for kind in KINDS}
        wanted = {(kind, None): job.alone("unbroken") for kind, job in made.items()}
        wanted |= {(kind, STOP): job.alone("stopped", STOP) for kind, job in made.items()}
        for num_nodes in args.nodes:
            with Nodes(num_nodes) as nodes:
                ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
                for kind, shares, readers in product(KINDS, args.shares, args.readers):
                    of_size = folder / f"{num_nodes} nodes, {kind}, {shares} shares, {readers} readers"
                    (of_size / "unbroken").mkdir(parents=True)
                    others = [other for other in SHARES if other != shares][: args.resumes]
                    if others:
                        run(made[kind], of_size / "stopped", shares, readers, limit=STOP)
                    for then in (None, *others):
                        place, stop = of_size / "unbroken", None
                        if then is not None:
                            place, stop = of_size / f"resumed with {then}", STOP
                            shutil.copytree(of_size / "stopped", place)
                        actual = list(differences(made[kind], place, then or shares, readers, wanted[kind, stop]))
                        num_cases += 1
                        if actual:
                            failed += 1
                            print(f"FAILED {of_size.name}, {place.name}: {'; '.join(actual)}", flush=True)
                    so_far = f"{num_cases} cases, {failed} failed, {time.monotonic() - started:.0f} s"
                    print(f"{of_size.name}: {so_far}", flush=True)
                ray.shutdown()
    print(f"{num_cases} cases, {failed} failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
