"""Jobs of several JAX processes on this machine: what each process does.

A job is a function of (mesh, rank, count, folder), which returns what the test sees; mesh_processes.py starts it.
"""

import os

import numpy as np

ROWS = {"a": 24, "b": 24, "m": 20, "n": 20, "r": 20, "s": 16, "h": 24}
DIMS = {"a": 8, "b": 8, "m": 4, "n": 4, "r": 8, "s": 4, "h": 6}


def config_of(sharding="MOD", **options):
    """a and b share a stack; m: Adam; n: Adam that is not lazy; r: a slot per row; s: separate frames; h: 16 bits"""
    from engines import stored

    import penstock as ps

    optimizers = {
        "m": ps.Adam(0.05),
        "n": ps.Adam(0.05, lazy_adam=False),
        "r": ps.PartialRowWiseAdam(0.1),
        "s": ps.Adagrad(0.1, use_gradient_accumulation=False),
    }
    tables = [ps.TableConfig(ROWS[name], DIMS[name], name=name, optimizer=optimizers.get(name)) for name in ROWS]
    return stored(ps.EmbeddingConfig.from_tables(tables, ps.Adagrad(0.1), **options), ["h"], sharding)


def frame_of(rank, number, num_ids=9):
    """The frame with a number of a process: rows of every table but one, many of them repeated, some negative zeros."""
    rng = np.random.default_rng([rank, number])
    frame = {}
    for index, (name, rows) in enumerate(ROWS.items()):
        if (rank + number) % len(ROWS) != index:
            ids = rng.integers(0, rows if name != "n" else 9, num_ids)
            grads = rng.standard_normal((len(ids), DIMS[name]), np.float32)
            grads[rng.random(grads.shape) < 0.2] = -0.0
            frame[name] = ids, grads
    return frame


def state(engine):
    """Weights and slots of every table."""
    return {name: engine.retrieve_parameters(name) for name in engine.config.table_names}


# ---- jobs


def applied(mesh, rank, count, _):
    """Two rounds to a step; process 0 sends a stale frame in one of them."""
    import penstock as ps

    engine = ps.Engine(config_of(), mesh, num_required=count + 1)
    for number in range(6):
        late = {"local_step": engine.global_step - 1} if number == 4 and rank == 0 else {}
        assert engine.apply(frame_of(rank, number), **late) != bool(late)
    seen = engine.gate.stale.total, engine.gate.num_accumulated, engine.global_step
    assert not engine.flush()
    return state(engine), seen, engine.state_hash()


def one_frame_per_step(mesh, rank, count, _):
    """Each process's frame of a step has no row twice, so that one process can fold them in the same order."""
    import penstock as ps

    hashes = []
    for reduction, sharding in (("mean", "DIV"), ("sum", "MOD")):
        engine = ps.Engine(config_of(sharding), mesh, num_required=count, reduction=reduction)
        places = [array.addressable_shards[0].data.unsafe_buffer_pointer() for array in arrays_of(engine)]
        for number in range(4):
            engine.apply(distinct(frame_of(rank, number)))
        assert places == [array.addressable_shards[0].data.unsafe_buffer_pointer() for array in arrays_of(engine)]
        hashes.append(engine.state_hash())
    return hashes


def sliced(mesh, rank, count, _):
    """Frames that are too large for one dispatch."""
    import penstock as ps
    from penstock.contrib.meshes import process_tables

    process_tables.MAX_BUCKET = 8 * mesh.size
    table = ps.TableConfig(120, 4, name="n", optimizer=ps.Adam(0.1, lazy_adam=False))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table, ps.TableConfig(90, 2, name="a")], ps.SGD(0.5)), mesh)
    for number in range(2):
        engine.apply(wide_frame(rank, number))
    return engine.config, engine.state_hash()


def wide_frame(rank, number):
    """A frame of more rows than one dispatch takes."""
    rng = np.random.default_rng([rank, number])
    sizes = {"n": (120, 4), "a": (90, 2)}
    return {
        name: (rng.permutation(rows)[: rows - 20], rng.standard_normal((rows - 20, dim), np.float32))
        for name, (rows, dim) in sizes.items()
    }


def arrays_of(engine):
    """The arrays of all tables."""
    return [array for name in ROWS for array in engine.core.tables.table(name).backend.arrays]


def distinct(frame):
    """The first row of each id of a frame."""
    results = {name: np.unique(ids, return_index=True)[1] for name, (ids, _) in frame.items()}
    return {name: (ids[results[name]], grads[results[name]]) for name, (ids, grads) in frame.items()}


