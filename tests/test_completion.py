"""Completion as the shells do it: the script is read by a real shell, which then completes."""

import shutil
import subprocess

import pytest

from penstock.cli import main
from penstock.cli.main import COMMANDS, parser


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def need(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.fixture
def completed(capsys, tmp_path):
    """completed("penstock", "replay", "--re") → what bash offers for the last word."""
    need("bash")

    def complete(*words):
        asked = f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}"
        tell = 'eval "$(complete -p penstock | sed "s/.*-F \\([^ ]*\\) .*/\\1/")"; printf "%s\\n" "${COMPREPLY[@]}"'
        text = f"{script('bash', capsys)}\n{asked}\n{tell}\n"
        done = subprocess.run(
            ["bash", "--norc", "-eu"], input=text, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


def test_bash_completes_commands(completed):
    assert completed("penstock", "re") == ["replay"]
    assert set(completed("penstock", "")) == set(COMMANDS)
    assert completed("penstock", "nothing") == []


def test_bash_completes_the_flags_of_the_command(completed):
    assert completed("penstock", "replay", "--redu") == ["--reduction"]
    assert set(completed("penstock", "replay", "a.pbtxt", "--")) == {
        flag for flag in parser().commands["replay"].flags() if flag.startswith("--")
    }
    assert completed("penstock", "diff", "--re") == []


def test_bash_completes_the_values_of_a_flag_that_has_some(completed):
    assert completed("penstock", "replay", "--reduction", "") == ["mean", "sum"]
    assert completed("penstock", "export", "run1", "out", "--format", "s") == ["safetensors"]
    assert completed("penstock", "completion", "z") == ["zsh"]


def test_where_nothing_of_ours_fits_bash_offers_file_names(completed, capsys):
    assert completed("penstock", "replay", "lo") == []
    assert "\ncomplete -o default -F _penstock penstock\n" in script("bash", capsys)


def test_zsh_reads_its_script_and_adds_what_fits(capsys, tmp_path):
    need("zsh")
    # compadd and _files work only while zsh completes: they are stood in for, and say what they were given.
    head = "compdef() { :; }\ncompadd() { print -- $@ }\n_files() { print files }\n"

    def added(*words):
        text = f"{head}{script('zsh', capsys)}\nwords=({' '.join(words)}); CURRENT={len(words)}; _penstock\n"
        done = subprocess.run(["zsh", "-f"], input=text, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    assert set(added("penstock", '""')) == {"--", *COMMANDS}
    assert added("penstock", "replay", "--reduction", '""') == ["--", "mean", "sum"]
    assert added("penstock", "replay", "--re") == ["--", *parser().commands["replay"].flags()]
    assert added("penstock", "replay", "lo") == ["files"]


def test_fish_reads_its_script_and_completes(capsys, tmp_path):
    need("fish")
    path = tmp_path / "penstock.fish"
    path.write_text(script("fish", capsys))

    def complete(line):
        ask = f"source {path}; complete -C '{line}'"
        done = subprocess.run(["fish", "-N", "-c", ask], capture_output=True, text=True, env={"HOME": str(tmp_path)})
        assert done.stderr == ""
        return [offered.split("\t")[0] for offered in done.stdout.splitlines()]

    assert complete("penstock re") == ["replay"]
    assert complete("penstock replay --redu") == ["--reduction"]
    assert complete("penstock replay --reduction ") == ["mean", "sum"]
