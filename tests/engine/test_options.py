"""The table of options: a flag works in the modes that it lists, and is refused with others."""

import pytest
from checkpoints import batch, config_of
from ipc import write

import penstock as ps
from penstock.options import JOB_CONCERNS, options_of
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


@pytest.mark.parametrize("name", sorted(options_of(None, *JOB_CONCERNS).keys() - options_of("job")))
def test_a_job_refuses_the_keywords_of_other_modes(name):
    with pytest.raises(ps.UsageError, match=f"^Job: unknown argument '{name}'"):
        Job(config_of(), ["log.arrows"], shares=1, **{name: None})
