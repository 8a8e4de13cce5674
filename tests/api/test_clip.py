"""Clipping of the gradients of a step to a global norm, and of each row to a norm."""

import numpy as np
import pyarrow as pa
import pytest
from cli import error_line

import penstock as ps
from penstock.contrib.passes.multi_pass import MultiPass, PassOptions

ROWS, DIM, STEPS = 40, 12, 8
KINDS = {
    "device": {},
    "host": {"placement": ps.Placement("host")},
    "cached": {"placement": ps.Placement("cached", device_bytes=2000)},
    "dynamic": {"dynamic": ps.Dynamic()},
    "bfloat16": {"dtype": "bfloat16"},
}
CLIPS = {"global": ps.Clip(global_norm=3.0), "row": ps.Clip(row_norm=3.0), "both": ps.Clip(4.0, 3.0)}


def config_of(clip, optimizer=None, **more):
    word = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), name="word", **more)
    user = ps.TableConfig(ROWS, 3, ps.Constant(0.0), name="user")
    return ps.EmbeddingConfig.from_tables([word, user], optimizer or ps.SGD(1.0), clip=clip)


def frame(step, scale=1.0):
    rng = np.random.default_rng(step)
    return {
        name: (rng.permutation(ROWS)[:6], (rng.normal(size=(6, dim)) * scale).astype(np.float32))
        for name, dim in (("word", DIM), ("user", 3))
    }


def log_of(steps, workers=1):
    """Large gradients in odd steps, small ones in even steps."""
    rows = []
    for step in steps:
        for worker in range(workers):
            for name, (ids, grads) in frame([step, worker], (0.01, 5.0)[step % 2]).items():
                pairs = zip(ids.tolist(), grads.tolist(), strict=True)
                of_frame = {"table": name, "step": step, "contributor": f"w{worker}"}
                rows += [{**of_frame, "id": row, "gradient": grad} for row, grad in pairs]
    return pa.Table.from_pylist(rows)


def clipped(gradients, clip):
    """The gradients of a step as they are applied, by table, in NumPy's float64."""
    grads = {name: rows.astype(np.float64) for name, (_, rows) in gradients.items()}
    if clip.row_norm is not None:
        for name, rows in grads.items():
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            grads[name] = rows * np.minimum(1, clip.row_norm / (norms + 1e-6))
    if clip.global_norm is not None:
        norm = np.sqrt(sum((rows**2).sum() for rows in grads.values()))
        grads = {name: rows * min(1, clip.global_norm / (norm + 1e-6)) for name, rows in grads.items()}
    return grads


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_a_step_applies_the_gradients_scaled_down(clip, more):
    engine, gradients = ps.Engine(config_of(clip, **more)), frame(0)
    engine.apply(gradients)
    expected = clipped(gradients, clip)
    for name, (ids, _) in gradients.items():
        np.testing.assert_allclose(
            -engine.lookup(name, ids), expected[name], rtol=8e-3 if "dtype" in more and name == "word" else 1e-6
        )
    counters = engine.core.counters
    norms = np.concatenate([np.linalg.norm(grads, axis=1) for _, grads in gradients.values()])
    assert counters.clipped_rows == (0 if clip.row_norm is None else (norms > 3.0).sum())
    assert counters.clipped_steps == (clip.global_norm is not None)


