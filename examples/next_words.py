"""Next-word pairs from the first 3,500 words of Shakespeare's works, for the examples in Flax and Keras.

A sample is two neighbouring words; its label is the word that follows. Also here: compiling a step for a TPU or GPU
that the machine does not have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

TEXT = np.load(Path(__file__).parent / "data" / "shakespeare_words.npy")
WORDS, DIM, HIDDEN, BATCH, EPOCHS = int(TEXT.max()) + 1, 32, 64, 128, 10
RATE = 0.2
# The machine code for a GPU, as the compiler writes it down.
PTX = Path(tempfile.gettempdir()) / f"ptx-{os.getpid()}"
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (pairs of words (BATCH, 2), next words (BATCH,)) in the order of the text, without the incomplete rest."""
    pairs, following = np.stack([TEXT[:-2], TEXT[1:-1]], axis=1).astype(np.int64), TEXT[2:].astype(np.int32)
    whole = range(0, len(following) - BATCH + 1, BATCH)
    return [(pairs[start : start + BATCH], following[start : start + BATCH]) for start in whole]


def config(rows: int = WORDS) -> ps.EmbeddingConfig:
    """Return one table of ``rows`` words, and a feature that averages the words of a pair."""
    table = ps.TableConfig(rows, DIM, name="word", combiner="mean", initializer=ps.Uniform(-0.1, 0.1))
    features = {"pair": ps.FeatureConfig(table, name="pair")}
    return ps.EmbeddingConfig.from_features(features, BATCH, ps.Adagrad(RATE))


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Print the loss of every epoch and return the largest relative difference from the dense reference."""
    for epoch, (loss, dense) in enumerate(zip(losses, reference, strict=True)):
        print(f"epoch {epoch}: loss {loss:.6f}, with dense embeddings {dense:.6f}")
    return float(np.max(np.abs(np.subtract(losses, reference) / reference)))


def main(train: Callable[[], tuple[list[float], list[float]]], compile_for: Callable[[str], int]) -> int:
    """Run an example, and return its exit code.

    train : returns the loss of every epoch, and those of the dense reference
    compile_for : compiles a step for a device, and returns an exit code
    """
    parser = argparse.ArgumentParser(description="Train a model of the next word next to one with dense embeddings.")
    parser.add_argument("--compile-for", choices=[*TPUS, "h200"], help="only compile the step, for a TPU or GPU")
    args = parser.parse_args()
    if args.compile_for:
        return compile_for(args.compile_for)
    apart = largest_difference(*train())
    print(f"the losses differ by at most {apart:.1e} of themselves")
    return 0 if apart < 1e-4 else 1


def compiled_for(device: str, step: Any, donated: Any, *others: Any) -> Any:
    """Return a step compiled for one device, such as "v5e". donated : its first argument, an example of the values"""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    if device in TPUS:
        chip = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[device]).devices[0]
    else:
        from penstock.bench.gpu.compiled_steps import mesh_of_one

        chip = mesh_of_one().devices.flat[0]

    def abstract(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(value), value.dtype, sharding=SingleDeviceSharding(chip))

    arguments = jax.tree.map(abstract, (donated, *others))
    return jax.jit(step, donate_argnums=0).lower(*arguments).compile()


def prepare_compiling(device: str) -> None:
    """Lay tables out and sum as on the device, and let its compiler run without one. Call it before new tables."""
    if device in TPUS:
        tpu = {"PENSTOCK_LAYOUT": "tiled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
        os.environ.update(tpu, JAX_PLATFORMS="cpu")
    else:
        from penstock.bench.gpu.compiled_steps import set_environment

        set_environment(PTX)
        os.environ["PENSTOCK_SUMS"] = "gathers"


def report(program: Any, tables: Any) -> int:
    """Print whether the compiled step updates the tables in place, by no atomic operation; return an exit code."""
    import jax

    from penstock.bench.gpu.compiled_steps import ATOMIC
    from penstock.bench.tpu.in_place import copies

    arrays = [(array.shape, array.dtype) for array in jax.tree.leaves(tables) if array.ndim]
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(tables))
    memory, copied = program.memory_analysis(), [copy.array for copy in copies(arrays, program.as_text())]
    in_place = memory.alias_size_in_bytes >= num_bytes and not copied
    print(f"tables of {num_bytes:,} bytes: {memory.alias_size_in_bytes:,} bytes of the step's arguments are aliased")
    print(f"temporary memory {memory.temp_size_in_bytes:,} bytes; tables copied: {', '.join(copied) or 'none'}")
    atomics = {name for path in sorted(PTX.glob("*.ptx")) for name in ATOMIC.findall(path.read_text())}
    shutil.rmtree(PTX, ignore_errors=True)
    print(f"{'in place' if in_place else 'NOT in place'}; atomic operations: {', '.join(sorted(atomics)) or 'none'}")
    return 0 if in_place and not atomics else 1
