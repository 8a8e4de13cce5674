"""Messages of a topic that pass in runs give what they give one by one: states, positions, reports."""

import numpy as np
import pyarrow as pa
import pytest
from brokers import ListedMessages, message_of

import penstock as ps
from penstock.core.observers import StepObserver
from penstock.io.partitions.partition_source import PartitionSource

ROWS, DIM = 20, 2


class EveryStep(StepObserver):
    """An observer that needs every step."""


def messages_of(seed, has_bad, num=40):
    """Frames of 1 to 5 rows, one stale, one without rows. has_bad : two have an id that is no row"""
    rng, messages = np.random.default_rng(seed), []
    for number in range(num):
        rows = 0 if number == 11 else int(rng.integers(1, 6))
        ids = rng.integers(0, ROWS, rows)
        if has_bad and number in (17, 18):
            ids[0] = ROWS
        gradient = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * DIM).astype(np.float32), DIM)
        steps = pa.array(np.full(rows, 0 if number == 23 else 100 + number))
        messages.append(message_of(pa.record_batch({"id": ids, "gradient": gradient, "step": steps})))
    return messages


def outcome(one_by_one, num_partitions, folder=None, limits=(None,), on_bad_row="drop", **options):
    """What runs of all messages leave behind, each with a limit."""
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, optimizer=ps.Adagrad(0.1), name="t")])
    observer, reports = EveryStep(), []
    for limit in limits:
        engine = ps.Engine(config) if not reports or folder is None else ps.Engine.restore(folder)
        if one_by_one:
            engine.core.observe(observer)
        sources = [
            PartitionSource(ListedMessages(n, messages_of(n, on_bad_row == "drop"), 7), 1.0)
            for n in range(num_partitions)
        ]
        commits = {} if folder is None else {"checkpoint": folder, "resume": bool(reports)}
        report = engine.run(sources, limit=limit, on_bad_row=on_bad_row, **commits, **options).to_dict()
        reports.append(report | dict.fromkeys(("seconds", "rows_per_s", "held_bytes")))
    return engine.state_hash(), engine.core.gate.get_state(), engine.session.positions.get_state(), reports


@pytest.mark.parametrize(("num_partitions", "merge"), [(1, None), (1, "round"), (3, "round")])
@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_replay_of_a_topic_gives_what_its_frames_give_one_by_one(num_partitions, merge, on_bad_row):
    options = {"merge": merge, "on_bad_row": on_bad_row}
    assert outcome(False, num_partitions, **options) == outcome(True, num_partitions, **options)


@pytest.mark.parametrize("merge", [None, "round"])
def test_messages_of_one_partition_pass_together(passed, merge):
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, optimizer=ps.SGD(0.1), name="t")])
    good = [message for number, message in enumerate(messages_of(0, False)) if number not in (11, 23)]
    ps.Engine(config).run(PartitionSource(ListedMessages(0, good, 7), 1.0), merge=merge)
    assert max(passed) == len(good) - 1  # the first one is read by pyarrow


@pytest.mark.parametrize("num_partitions", [1, 2])
@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_replay_continues_at_the_message_after_the_last_one_applied(tmp_path, num_partitions, on_bad_row):
    limits, options = (5, 19, None), {"merge": "round", "on_bad_row": on_bad_row}
    actual = outcome(False, num_partitions, tmp_path / "runs", limits, **options)
    assert actual == outcome(True, num_partitions, tmp_path / "frames", limits, **options)
    assert actual[0] == outcome(True, num_partitions, **options)[0]
