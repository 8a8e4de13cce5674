"""The table of options: a command has the flags of its mode, and no others."""

import pytest
from checkpoints import config_of

import penstock as ps
from penstock.cli.command_line import COMMAND_OF
from penstock.cli.main import parser
from penstock.contrib.ray.job import Job
from penstock.model.command_options import RunOptions, options_of

FLAGS = [option for option in options_of().values() if option.flag is not None]


@pytest.mark.parametrize("mode", ["run", "passes", "job"])
def test_a_command_has_the_flags_of_its_mode_and_says_which_commands_have_another(refused, mode):
    command = COMMAND_OF[mode]
    for option in FLAGS:
        if mode not in option.modes:
            line = refused(2, command, "c.pbtxt", "log.arrows", option.flag_name)
            assert f"unknown flag {option.flag_name}; it is a flag of penstock " in line
            assert f" penstock {command}," not in line
        else:
            assert option.flag_name in parser([command]).commands[command].flags()


@pytest.mark.parametrize("name", sorted(options_of(None, RunOptions).keys() - options_of("job")))
def test_a_job_refuses_the_keywords_of_other_modes(name):
    with pytest.raises(ps.UsageError, match=f"^Job: unknown argument '{name}'"):
        Job(config_of(), ["log.arrows"], shares=1, **{name: None})


def test_spaces_between_the_names_of_workers_are_no_part_of_them():
    arguments = parser(["replay"]).parse_args(["replay", "c.pbtxt", "log.arrows", "--workers", "a, b"])
    assert arguments.workers == ("a", "b")
