"""Metrics: what a scrape says during a run, and that it ends as the report does."""

import argparse
import http.client
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from dynamic import log_of
from limits import HANG_S
from prometheus_client import CollectorRegistry
from scrapes import (
    METRIC_OF,
    NO_NUMBERS,
    UNITS,
    batches,
    config_of,
    described,
    documented,
    parsed,
    same_as_report,
    scraped,
)

import penstock as ps
from penstock.contrib.pages.http_server import PLAIN, TEXT, Server
from penstock.contrib.pages.metrics import SERVICE_METRICS, Metrics, metrics_of, plain
from penstock.contrib.pages.monitoring import Watching
from penstock.core.telemetry import MetricsSnapshot


def test_a_scrape_counts_frames_during_a_run_and_equals_the_report_at_its_end():
    engine = ps.Engine(config_of(), num_required=2)
    metrics = Metrics(engine)
    server, during = Server(("127.0.0.1", 0), {"/metrics": (TEXT, metrics.text)}), []

    def watched():
        for batch in batches():
            during.append(scraped(server.url + "/metrics"))
            yield batch

    try:
        report = engine.run(watched(), on_bad_row="drop").to_dict()
        after = scraped(server.url + "/metrics")
    finally:
        server.close()
    rows = [values["penstock_rows_total"] for values in during]
    assert rows == sorted(rows)
    assert 0 == rows[0] < rows[-1] < report["rows"]
    assert any(values["penstock_pending_frames"] == 1 for values in during)
    assert report["stale"] > 0
    assert report["dropped"] == {"id_out_of_range": 12}
    same_as_report(after, report)
    stale = {name: n for name, n in after.items() if name.startswith("penstock_stale_lateness")}
    assert sum(stale.values()) == report["stale"]
    assert after['penstock_table_unique_ratio{table="user"}'] == report["steps"] * 2 / report["tables"]["user"]["rows"]


def test_lateness_is_counted_in_powers_of_two_however_late_one_producer_is():
    engine = ps.Engine(config_of(), num_required=1)
    gradients = {"user": (np.array([3]), np.ones((1, 2), np.float32))}
    for _ in range(100):
        engine.apply(gradients, learning_rates=[0.1])
    for step in range(100):  # 100 to 1 steps behind
        engine.apply(gradients, local_step=step, learning_rates=[0.1])
    values = parsed(Metrics(engine).text())
    name = "penstock_stale_lateness_frames_total"
    assert {sample: n for sample, n in values.items() if sample.startswith(name)} == {
        f'{name}{{steps_behind="{most}"}}': n
        for most, n in {1: 1, 2: 1, 4: 2, 8: 4, 16: 8, 32: 16, 64: 32, 128: 36}.items()
    }
    assert engine.gate.stale.by_lateness[3] == 1  # in Python as it was


def test_head_gets_what_get_does_but_the_body():
    server = Server(("127.0.0.1", 0), {"/metrics": (TEXT, lambda: "one 1\n"), "/health": (PLAIN, refuse)})
    address = server.url.removeprefix("http://")
    try:
        for path, status in (("/metrics", 200), ("/health", 503), ("/other", 404)):
            answers = {}
            for method in ("GET", "HEAD"):
                connection = http.client.HTTPConnection(address, timeout=HANG_S)
                connection.request(method, path)
                answer = connection.getresponse()
                headers = {key: value for key, value in answer.getheaders() if key != "Date"}
                answers[method] = answer.status, headers, answer.read()
                connection.close()
            assert answers["HEAD"] == (status, answers["GET"][1], b""), path
            assert answers["GET"][0] == status
            assert len(answers["GET"][2]) == int(answers["GET"][1]["Content-Length"]) > 0
    finally:
        server.close()


def refuse():
    raise ps.StateError("the device has gone")


def dynamic_table():
    return ps.TableConfig(8, 2, name="key", dynamic=ps.Dynamic(min_count=2, expire_after=3, evict="lru"))


def cached_table():
    return ps.TableConfig(40, 2, name="user", placement=ps.Placement("cached", device_bytes=160))


