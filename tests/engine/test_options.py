"""The table of options: a flag works in the modes that it lists, and is refused with others."""

import pytest
from checkpoints import batch, config_of
from ipc import write

import penstock as ps
from penstock.options import JobOptions, RunOptions, StageOptions, options_of
from penstock.shares.ray.job import Job

MODES = {"job": ["--ray", "auto", "--shares", "2"], "passes": ["--passes", "2"], "run": []}
VALUES = {"HOST:PORT": "127.0.0.1:0", "K|auto": "auto", "S": "7", "MB": "7", "N": "7", "M": "7", "BYTES": "7"}
# Their values select a mode; --merge round is the order of every job.
CHECKED_ELSEWHERE = {"passes", "address", "merge"}


def words_of(option):
    flag = option.flag
    value = flag.choices[0] if flag.choices else VALUES.get(flag.metavar, flag.metavar)
    return [option.flag_name, value] if value else [option.flag_name]


def outside(mode):
    """The flags of a replay that do not work in a mode."""
    for name, option in options_of().items():
        of_replay = option.flag is not None and option.modes & MODES.keys() and name not in CHECKED_ELSEWHERE
        if of_replay and mode not in option.modes:
            yield pytest.param(mode, option, id=f"{option.flag_name} {mode}")


@pytest.mark.parametrize(("mode", "option"), [case for mode in MODES for case in outside(mode)])
def test_a_flag_that_does_not_work_in_a_mode_is_refused(tmp_path, refused, mode, option):
    config_of().save(tmp_path / "c.pbtxt")
    words = ["replay", tmp_path / "c.pbtxt", write(tmp_path / "0.arrows", [batch(0)]), *MODES[mode], *words_of(option)]
    line = refused(2, *words)
    wanted = f"{option.flag_name}: not with {MODES[mode][0]}" if MODES[mode] else f"{option.flag_name}: belongs to "
    assert wanted in line


@pytest.mark.parametrize("name", sorted(options_of(None, RunOptions).keys() - options_of("job")))
def test_a_job_refuses_the_keywords_of_other_modes(name):
    with pytest.raises(ps.UsageError, match=f"^Job: unknown argument '{name}'"):
        Job(config_of(), ["log.arrows"], shares=1, **{name: None})


def test_an_option_has_one_flag_one_default_and_a_mode():
    names = [option.flag_name for option in options_of().values() if option.flag is not None]
    assert len(set(names)) == len(names)
    assert all(option.modes for option in options_of().values())


@pytest.mark.parametrize(("mode", "kind"), [("run", RunOptions), ("stage", StageOptions), ("job", JobOptions)])
def test_the_keywords_of_a_call_work_in_its_mode(mode, kind):
    assert options_of(None, kind) == options_of(mode, kind)


def test_a_keyword_of_stage_is_one_of_run():
    assert options_of("run", RunOptions).keys() - options_of("stage", StageOptions) == {"deltas"}
    assert options_of("stage", StageOptions).keys() - options_of("run", RunOptions) == set()
