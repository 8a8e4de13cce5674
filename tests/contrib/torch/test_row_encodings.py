"""Rows in 8 bits are those that torch's quantized operators read: FBGEMM's fused 8-bit rows."""

import numpy as np
import pytest
from cli import outcome

import penstock as ps
from penstock.model.row_encodings import INT8

torch = pytest.importorskip("torch")
quantized = torch.ops.quantized


@pytest.fixture
def rows():
    spread = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    spread[:100] *= np.float32(10) ** np.arange(-40, 30, 0.7)[:100, None]  # also ranges below FBGEMM's epsilon
    spread[200] = 0.7
    return spread


def test_torch_reads_the_rows_as_penstock_does(rows):
    encoded = INT8.encode(rows)
    read = quantized.embedding_bag_byte_unpack(torch.from_numpy(encoded)).numpy()
    # FBGEMM rounds once, by a fused multiplication and addition, where the processor has one.
    ulps = np.spacing(np.abs(rows).max(axis=1))[:, None]
    assert (np.abs(read - INT8.decode(encoded)) <= ulps).all()
    bound = (rows.max(axis=1).astype(np.float64) - rows.min(axis=1)) / 510
    assert (np.abs(read.astype(np.float64) - rows) <= bound[:, None] + 2 * ulps).all()
    assert (read[200] == rows[200]).all()


def test_ordinary_rows_are_as_torch_packs_them(rows):
    ordinary = rows[300:]
    encoded = INT8.encode(ordinary)
    packed = quantized.embedding_bag_byte_prepack(torch.from_numpy(ordinary)).numpy()
    assert packed.shape == encoded.shape
    assert np.abs(packed[:, :64].astype(int) - encoded[:, :64]).max() <= 1
    np.testing.assert_allclose(packed[:, 64:].view("<f4"), encoded[:, 64:].view("<f4"), rtol=1e-6)


def test_a_bag_of_encoded_rows(rows):
    indices, offsets = torch.tensor([3, 300, 301, 4]), torch.tensor([0, 3])
    sums = quantized.embedding_bag_byte_rowwise_offsets(torch.from_numpy(INT8.encode(rows)), indices, offsets)
    decoded = INT8.decode(INT8.encode(rows))
    wanted = np.stack([decoded[[3, 300, 301]].sum(axis=0), decoded[4]])
    np.testing.assert_allclose(sums.numpy(), wanted, rtol=1e-5, atol=1e-42)


def test_exported_and_shared_rows_are_read_by_torch(tmp_path, capsys, rows):
    table = ps.TableConfig(len(rows), 64, name="user", optimizer=ps.SGD(0.1))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared=tmp_path / "shared")
    engine.load_parameters("user", rows)
    engine.save(tmp_path / "c")
    flags = ("--format", "torch", "--rows", "int8")
    assert outcome(capsys, "export", tmp_path / "c", tmp_path / "serving.pt", *flags)[0] == 0
    exported = torch.load(tmp_path / "serving.pt")["user.weight"]
    shared = torch.from_numpy(ps.Reader(tmp_path / "shared", dtype="int8").lookup("user", range(len(rows))))
    assert torch.equal(exported, shared)
    weights = quantized.embedding_bag_byte_unpack(exported).numpy()
    np.testing.assert_allclose(weights[100:], rows[100:], atol=np.ptp(rows[100:], axis=1).max() / 500)