def test_a_scrape_has_the_names_types_and_labels_of_the_docs_and_no_others(tmp_path):
    more = [dynamic_table(), replace(cached_table(), name="cached")]
    engine = ps.Engine(config_of(*more), num_required=2)
    engine.run(batches(), on_bad_row="drop", checkpoint=tmp_path / "c")
    engine.watch.of_service = lambda: dict.fromkeys(SERVICE_METRICS, 0)  # as a service sets it
    rounds, bounded = ps.Engine(config_of(), workers=2), ps.Engine(config_of(), max_staleness=1)
    frame = {"user": ([1], [[1.0, 1.0]])}
    rounds.apply(frame, local_step=0, contributor="rank-0", learning_rates=[0.1])
    rounds.apply(frame, local_step=1, contributor="rank-1", learning_rates=[0.1])  # absent in step 0
    rounds.apply(frame, local_step=2, contributor="rank-1", learning_rates=[0.1])
    for _ in range(2):
        bounded.apply(frame, local_step=0, learning_rates=[0.1], time=5)  # the second one is late
    table = ps.TableConfig(8, 2, name="user", optimizer=ps.SGD(0.1))
    limited = ps.Engine(ps.EmbeddingConfig.from_tables([table], limit=ps.Limit(2.0)))
    for gradient in [1.0] * 100 + [9.0]:
        limited.apply({"user": ([1], [[gradient, gradient]])}, contributor="rank-0")
    found = described(Metrics(engine).text())
    for other in (rounds, bounded, limited):
        for name, (kind, labels) in described(Metrics(other).text()).items():
            found[name] = kind, labels | found[name][1]
    assert found == documented()
    assert len(documented()) > 30
    assert all(name.endswith(UNITS) for name in documented())


def test_a_scrape_counts_the_keys_of_a_dynamic_table_as_the_report_does():
    tables = [ps.TableConfig(8, 2, name="key", dynamic=dynamic_table().dynamic)]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.1)))
    steps = [[1, 1, 2], [2, 3, 3], *([[i, i, 100 + i] for i in range(4, 20)])]
    report = engine.run([log_of(steps, 2)]).to_dict()
    keys = report["tables"]["key"]["keys"]
    assert keys["admitted"] == 19
    assert keys["expired"] + keys["evicted"] == 19 - keys["keys"] > 0 < keys["expired"]
    assert 0 < keys["load"] == keys["keys"] / 8
    assert keys["unadmitted_rows"] == 17
    same_as_report(parsed(Metrics(engine).text()), report)


def test_a_scrape_counts_the_moves_of_a_cached_table_as_the_report_does():
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([cached_table()], optimizer=ps.Adagrad(0.1)))
    report = engine.run([log_of([[i, i + 1, i + 2] for i in range(20)], 2)]).to_dict()
    cache = report["tables"]["user"]["cache"]
    assert (cache["places"], cache["hits"], cache["up"], cache["down"], cache["bytes"]) == (10, 38, 22, 12, 34 * 16)
    same_as_report(parsed(Metrics(engine).text()), report)


def test_a_collector_goes_into_the_registry_of_a_program():
    engine, registry = ps.Engine(config_of()), CollectorRegistry(auto_describe=True)
    registry.register(Metrics(engine))
    engine.apply({"user": (np.array([3]), np.ones((1, 2), np.float32))}, learning_rates=[0.1])
    assert registry.get_sample_value("penstock_rows_total") == 1
    assert registry.get_sample_value("penstock_table_rows_total", {"table": "user"}) == 1
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Metrics(engine))


def test_every_number_of_the_report_is_a_metric():
    assert set(METRIC_OF) | NO_NUMBERS == set(ps.Report.__dataclass_fields__)
    exposed = set(described(Metrics(ps.Engine(config_of(dynamic_table(), replace(cached_table(), name="c")))).text()))
    for names in METRIC_OF.values():
        assert exposed.issuperset([names] if isinstance(names, str) else names), names


