"""The comparison of skipped tests over the environments of CI."""

import pytest
import skips

FIRST = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_ran"/>
<testcase classname="tests.test_a" name="test_of[a library]"><skipped type="pytest.skip" message="no polars">x</skipped>
</testcase>
<testcase classname="tests.test_a" name="test_wrong"><skipped type="pytest.xfail" message="known"/></testcase>
<testcase classname="tests.test_a" name="test_shell"><skipped message="zsh is not installed"/></testcase>
<testcase classname="" name="tests.test_ray"><skipped message="collection skipped">no ray</skipped></testcase>
</testsuite></testsuites>"""
SECOND = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_of[a library]"/>
<testcase classname="tests.test_a" name="test_shell"><skipped message="zsh is not installed"/></testcase>
<testcase classname="tests.test_ray" name="test_actor"/>
</testsuite></testsuites>"""


@pytest.fixture
def files(tmp_path):
    for name, text in (("first.xml", FIRST), ("second.xml", SECOND)):
        (tmp_path / name).write_text(text)
    return [str(tmp_path / name) for name in ("first.xml", "second.xml")]


def test_the_skipped_tests_are_listed_as_arguments_of_pytest(files, capsys):
    assert skips.main("list", files[0]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tests/test_a.py::test_of[a library]",
        "tests/test_a.py::test_shell",
        "tests/test_ray.py",
    ]


def test_a_test_that_one_environment_ran_may_be_skipped_in_the_others(files, capsys):
    assert skips.main("check", *files) == 0
    assert "1 tests are skipped in every environment; 0 of them" in capsys.readouterr().out


def test_a_test_that_every_environment_skips_is_an_error_unless_its_reason_is_listed(files, capsys):
    assert skips.main("check", files[0]) == 1
    *faults, summary = capsys.readouterr().out.splitlines()
    assert faults == [
        "tests/test_a.py::test_of[a library]: no polars x",
        "tests/test_ray.py: collection skipped no ray",
    ]
    assert "3 tests are skipped in every environment; 2 of them are not listed" in summary


def test_every_listed_reason_has_an_explanation():
    lines = [line for line in skips.ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    assert all("  # " in line for line in lines)
    assert len(skips.allowed_reasons()) == len(lines)
