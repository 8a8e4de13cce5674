"""``penstock replay``: what every flag does, what the report says, what --out writes."""

import io
import re

import cli
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from cli import TWO_TABLES, unmarked
from ipc import write

import penstock as ps
from penstock.cli import main

TAGS = TWO_TABLES.replace("constant: 0.5", "dynamic { tag: 0 }")


def frame(step, worker=0, ids=(1, 2, 3, 1), table="user", **columns):
    names = {"table": [table] * len(ids), "contributor": [f"w{worker}"] * len(ids)}
    return cli.frame(step, ids, worker, **names, **columns)


@pytest.fixture
def replay(tmp_path, call):
    """replay(sources, flags…) → the report that --json prints. A source: its batches. config: the text"""

    def run(*flags, sources=None, config=TWO_TABLES):
        path = tmp_path / "tables.pbtxt"
        path.write_text(config)
        logs = [write(tmp_path / f"{number}.arrows", batches) for number, batches in enumerate(sources or [LOG])]
        return call(0, "replay", path, *logs, *flags)[1]

    return run


LOG = [frame(step, ids=(1, 2, 3, 1 + step)) for step in range(7)] + [frame(7, table="item")]


def test_report_has_every_field_of_the_contract(replay):
    report = replay("--num-required", 3)
    assert re.fullmatch("[0-9a-f]{64}", report["state_hash"])
    assert (report["rows"], report["frames"], report["stale"], report["pending"], report["steps"]) == (32, 8, 0, 2, 2)
    assert report["seconds"] > 0
    assert report["rows_per_s"] == pytest.approx(32 / report["seconds"])
    assert report["dropped"] == {}
    assert report["verified"] is False
    assert report["tables"] == {"user": {"rows": 28, "distinct": 7}, "item": {"rows": 4, "distinct": 3}}


def test_flush_applies_what_the_gate_holds(replay):
    plain, flushed = replay("--num-required", 3), replay("--num-required", 3, "--flush")
    assert (flushed["pending"], flushed["steps"]) == (0, 3)
    assert plain["state_hash"] != flushed["state_hash"]


def test_limit_stops_after_that_many_frames(replay):
    assert replay("--limit", 3)["state_hash"] == replay(sources=[LOG[:3]])["state_hash"]
    assert replay("--limit", 0)["frames"] == 0
    assert replay("--limit", 99)["frames"] == 8


def test_reduction_mean_differs_from_sum_where_frames_share_an_id(replay):
    default, mean, summed = (
        replay("--num-required", 2, *flags)["state_hash"]
        for flags in ((), ("--reduction", "mean"), ("--reduction", "sum"))
    )
    assert default == mean != summed


def test_seed_changes_the_start(replay):
    assert replay("--limit", 0)["state_hash"] == replay("--limit", 0, "--seed", 0)["state_hash"]
    assert replay("--limit", 0)["state_hash"] != replay("--limit", 0, "--seed", 1)["state_hash"]


def test_no_hash_omits_the_hash(replay):
    assert replay("--no-hash")["state_hash"] is None