def test_skipped_frames_and_truncated_ids_are_metrics(tmp_path):
    table = ps.TableConfig(9, 2, name="t", combiner="mean")
    features = [ps.FeatureConfig(table, max_sequence_length=2, name="f")]
    options = ps.EmbeddingConfig.from_features(features, batch_size=1, optimizer=ps.SGD(0.1))
    column = pa.StructArray.from_arrays(
        [pa.array([[1], [1, 2, 3]]), pa.array([[1.0] * 4] * 2, pa.list_(pa.float32(), 4))], ["ids", "gradient"]
    )
    source = pa.table({"f": column, "step": pa.array([0, 1])})
    ps.Engine(options).run(source, checkpoint=tmp_path / "c", limit=1)
    engine = ps.Engine.restore(tmp_path / "c")
    report = engine.run(source, checkpoint=tmp_path / "c", resume=True).to_dict()
    assert (report["skipped"], report["truncated"]) == (1, 1)
    same_as_report(parsed(Metrics(engine).text()), report)


def test_health_is_503_and_says_why_once_no_step_can_be_made():
    def fetched(server):
        with urllib.request.urlopen(server.url + "/health", timeout=HANG_S) as answer:
            return answer.read().decode()

    words = {"ui": None, "metrics": "127.0.0.1:0", "metrics_file": None, "report": None, "command": "replay"}
    engine = ps.Engine(config_of())
    with Watching(argparse.Namespace(**words), engine) as watching:
        assert fetched(watching.servers[0]) == "ok, step 0\n"
        engine.core.fail(OSError("the device has gone"))
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            fetched(watching.servers[0])
        with refused.value as answer:
            assert "the device has gone" in answer.read().decode()


def test_a_new_run_begins_anew_and_what_is_applied_without_one_counts(tmp_path):
    engine = ps.Engine(config_of(), num_required=2)
    metrics = Metrics(engine)
    engine.run(batches(), on_bad_row="drop")
    report = engine.run(batches(4), on_bad_row="drop")
    assert metrics.plain()["penstock_rows_total"] == report.rows
    engine.apply({"user": (np.array([3]), np.ones((1, 2), np.float32))}, learning_rates=[0.1])
    assert metrics.plain()["penstock_rows_total"] == report.rows + 1


def test_a_checkpoint_has_an_age_and_a_size(tmp_path):
    engine = ps.Engine(config_of(), num_required=2)
    assert "penstock_checkpoint_bytes" not in Metrics(engine).plain()
    engine.run(batches(), on_bad_row="drop", checkpoint=tmp_path / "run1")
    plain_values = Metrics(engine).plain()
    size = sum(path.stat().st_size for path in (tmp_path / "run1").glob("*.base"))
    assert plain_values["penstock_checkpoint_bytes"] == size
    assert plain_values["penstock_checkpoint_steps"] == engine.global_step
    assert 0 <= plain_values["penstock_checkpoint_age_seconds"] < 60
    assert plain_values["penstock_stage_seconds_total"]["save"] > 0


@pytest.mark.promise("Updates happen in place, and a steady state compiles nothing")
def test_steps_are_timed_and_a_steady_state_compiles_nothing():
    engine = ps.Engine(config_of(), num_required=2)
    metrics = Metrics(engine)
    engine.run(batches(), on_bad_row="drop")
    before = metrics.plain()
    report = engine.run(batches(), on_bad_row="drop")
    after = metrics.plain()
    assert after["penstock_step_seconds_count"] == report.steps
    assert 0 < after["penstock_step_seconds"]["0.5"] <= after["penstock_step_seconds"]["0.99"]
    assert after["penstock_compiles_total"] == before["penstock_compiles_total"]


def test_quantiles_are_values_that_occurred():
    for recent, values in (((), [None] * 3), ([4.0, 2.0, 3.0, 1.0], [2.0, 4.0, 4.0]), ([7.0], [7.0] * 3)):
        shown = plain(metrics_of(MetricsSnapshot(tables={}, recent_s=recent)))["penstock_step_seconds"]
        assert shown == dict(zip(("0.5", "0.9", "0.99"), values, strict=True))


def test_names_of_others_cannot_break_the_format():
    tables = [ps.TableConfig(9, 2, name='a"b\\c\nd')]
    text = Metrics(ps.Engine(ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.1)))).text()
    assert 'penstock_table_rows_total{table="a\\"b\\\\c\\nd"} 0.0\n' in text