def small_config(**options):
    """One small table ``t``."""
    import penstock as ps

    return ps.EmbeddingConfig.from_tables([ps.TableConfig(24, 4, name="t")], ps.Adagrad(0.1), **options)


def small_frame(rank, number):
    """Five rows of it."""
    ids = np.arange(5) * (rank + 1) + number
    return ids, np.random.default_rng([rank, number]).standard_normal((5, 4), np.float32)


def batches(rank, count):
    """Frames of one source: one more per rank."""
    import pyarrow as pa

    for number in range(3 + rank):
        ids, grads = small_frame(rank, number)
        rows = pa.FixedSizeListArray.from_arrays(grads.reshape(-1), 4)
        yield pa.record_batch({"id": ids, "gradient": rows, "step": [number] * len(ids)})


def ran(mesh, rank, count, folder):
    """Sources of different lengths, one of which ends with a bad row; then activations and their gradients."""
    import penstock as ps

    engine = ps.Engine(small_config(), mesh, num_required=count)
    report = engine.run(batches(rank, count), flush=True)
    counts = report.frames, report.steps, report.pending, report.rows
    engine.write_tables(folder / "tables")
    return counts, state(engine), engine.state_hash(), engine.lookup("t", [rank, 20, 3 * rank])


def frozen(mesh, rank, count, folder):
    """A frozen table of vectors next to one that is trained; then files that differ between the processes."""
    import penstock as ps

    def engine_of(path):
        word = ps.TableConfig(24, 4, ps.FromFile(path), name="word", trainable=False)
        user = ps.TableConfig(24, 4, name="user", optimizer=ps.Adagrad(0.1))
        return ps.Engine(ps.EmbeddingConfig.from_tables([word, user]), mesh, num_required=count)

    vectors = np.arange(96, dtype=np.float32).reshape(24, 4)
    (folder / f"of{rank}").mkdir()
    os.chdir(folder / f"of{rank}")  # as on a host of its own
    np.save("same.npy", vectors)
    np.save("other.npy", vectors + rank)
    engine = engine_of("same.npy")
    before = engine.retrieve_parameters("user")["parameters"]
    for number in range(3):
        rng = np.random.default_rng([rank, number])
        rows = rng.integers(0, 24, 5), rng.standard_normal((5, 4), np.float32)
        engine.apply({"word": rows, "user": rows} if number < 2 else {"word": rows})
    after = {name: engine.retrieve_parameters(name) for name in ("word", "user")}
    try:
        engine_of("other.npy")
        problem = ""
    except ps.PenstockError as error:
        problem = str(error)
    return after, bool((after["user"]["parameters"] != before).any()), engine.global_step, engine.state_hash(), problem


def features_of(rank):
    """The ids that a process looks up."""
    return np.array([[1 + rank], [2], [2], [5 * rank]])


def trained(mesh, rank, count, _):
    """A training step: every process looks its batch up and sends its gradients."""
    import penstock as ps

    table = ps.TableConfig(24, 4, name="t")
    config = ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table)}, batch_size=4, optimizer=ps.SGD(0.5))
    engine = ps.Engine(config, mesh, num_required=count, reduction="sum")
    before = engine.lookup("t", range(24))
    activations, data = engine.recv_activations({"f": features_of(rank)})
    engine.send_gradients({"f": np.full((4, 4), rank + 1, np.float32)}, deduplication_data=data)
    return before, activations["f"], engine.lookup("t", range(24)), engine.global_step


def saved(mesh, rank, count, folder):
    """Orbax writes the tables of a job, each process its rows; then another job reads them."""
    import orbax.checkpoint

    import penstock as ps

    engine = ps.Engine(small_config(), mesh, num_required=count)
    engine.apply({"t": small_frame(rank, 0)})
    tree = {"t": {"parameters": engine.table("t"), **engine.slots("t")}}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)
    return engine.retrieve_parameters("t")


def loaded(mesh, rank, count, folder):
    """The rows that orbax kept."""
    import penstock as ps

    engine = ps.Engine(small_config(), mesh, num_required=count, seed=1)
    engine.read_tables(folder / "orbax")
    return engine.retrieve_parameters("t")


def served_rates(mesh, rank, count, _):
    """Dynamic learning rates: those of the last process count."""
    import penstock as ps

    table = ps.TableConfig(24, 4, name="t", optimizer=ps.SGD(learning_rate=lambda: 0.0))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], ps.SGD(0.1)), mesh, num_required=count)
    engine.apply({"t": small_frame(rank, 0)}, learning_rates=[0.25 * (rank + 1)])
    return engine.core.last_rates