def test_the_norm_is_that_of_the_sums_and_means_of_a_step():
    table = ps.TableConfig(ROWS, 2, ps.Constant(0.0), ps.SGD(1.0), name="user")
    for reduction, row in (("sum", [-0.6, -0.8]), ("mean", [-0.3, -0.4])):
        config = ps.EmbeddingConfig.from_tables([table], num_required=2, reduction=reduction, clip=ps.Clip(1.01))
        engine = ps.Engine(config)
        for _ in range(2):
            engine.apply({"user": ([1], [[0.3, 0.4]])})
        np.testing.assert_array_equal(engine.lookup("user", [1]), np.array([row], np.float32))
        assert engine.core.counters.clipped_steps == 0


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_bits_depend_on_no_threads_batches_order_or_interruption(tmp_path, more):
    log, config = log_of(range(STEPS)), config_of(CLIPS["both"], ps.Adagrad(0.1), **more)
    engine = ps.Engine(config)
    report = engine.run(log)
    assert (report.clipped_steps, report.clipped_rows) == (STEPS // 2, 47)
    last = frame([STEPS - 1, 0], 5.0)
    assert report.gradient_norms == pytest.approx({name: np.linalg.norm(grads) for name, (_, grads) in last.items()})
    for threads in (1, 3, 8):
        again = ps.Engine(config, threads=threads)
        again.run(pa.Table.from_batches(log.to_batches(max_chunksize=5)))
        assert again.state_hash() == engine.state_hash()
    backwards = ps.Engine(config)
    for step in range(STEPS):
        given = frame([step, 0], (0.01, 5.0)[step % 2])
        order = np.random.default_rng(step).permutation(6)
        backwards.apply({name: (given[name][0][order], given[name][1][order]) for name in ("user", "word")})
    if "dynamic" not in more:  # the order of new keys is a part of that state
        assert backwards.state_hash() == engine.state_hash()
    np.testing.assert_array_equal(backwards.lookup("word", range(ROWS)), engine.lookup("word", range(ROWS)))
    for stop in (1, 4, 7):
        folder = tmp_path / str(stop)
        ps.Engine(config).run(log, limit=stop, checkpoint=folder, every=1)
        resumed = ps.Engine.restore(folder)
        report = resumed.run(log, checkpoint=folder, every=1, resume=True)
        assert resumed.state_hash() == engine.state_hash()
        assert (report.clipped_steps, resumed.config.clip) == (STEPS // 2 - stop // 2, config.clip)


def test_rounds_clip_the_sum_of_all_workers(tmp_path):
    config, log = config_of(CLIPS["both"]), log_of(range(STEPS), workers=2)
    engine = ps.Engine(config, workers=["w0", "w1"])
    report = engine.run(log)
    assert (report.steps, report.clipped_steps) == (STEPS, STEPS // 2)
    ps.Engine(config, workers=["w0", "w1"]).run(log, limit=5, checkpoint=tmp_path)
    resumed = ps.Engine.restore(tmp_path)
    resumed.run(log, checkpoint=tmp_path, resume=True)
    assert resumed.state_hash() == engine.state_hash()


def test_separate_frames_of_a_step_are_clipped_together():
    optimizer = ps.SGD(1.0, use_gradient_accumulation=False)
    engine = ps.Engine(config_of(CLIPS["global"], optimizer), num_required=2)
    engine.apply({"word": ([1], [[3.0] + [0.0] * (DIM - 1)])})
    engine.apply({"word": ([1, 2], [[4.0] + [0.0] * (DIM - 1), [0.0] * DIM])})
    np.testing.assert_allclose(-engine.lookup("word", [1])[0, 0], 7 * 3 / 5, rtol=1e-6)


def test_a_configuration_without_it_has_none_and_keeps_its_native_way():
    config = config_of(None)
    assert config.clip is None
    assert not config.to_engine_proto().HasField("clip")
    assert ps.Engine(config).core.counts_native
    assert not ps.Engine(config_of(CLIPS["row"])).core.counts_native


def test_a_file_has_it(tmp_path):
    config = config_of(CLIPS["both"])
    for name in ("config.pbtxt", "config.pb"):
        config.save(tmp_path / name)
        assert ps.EmbeddingConfig.load(tmp_path / name).clip == ps.Clip(4.0, 3.0)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), float("inf"), 1e39, True, "1"])
def test_a_norm_is_a_finite_number_above_0(norm):
    with pytest.raises(ps.ConfigError, match=r"^clip: row_norm is .*; it must be a finite number above 0$"):
        ps.Clip(row_norm=norm)


def test_a_clip_has_a_norm():
    with pytest.raises(ps.ConfigError, match="neither global_norm nor row_norm"):
        ps.Clip()
    with pytest.raises(ps.ConfigError, match=r"clip must be a Clip, got 1\.0"):
        config_of(1.0)


def test_a_file_with_a_bad_norm_is_one_line(tmp_path, capsys):
    path = tmp_path / "config.pbtxt"
    config_of(CLIPS["global"]).save(path)
    path.write_text(path.read_text().replace("global_norm: 3", "global_norm: 0"))
    line = error_line(capsys, 4, "replay", path, tmp_path / "none.arrows")
    assert "clip: global_norm is 0; it must be a finite number above 0" in line


def test_what_has_a_part_of_the_gradients_refuses_it(tmp_path):
    config = config_of(CLIPS["global"])
    with pytest.raises(ps.ConfigError, match="clip: an engine with a share of the rows knows no norms of gradients"):
        ps.Engine(config, share=(0, 2))
    with pytest.raises(ps.ConfigError, match="clip: a replay in passes knows no norms of gradients"):
        MultiPass(config, ["log.arrows"], None, PassOptions(checkpoint=tmp_path, passes=2))