def test_out_holds_id_row_and_slots_in_id_order(replay, tmp_path):
    report = replay("--out", tmp_path / "out")
    assert report["out"] == [str(tmp_path / "out" / f"{name}.parquet") for name in ("user", "item")]
    engine = ps.Engine(ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt"))
    engine.run(iter(LOG))
    for name, columns in (("user", ["id", "row", "accumulators"]), ("item", ["id", "row"])):
        table = pa.parquet.read_table(tmp_path / "out" / f"{name}.parquet")
        assert table.schema.names == columns
        assert table["id"].to_pylist() == list(range(table.num_rows))
        wanted = engine.retrieve_parameters(name)
        for column, key in zip(columns[1:], ["parameters", "accumulators"], strict=False):
            assert np.array_equal(np.stack(table[column].to_numpy()), wanted[key])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["item.parquet", "user.parquet"]


def test_init_continues_where_out_ended(replay, tmp_path):
    out = tmp_path / "half"
    # Without a step column: the step is not part of what --out writes.
    plain = [unmarked(frame(step)) for step in range(6)]
    replay("--out", out, sources=[plain[:3]])
    rest = replay("--init", out, "--seed", 9, "--out", tmp_path / "rest", sources=[plain[3:]])
    replay("--out", tmp_path / "whole", sources=[plain])
    for name in ("user", "item"):
        whole, rest = (pa.parquet.read_table(tmp_path / d / f"{name}.parquet") for d in ("whole", "rest"))
        assert whole.equals(rest)


def test_merge_step_joins_the_logs_of_workers(replay):
    workers = [[frame(step, worker) for step in range(4)] for worker in range(2)]
    merged = replay("--merge", "step", "--num-required", 2, sources=workers)
    interleaved = [batch for pair in zip(*workers, strict=True) for batch in pair]
    assert (merged["steps"], merged["stale"]) == (4, 0)
    assert merged["state_hash"] == replay("--num-required", 2, sources=[interleaved])["state_hash"]


def test_sources_are_read_in_the_order_given(replay):
    first, second = [frame(0)], [frame(0, 1, ids=(1, 1))]
    single = replay("--num-required", 2, "--reduction", "sum", sources=[first, second])
    assert single["steps"] == 1
    assert (
        single["state_hash"]
        == replay("--num-required", 2, "--reduction", "sum", sources=[first + second])["state_hash"]
    )
    ends = [[frame(step, worker) for step in range(2)] for worker in range(2)]
    assert replay(sources=ends)["stale"] == 2
    assert replay(sources=ends[::-1])["state_hash"] != replay(sources=ends)["state_hash"]


def test_the_learning_rate_flag_takes_precedence_over_the_column(replay):
    rates = pa.array([[0.25]] * 4, pa.list_(pa.float32()))
    column = [frame(step, table="item", learning_rates=rates) for step in range(2)]
    by_column = replay(sources=[column], config=TAGS)
    assert by_column["learning_rates"] == [0.25]
    by_flag = replay("--learning-rate", "0=0.5", sources=[column], config=TAGS)
    constant = replay(sources=[[frame(step, table="item") for step in range(2)]])
    assert by_flag["learning_rates"] == [0.5]
    assert by_flag["state_hash"] == constant["state_hash"] != by_column["state_hash"]


def test_contribution_rows_cuts_frames(replay):
    plain = [unmarked(frame(0)) for _ in range(3)]
    assert replay(sources=[plain])["frames"] == 3
    assert replay("--contribution-rows", 5, sources=[plain])["frames"] == 3
    assert replay("--contribution-rows", 1, sources=[plain])["frames"] == 12


def test_table_and_columns_of_other_names(replay):
    other = [b.select(["step", "id", "gradient"]).rename_columns(["t", "key", "grad"]) for b in LOG[:7]]
    roles = ["--column", "id=key", "--column", "gradient=grad", "--column", "step=t"]
    assert replay(*roles, "--table", "user", sources=[other])["state_hash"] == replay(sources=[LOG[:7]])["state_hash"]


def test_standard_input_equals_the_file(replay, tmp_path, call, monkeypatch):
    report = replay()
    content = (tmp_path / "0.arrows").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert call(0, "replay", tmp_path / "tables.pbtxt", "-")[1]["state_hash"] == report["state_hash"]


def test_the_report_for_people_has_the_same_numbers(replay, tmp_path, capsys):
    report = replay("--num-required", 3)
    argv = ["replay", str(tmp_path / "tables.pbtxt"), str(tmp_path / "0.arrows"), "--num-required", "3"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    assert f"state     {report['state_hash']}\n" in text.out
    assert "frames    8: 2 steps, 2 pending (--flush would apply them)\n" in text.out
    assert "table     user: 28 rows of 7 ids\n" in text.out
    assert f"wrote     {tmp_path / 'out' / 'item.parquet'}\n" in text.out
