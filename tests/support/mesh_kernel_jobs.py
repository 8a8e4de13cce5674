"""What a process of ``mesh_jobs`` does with our kernel, and with faulty ones in its place."""

import os
import shutil
from functools import lru_cache, partial


def with_a_kernel(mesh, rank, count, folder):
    """Tables of a mesh that counts as TPUs: with a good kernel, with faulty ones in process 1, with other variables."""
    from faulty_kernels import CANARY_LINES, Kernel, does_not_compile, off_in_one_line
    from mesh_jobs import batches, small_config

    import penstock as ps
    from penstock.rows.bridge import backends, canary, program_cache, tensorcore

    backends.platform = lambda mesh: "tpu"
    assert CANARY_LINES == 3 * 8
    tensorcore.BLOCK, tensorcore.UNROLLED = 8, 2
    canary.verdicts = lambda: folder / f"verdicts{rank}"
    ours, shared = tensorcore.apply, program_cache.compiled.__wrapped__
    seen = []
    steps = {"of_the_canary": False}
    for fault in ({}, {"spoil": off_in_one_line}, {"spoil": does_not_compile, **steps}, {"moves": True, **steps}):
        kernel = partial(Kernel, **fault) if fault and rank == 1 else Kernel
        tensorcore.apply, program_cache.compiled = kernel if fault else ours, lru_cache(shared)
        canary.failure.cache_clear()
        shutil.rmtree(canary.verdicts(), ignore_errors=True)
        engine = ps.Engine(small_config(), mesh, num_required=count)
        report = engine.run(batches(0, 1), table="t")
        kept = len(list(canary.verdicts().iterdir()))
        seen.append((report.variants["t"], report.notes, report.device_problems, kept, engine.state_hash()))
    if rank == 1:
        os.environ["PENSTOCK_VARIANT"] = "xla"
    try:
        ps.Engine(small_config(), mesh)
    except ps.UsageError as error:
        return seen, str(error)
