"""The random numbers of synthetic logs: the law of each, and the same bits on every machine."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy._core._multiarray_umath as umath
import pyarrow as pa
import pyarrow.ipc
import pytest
from scripts import ROOT

from penstock.io.exact_draws import ExactDraws
from penstock.io.synth import SynthOptions, write_synthetic
from penstock.io.synthetic_ids import spread

SEED = np.random.SeedSequence(7)

# SHA-256 of the ids, the gradients, and where there are several the tables of each log, of 3,000 rows.
DIGESTS = {
    "zipf": ({}, "11021b88fe2c030e68a932034116c13f5856ab945a382557bd9cb3ea970201ae"),
    "zipf, other seed and alpha": (
        {"seed": 5, "alpha": 0.6},
        "487951abd3d749c494f905de77c77ab1e4ef422f49abee8c22a7909a7153d629",
    ),
    "zipf, several tables": ({"tables": 3}, "214e7d8f3284fe9d2ceab3b75305865b99c5f25dca760d7cf26e8f8d2bda3f26"),
    "zipf, hashed, with churn": (
        {"ids": "hashed", "churn": 1.5},
        "0de26da2683a6401213a44aa5a05d8bcc645d00c9b2d2a0567c3d54c33aba4fd",
    ),
    "uniform": ({"distribution": "uniform"}, "22b4467be83756c297fa866404b55c1435a9a7eaf0e5c1e81a8f35ee2a59e34e"),
    "uniform, several tables, hashed": (
        {"distribution": "uniform", "ids": "hashed", "tables": 3},
        "f30f690d9cc2e0191595937ef9f4c07036a7d954a4fc36e759144e64f6932616",
    ),
    "dlrm": ({"distribution": "dlrm"}, "a3b9c3bcf87fbb383e5ac470edcde0ef0777180027d3d7f57c48e0a705f38035"),
    "dlrm, hashed, with churn": (
        {"distribution": "dlrm", "ids": "hashed", "churn": 0.5},
        "285c6756e8a20a23cea4df1dd971f58df942799eefd27aa474d72d585f0d9a6e",
    ),
}


def digest_of(path, options):
    log = write_synthetic(path, SynthOptions(**{"rows": 3000, "rows_per_step": 700, "vocabulary": 5000, **options})).log
    table = pa.ipc.open_stream(log).read_all().combine_chunks()
    arrays = [table["id"], table["gradient"].combine_chunks().flatten()]
    if "table" in table.column_names:
        arrays.append(table["table"].combine_chunks().indices)
    return hashlib.sha256(b"".join(array.to_numpy().tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize("name", DIGESTS)
def test_a_synthetic_log_has_the_recorded_bits(name, tmp_path):
    options, digest = DIGESTS[name]
    assert digest_of(tmp_path / "log.arrows", options) == digest


OTHER_C_LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
/* The last bit is another wherever a correct function may round either way. */
#define UNARY(kind, name, next) \\
    kind name(kind x) { \\
        static kind (*real)(kind); \\
        if (!real) real = (kind (*)(kind))dlsym(RTLD_NEXT, #name); \\
        kind y = real(x); \\
        return y == (kind)(long long)y ? y : next(y, 2 * y); \\
    }
#define BINARY(kind, name, next) \\
    kind name(kind x, kind z) { \\
        static kind (*real)(kind, kind); \\
        if (!real) real = (kind (*)(kind, kind))dlsym(RTLD_NEXT, #name); \\
        kind y = real(x, z); \\
        return y == (kind)(long long)y ? y : next(y, 2 * y); \\
    }
UNARY(double, exp, nextafter) UNARY(double, exp2, nextafter) UNARY(double, expm1, nextafter)
UNARY(double, log, nextafter) UNARY(double, log2, nextafter) UNARY(double, log1p, nextafter)
UNARY(float, expf, nextafterf) UNARY(float, logf, nextafterf) UNARY(float, log1pf, nextafterf)
BINARY(double, pow, nextafter) BINARY(float, powf, nextafterf)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_another_c_library_and_other_vector_units_give_the_same_bits(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER_C_LIBRARY)
    subprocess.run(["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", library, source, "-lm", "-ldl"], check=True)
    features = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "NPY_DISABLE_CPU_FEATURES": " ".join(features),
        "PYTHONPATH": os.pathsep.join(
            map(str, [ROOT / "build" / "tree", ROOT / "tests" / "support", Path(__file__).parent])
        ),
    }
    code = "import sys, pathlib, test_exact_draws as t; t.print_digests(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "log.arrows")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    logarithm, *digests = done.stdout.split()
    assert logarithm != repr(math.log(3.0))  # the library is in use
    assert digests == [digest for _, digest in DIGESTS.values()]


def print_digests(path):
    print(repr(math.log(3.0)))
    for options, _ in DIGESTS.values():
        print(digest_of(path, options))


def test_the_numbers_do_not_depend_on_how_many_are_drawn_together():
    for draw in (ExactDraws.units, ExactDraws.normals, lambda draws, count: draws.below(10, count)):
        whole, parts = draw(ExactDraws(SEED), 5011), ExactDraws(SEED)
        pieces = [draw(parts, count) for count in (1, 0, 2, 5, 5000, 3)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def is_likely(counts, shares):
    """Whether Pearson's statistic is within five standard deviations of its mean."""
    expected = shares / shares.sum() * counts.sum()
    assert expected.min() > 5
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_normals_follow_the_normal_law_into_its_tails():
    values, normal = ExactDraws(SEED).normals(1_000_000), NormalDist()
    assert values.dtype == np.float32
    edges = np.arange(-3.75, 4.0, 0.25)
    below = np.array([0.0, *(normal.cdf(edge) for edge in edges), 1.0])
    assert is_likely(np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1), np.diff(below))
    assert values.std() == pytest.approx(1.0, abs=0.004)
    assert abs(values.mean()) < 0.005
    assert len(np.unique(values)) > 900_000
    assert abs(np.corrcoef(values[::2], values[1::2])[0, 1]) < 0.007


def test_integers_below_a_bound_are_uniform():
    assert is_likely(np.bincount(ExactDraws(SEED).below(37, 500_000), minlength=37), np.ones(37))
    largest = ExactDraws(SEED).below(2**31, 500_000)
    assert is_likely(np.bincount(largest >> 26, minlength=32), np.ones(32))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.1, 1.8])
def test_ids_follow_zipfs_law(alpha, tmp_path):
    options = SynthOptions(rows=400_000, vocabulary=300, dim=1, alpha=alpha)
    ids = pa.ipc.open_stream(write_synthetic(tmp_path / "log.arrows", options).log).read_all()["id"].to_numpy()
    ranks = np.arange(300)
    counts = np.bincount(ids, minlength=300)[spread(ranks, 300)]
    assert is_likely(counts, (ranks + 1.0) ** -alpha)


def test_the_rows_of_a_log_are_split_by_the_shares_of_its_tables(tmp_path):
    options = SynthOptions(rows=200_000, vocabulary=1000, distribution="dlrm")
    written = write_synthetic(tmp_path / "log.arrows", options)
    shares = np.array([table.share for table in written.tables])
    assert shares.sum() == pytest.approx(1.0)
    assert is_likely(np.array(list(written.rows.values())), shares)
