"""``penstock demo``: write a small log with a known answer, replay it and check the result."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from penstock.api.engine import Engine
from penstock.base.flag_values import local_path
from penstock.cli.command_line import Parser, make_devices
from penstock.cli.output import Output, check_writable, say_error, writing
from penstock.cli.replay_report import say_report
from penstock.io.log import LogWriter
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.frames import Float32, Int64
from penstock.model.updates import SGD, Adagrad

EXAMPLE = "penstock demo"
Rows = dict[str, tuple[Int64, Float32]]  # table → (ids, gradients)

WORKERS, STEPS, ROWS = 3, 20, 64
USERS, ITEMS, DIM = 1000, 200, 4
USER_RATE, ITEM_RATE, FIRST_ACCUMULATOR = 0.5, 0.1, 0.1
SHOWN_USER = 7
WIDEST_ULP = 2.0  # equal on a CPU; an accelerator may round differently

SCHEMA = pa.schema(
    [
        pa.field("table", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("contributor", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("gradient", pa.list_(pa.float32(), DIM), nullable=False),
    ]
)


def add(command: Parser) -> None:
    command.add_argument(
        "--dir",
        type=local_path,
        default=Path("penstock-demo"),
        metavar="DIR",
        help="where the files go (default penstock-demo)",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    folder = args.dir
    check_writable(folder)
    config_path, log_path, tables = folder / "tables.pbtxt", folder / "log.arrows", folder / "tables"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config_path)
        frames = write_log(log_path)
    out.say(f"{WORKERS} workers sent {STEPS} steps of sparse gradients to two tables; one frame came too late.")
    out.say(f"$ penstock replay {config_path} {log_path} --num-required {WORKERS} --out {tables}")

    engine = Engine(EmbeddingConfig.load(config_path), make_devices(None), num_required=WORKERS)
    start = {name: engine.retrieve_parameters(name) for name in ("user", "item")}
    report = engine.run(log_path)
    with writing(tables):
        engine.write_tables(tables)
    say_report(out, report)

    expected = plain_numpy(start, frames)
    checks = {name: compare(tables / f"{name}.parquet", expected[name], start[name]["parameters"]) for name in expected}
    checks["counts"] = (report.steps, report.stale, report.pending) == (STEPS, 1, 0)
    before, after = start["user"]["parameters"][SHOWN_USER], engine.lookup("user", [SHOWN_USER])[0]
    out.say(f"user {SHOWN_USER}    {before}")
    out.say(f"  becomes {after}")
    out.say(f"  loop    {expected['user'][SHOWN_USER]}")
    passed = all(checks.values())
    wrong = [name for name, good in checks.items() if not good]
    verdict = "agrees (to 2 ULP a step)" if passed else f"DIFFERS in {', '.join(wrong)}"
    out.say(f"checked   every row of both tables against a plain NumPy loop: {verdict}")
    out.say(f"files     {config_path}, {log_path}, {tables / 'user.parquet'}, {tables / 'item.parquet'}")
    files = [str(p) for p in (config_path, log_path, tables)]
    out.result({"passed": passed, "checks": checks, "files": files, **report.to_dict()})
    if not passed:
        say_error(
            f"the check failed: {', '.join(wrong)}; this is a bug, please report it with your machine and versions"
        )
    return 0 if passed else 1


def write_config(path: Path) -> None:
    """Write a configuration of two tables, as a TensorFlow user would define them."""
    user = TableConfig(USERS, DIM, name="user", optimizer=SGD(USER_RATE))
    item = TableConfig(
        ITEMS, DIM, name="item", optimizer=Adagrad(ITEM_RATE, initial_accumulator_value=FIRST_ACCUMULATOR)
    )
    EmbeddingConfig.from_tables([user, item]).save(path)


def write_log(path: Path) -> list[tuple[int, Rows]]:
    """Write the log. Return its frames as (step, rows); the last frame is stale."""
    rng = np.random.default_rng(20)
    frames = []
    with LogWriter(path, SCHEMA) as log:
        order = [(step, worker) for step in range(STEPS) for worker in range(WORKERS)] + [(0, 1)]
        for step, worker in order:
            rows = {name: some_rows(rng, size) for name, size in (("user", USERS), ("item", ITEMS))}
            frames.append((step, rows))
            log.write(frame_batch(log.schema, step, worker, rows))
    return frames


def some_rows(rng: np.random.Generator, size: int) -> tuple[Int64, Float32]:
    """Return ids of shape [ROWS], skewed so that they repeat, and gradients of shape [ROWS, DIM]."""
    ids = np.minimum(rng.zipf(1.3, ROWS) - 1, size - 1)
    return ids, rng.standard_normal((ROWS, DIM), np.float32)


def frame_batch(schema: pa.Schema, step: int, worker: int, rows: Rows) -> pa.RecordBatch:
    names = [name for name, (ids, _) in rows.items() for _ in ids]
    columns = {
        "table": names,
        "step": [step] * len(names),
        "contributor": [f"worker-{worker}"] * len(names),
        "id": np.concatenate([ids for ids, _ in rows.values()]),
        "gradient": [row for _, grads in rows.values() for row in grads],
    }
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def plain_numpy(start: dict[str, dict[str, Float32]], frames: list[tuple[int, Rows]]) -> dict[str, Float32]:
    """Compute the expected tables step by step, without the engine."""
    tables = {name: state["parameters"].copy() for name, state in start.items()}
    accumulators = start["item"]["accumulators"].copy()
    for step in range(STEPS):
        step_rows = [rows for frame_step, rows in frames[: STEPS * WORKERS] if frame_step == step]
        for name, table in tables.items():
            sums, num_frames = np.zeros_like(table), np.zeros((len(table), 1), np.float32)
            for rows in step_rows:
                ids, grads = rows[name]
                np.add.at(sums, ids, grads)
                num_frames[np.unique(ids)] += 1
            g = sums / np.maximum(num_frames, 1)  # 0 for a row without gradients, which changes nothing
            if name == "user":
                table -= np.float32(USER_RATE) * g
            else:
                accumulators += g * g
                table -= np.float32(ITEM_RATE) * g / np.sqrt(accumulators)
    return tables


def compare(path: Path, expected: Float32, start: Float32) -> bool:
    """Return whether the file's rows equal the loop's within WIDEST_ULP of rounding per step."""
    got = np.stack(pa.parquet.read_table(path)["row"].to_numpy())
    scale = np.maximum(np.maximum(np.abs(expected), np.abs(start)), 1.0)
    return bool((np.abs(got - expected) <= WIDEST_ULP * STEPS * np.spacing(scale.astype(np.float32))).all())
