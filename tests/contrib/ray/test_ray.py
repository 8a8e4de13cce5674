"""The stage function in Ray Data, on one machine with two workers; where Ray is installed."""

import logging
import os
import tempfile

import pyarrow as pa
import pyarrow.parquet
import pytest
from checkpoints import LOG, config_of, engine_of

import penstock as ps

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)
pytest.importorskip("ray.data", exc_type=ImportError)

# Warnings of Ray are not errors of these tests.
pytestmark = pytest.mark.filterwarnings("default")
ORDER = [("step", "ascending"), ("table", "ascending"), ("id", "ascending")]


@pytest.fixture(scope="module")
def workers():
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.shutdown()  # a command that an earlier test ran in this process leaves its connection
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True  # a data set takes it up when it is made
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture
def dataset(workers, tmp_path):
    """The log in four Parquet files of whole frames, each row with its number."""
    table = pa.Table.from_batches(LOG)
    table = table.append_column("n", pa.array(range(table.num_rows)))
    rows = table.num_rows // 4
    assert rows % LOG[0].num_rows == 0
    for number in range(4):
        pa.parquet.write_table(table.slice(number * rows, rows), tmp_path / f"{number}.parquet")
    return ray.data.read_parquet(str(tmp_path))


def plain(deltas):
    """Rows in one order, text as text: what went through Ray has lost the dictionary, or has it anew."""
    columns = {name: deltas[name].combine_chunks() for name in ("table", "step", "id", "row", "accumulators")}
    columns["table"] = columns["table"].cast(pa.utf8())
    return pa.table(columns).sort_by(ORDER).to_pydict()


def test_two_workers_a_table_each_make_the_deltas_of_a_plain_replay(dataset):
    function = ps.stage_fn(config_of(), num_required=3, slots=True, threads=1)

    def deltas_of(rows):
        deltas = function(rows.sort_by("n"))
        return deltas.append_column("worker", pa.array([os.getpid()] * deltas.num_rows, pa.int64()))

    grouped = dataset.groupby("table").map_groups(deltas_of, batch_format="pyarrow")
    deltas = pa.concat_tables(ray.get(grouped.to_arrow_refs()), promote_options="permissive")
    assert plain(deltas) == plain(engine_of().stage(LOG, slots=True).read_all())
    assert os.getpid() not in deltas["worker"].to_pylist()


def test_one_actor_takes_the_files_in_order_and_continues_from_block_to_block(dataset):
    deltas = dataset.map_batches(
        ps.BlockStage,
        fn_constructor_args=(config_of(),),
        fn_constructor_kwargs={"num_required": 3, "slots": True, "threads": 1},
        batch_format="pyarrow",
        batch_size=None,
        concurrency=1,
    )
    staged = pa.concat_tables(ray.get(deltas.to_arrow_refs()), promote_options="permissive")
    assert plain(staged) == plain(engine_of().stage(LOG, slots=True).read_all())
