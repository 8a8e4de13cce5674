"""Jobs of several JAX processes in which one or all make a mistake, or one fails: as those of mesh_jobs.py."""

import numpy as np
from mesh_jobs import batches, small_config, small_frame


def failed(mesh, rank, count, folder):
    """Mistakes of one process or of all: every process raises, and the engine continues."""
    import jax

    import penstock as ps

    def error_of(call):
        try:
            call()
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    engine = ps.Engine(small_config(), mesh, num_required=count)
    before = engine.state_hash()
    bad = {"t": (np.array([1, 99 if rank else 2]), np.ones((2, 4), np.float32))}
    large = {"t": (np.array([1, 1 if rank else 2]), np.full((2, 4), 3e38, np.float32))}
    missing = folder / "missing.arrows"
    dynamic = ps.EmbeddingConfig.from_tables([ps.TableConfig(24, 4, name="d", dynamic=ps.Dynamic())], ps.SGD(0.1))
    placed = ps.EmbeddingConfig.from_tables([ps.TableConfig(24, 4, placement=ps.Placement("cached", 9))], ps.SGD(0.1))
    uneven = jax.sharding.Mesh(np.asarray(jax.devices()[1:]), ("x",))

    def source():
        yield from batches(0, count)
        if rank:
            raise OSError("the disk is gone")

    errors = {
        "row": error_of(lambda: engine.apply(bad)),
        "sum": error_of(lambda: engine.apply(large)),
        "call": error_of(lambda: engine.flush() if rank else engine.lookup("t", [1])),
        "missing": error_of(lambda: engine.run(missing if rank else iter(batches(0, count)))),
        "same": before == engine.state_hash(),
        "config": error_of(lambda: ps.Engine(small_config(), mesh, num_required=1 + rank)),
        "save": error_of(lambda: engine.save(folder / "c")),
        "commit": error_of(lambda: engine.run(batches(0, count), checkpoint=folder / "c")),
        "deltas": error_of(lambda: engine.run(batches(0, count), deltas=folder / f"d{rank}")),
        "stage": error_of(lambda: engine.stage(batches(0, count))),
        "dynamic": error_of(lambda: ps.Engine(dynamic, mesh)),
        "placed": error_of(lambda: ps.Engine(placed, mesh)),
        "uneven": error_of(lambda: ps.Engine(small_config(), uneven)),
        "after": before == engine.state_hash() and not (folder / "c").exists(),
        "source": error_of(lambda: engine.run(source())),
        "steps": engine.global_step,
    }
    own = ps.Engine(small_config())  # an engine of this process alone, in the same program
    own.apply({"t": small_frame(rank, 0)})
    own.save(folder / f"own{rank}")
    errors["restore"] = error_of(lambda: ps.Engine.restore(folder / f"own{rank}", mesh))
    return errors, own.global_step


def without_memory(mesh, rank, count, _):
    """The last process has no memory for the rows of a lookup, and then for those of a step."""
    import pytest

    import penstock as ps
    from penstock.rows.bridge.packing import Packer
    from penstock.rows.bridge.stacking import Stack

    def refuse(*_, **__):
        raise MemoryError("no room for rows")

    engine = ps.Engine(small_config(), mesh, num_required=count)
    errors = []
    for layout, method, call in (
        (Stack, "padded", lambda: engine.lookup("t", [1])),
        (Packer, "pack", lambda: engine.apply({"t": small_frame(rank, 0)})),
        (Packer, "pack", lambda: engine.apply({"t": small_frame(rank, 1)})),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == count - 1:
                patch.setattr(layout, method, refuse)
            with pytest.raises((MemoryError, ps.PenstockError)) as raised:
                call()
        errors.append((type(raised.value).__name__, str(raised.value)))
    return errors
