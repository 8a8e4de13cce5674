"""Completion as the shells do it: the script is read by a real shell, which then completes."""

import os
import shlex
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


def test_bash_completes_file_names_where_a_file_is_expected(completed, tmp_path):
    (tmp_path / "log.arrows").touch()
    assert completed("penstock", "replay", "lo") == ["log.arrows"]
    assert completed("penstock", "replay", "tables.pbtxt", "--checkpoint", "lo") == ["log.arrows"]
    assert completed("penstock", "replay", "--reduction", "lo") == []
    assert completed("penstock", "replay", "--limit", "lo") == []


def test_zsh_reads_its_script_and_completes(capsys, tmp_path):
    need("zsh")
    # _arguments works only while zsh completes: a stand-in prints the specifications that it gets.
    head = "compdef() { :; }\n_arguments() { print -rl -- $@; line=($words[2]); state=penstock }\n"

    def specified(*words):
        text = f"{head}eval {shlex.quote(script('zsh', capsys))}\nwords=({' '.join(words)}); _shtab_penstock\n"
        done = subprocess.run(["zsh", "-f"], input=text, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout

    offered = specified("penstock", "replay", "lo")
    for flag in parser().commands["replay"].flags():
        assert flag in offered
    assert ":(mean sum)" in offered
    assert ":_files" in offered
    assert ":HOST\\:PORT:" in offered


def test_fish_reads_its_script_and_completes(capsys, tmp_path):
    need("fish")
    path = tmp_path / "penstock.fish"
    path.write_text(script("fish", capsys))

    def complete(line):
        ask = f"source {path}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "-N", "-c", ask], capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)}
        )
        assert done.stderr == ""
        return [offered.split("\t")[0] for offered in done.stdout.splitlines()]

    assert complete("penstock re") == ["replay"]
    assert complete("penstock replay --redu") == ["--reduction"]
    assert complete("penstock replay --reduction ") == ["mean", "sum"]
    assert complete(f"penstock replay {tmp_path}/pen") == [str(path)]
