"""The instructions that the kernel needs per line, counted in the compiler's listing.

A TPU core issues one bundle of instructions per cycle. libtpu writes the final bundles of every program that it
compiles into the folder of ``--xla_jf_dump_to``. The count is for a full block of lines in the middle of a step:

* all bundles of the loop over blocks once, including those that only the first or last block executes;
* for each direction, the unrolled loop that starts copies, as often as its block requires.

It excludes the loops over single lines, which only blocks with pads execute, and the time of the copies.

``python -m penstock.bench.tpu.bundles FILE --only "v5e Adagrad 128"`` compiles a step and prints the number.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from penstock.bench.tpu.matrix import Compiler, prepare
from penstock.bench.tpu.results_page import bundles_in
from penstock.bench.tpu.step_cases import LINES, Case, cases
from penstock.rows.bridge import tensorcore

COPIES = ("dma.hbm_to_vmem", "dma.vmem_to_hbm")
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{")  # address, label, depth of loops


def bundles_per_line(listing: str, block: int, unrolled: int) -> float:
    """Return the bundles per line of a full block. Raises ValueError if the listing is not of such a kernel.

    block : lines of a block; unrolled : lines whose copies one iteration of a loop starts
    """
    around, loops = _loops(listing)
    total = float(around)
    for copy in COPIES:
        starts = [body.count(copy) for _, body in loops]
        if max(starts, default=0) < unrolled:
            raise ValueError(f"no loop starts {unrolled} copies by {copy}")
        most = max(size for (size, _), count in zip(loops, starts, strict=True) if count == max(starts))
        total += most * block / unrolled
    return total / block


def _loops(listing: str) -> tuple[int, list[tuple[int, str]]]:
    """Return the bundles of the loop over blocks without inner loops, and the bundles and the text of each of these."""
    around, loops, inside = 0, [], False
    for line in listing.splitlines():
        bundle = BUNDLE.match(line)
        if not bundle:
            continue
        label, depth = bundle[1], len(bundle[2])
        if label is not None:  # the label after a loop ends it: the last bundles of a loop follow its branch
            inside = label == "LB" and depth > 1
            loops += [(0, "")] if inside else []
        if inside:
            size, body = loops[-1]
            loops[-1] = size + 1, body + line
        else:
            around += depth == 1
    return around, loops


class Listing:
    """The folder into which libtpu writes listings. Create it before the first program is compiled."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-bundles-"))
        more = f"--xla_jf_dump_to={self._folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {more}".strip()

    def take(self) -> str:
        """Return the listing of the kernel that was compiled since the last call, and clear the folder."""
        (path,) = (path for path in self._folder.glob("*-penstock_*final_bundles.txt") if "schedule" not in path.name)
        text = path.read_text()
        for path in self._folder.iterdir():
            path.unlink()
        return text

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def is_listed(case: Case) -> bool:
    """Return whether the bundles of a case are counted."""
    usual = case.program == "apply" and not case.bfloat16 and not case.compact and case.lines == LINES
    shown = case.generation in ("v5e", "v5p") and case.dim in (8, 32, 128, 300, 1024)
    return usual and shown and case.optimizer in ("Adagrad", "Adam")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.tpu.bundles", description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", type=Path, help="one JSON object per case; cases in this file are not compiled again"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose line has all these words")
    args = parser.parse_args()
    prepare()
    listing, compiler, results = Listing(), Compiler(), bundles_in(args.results)
    try:
        for case in filter(is_listed, cases(False)):
            if case.by_xla or case in results or not case.has(args.only):
                continue
            compiler.compile(case)
            bundles = bundles_per_line(listing.take(), tensorcore.BLOCK, tensorcore.UNROLLED)
            print(case, f"{bundles:.1f}", flush=True)
            with args.results.open("a") as file:
                file.write(json.dumps({"case": asdict(case), "bundles": bundles}) + "\n")
    finally:
        listing.close()


if __name__ == "__main__":
    main()
