"""``penstock plan``: its table and JSON, its flags, its errors and exit codes."""

import re

import pytest
from cli import ONE_TABLE
from dynamic import churning_steps, config_of, log_of
from ipc import log, write

import penstock as ps

FIELDS = ("keys", "admitted", "expired", "evicted", "returned", "rejected", "waiting", "unadmitted_rows")


@pytest.fixture
def files(tmp_path):
    """A configuration and a log, as words."""
    config_of(ps.Dynamic(min_count=2, expire_after=9, evict="lru"), rows=48).save(tmp_path / "tables.pbtxt")
    batch = log_of(churning_steps(160))
    (tmp_path / "log.arrows").write_bytes(log([batch.slice(start, 240) for start in range(0, batch.num_rows, 240)]))
    return tmp_path / "tables.pbtxt", tmp_path / "log.arrows"


def test_one_choice_says_what_the_replay_says(files, call):
    for flags in ([], ["--num-required", "3", "--flush"], ["--limit", "50", "--seed", "7"]):
        _, plan = call(0, "plan", *files, *flags)
        _, report = call(0, "replay", *files, *flags)
        (choice,) = plan["choices"]
        assert choice["full"] is None
        table = choice["tables"]["user"]
        assert {name: table[name] for name in FIELDS} == {
            name: report["tables"]["user"]["keys"][name] for name in FIELDS
        }
        for name in ("rows", "frames", "stale", "pending", "steps"):
            assert plan[name] == report[name]
        assert (table["share"], table["standard_error"]) == (1, {})
        assert table["host_bytes"] == report["tables"]["user"]["keys"]["directory_bytes"]
        assert table["device_bytes"] == 48 * 4 * 4 * 2


def test_the_table_has_a_line_per_choice(files, call):
    text, plan = call(0, "plan", *files, "--capacity", "24,1000", "--min-count", "1,2", "--expire", "never,5")
    lines = text[text.index("table ") :].splitlines()
    assert re.split(r"\s{2,}", lines[0].strip())[:5] == ["table", "capacity", "min count", "expire", "keys"]
    assert len(lines) == 9
    assert [re.split(r"\s{2,}", line)[1:4] for line in lines[1:]] == [
        [capacity, count, after] for capacity in ("24", "1,000") for count in "12" for after in ("never", "5")
    ]
    for line, choice in zip(lines[1:], plan["choices"], strict=True):
        table = choice["tables"]["user"]
        numbers = [
            f"{table[name]:,}" for name in ("keys", "unadmitted_rows", "evicted", "returned", "expired", "rejected")
        ]
        assert re.split(r"\s{2,}", line)[4:10] == numbers
    assert re.match(r"rows      3,840 in [\d.]+ s .[\d,]+ rows/s.; ids only\nframes    160: 160 steps\n", text)


def test_a_full_table_is_a_line_and_not_a_failure(tmp_path, call):
    config_of(ps.Dynamic(), rows=1000).save(tmp_path / "tables.pbtxt")
    path = write(tmp_path / "log.arrows", [log_of(churning_steps(160))])
    text, plan = call(0, "plan", tmp_path / "tables.pbtxt", path, "--capacity", "60,1000")
    step = plan["choices"][0]["full"]["step"]
    assert plan["choices"][0]["full"]["problem"].startswith("table 'user': no room for ")
    assert plan["choices"][1]["full"] is None
    assert f"full at step {step}\n" in text
    text, plan = call(0, "plan", tmp_path / "tables.pbtxt", path, "--capacity", "60")
    assert plan["notes"] == ["every choice ends in a full table; the rest of the sources was not read"]
    _, plan = call(0, "plan", tmp_path / "tables.pbtxt", path, "--capacity", "60,61")  # whose steps are taken together
    assert (plan["notes"], plan["frames"]) == (["every choice ends in a full table"], 160)


def test_a_sample_prints_standard_errors(tmp_path, call):
    config_of(ps.Dynamic(evict="lru"), rows=1 << 17).save(tmp_path / "tables.pbtxt")
    path = write(tmp_path / "log.arrows", [log_of([range(step * 999, step * 999 + 5000) for step in range(4)])])
    text, plan = call(0, "plan", tmp_path / "tables.pbtxt", path, "--sample", "0.5")
    table = plan["choices"][0]["tables"]["user"]
    assert table["share"] == 0.5
    assert 7000 < table["keys"] < 9000
    assert f"{table['keys']:,} ± {table['standard_error']['keys']:,.0f}  " in text
    assert "1/2 of the keys" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--capacity", "0"], "argument --capacity: expected at least 1, got 0"),
        (["--capacity", "5,x"], "argument --capacity: expected a whole number, got 'x'"),
        (["--min-count", "0"], "argument --min-count: expected at least 1, got 0"),
        (["--expire", "soon"], "argument --expire: expected a whole number, got 'soon'; or never"),
        (["--sample", "0"], "argument --sample: expected a share above 0, up to 1, got '0'"),
        (["--table", "usr"], "table 'usr' is not in the configuration (user); did you mean 'user'?"),
        (["--column", "grad=x"], "column role 'grad': expected one of id, gradient"),
    ],
)
def test_flags_out_of_range_are_usage_errors(files, refused, flags, message):
    assert message in refused(2, "plan", *files, *flags)


def test_errors_are_those_of_a_replay(files, tmp_path, refused):
    config, path = files
    assert "the stream was cut inside this batch" in refused(3, "plan", config, _cut(path))
    assert "missing.arrows" in refused(3, "plan", config, tmp_path / "missing.arrows")
    (tmp_path / "static.pbtxt").write_text(ONE_TABLE)
    message = refused(4, "plan", tmp_path / "static.pbtxt", path)
    assert "no table of the configuration is dynamic or has the placement CACHED: there is nothing to plan" in message


def _cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path
