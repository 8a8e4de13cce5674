"""The README's Python runs as it stands, its commands exist, and its links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

from penstock.cli.main import COMMANDS, parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readmes_python_runs_from_top_to_bottom(capsys):
    names = {}
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "3 rows, 1 steps, 0 stale frames" in printed
    assert "apply('item'): row 1, column 'id': expected 0 <= id < 5000" in printed


class Untimed(doctest.OutputChecker):
    """Outputs are equal whatever the seconds in them."""

    def check_output(self, want, got, optionflags):
        want, got = (re.sub(r"\b\d+\.\d s\b", "N s", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


@pytest.mark.parametrize(("page", "num_examples"), [("accumulators.md", 19), ("activations.md", 12)])
def test_the_pages_with_sessions_say_what_comes_out(page, num_examples):
    text = (ROOT / "docs" / page).read_text()
    examples = doctest.DocTestParser().get_doctest(text, {}, page, None, 0)
    said = []
    found = doctest.DocTestRunner(checker=Untimed(), verbose=False).run(examples, out=said.append)
    assert (found.failed, found.attempted) == (0, num_examples), "".join(said)


def test_the_readmes_commands_parse():
    lines = [line.removeprefix("$ ") for block in blocks("README.md", "console") for line in block.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("penstock ")]
    assert {c[0] for c in commands} == {"synth", "replay", "validate", "inspect"}
    for command in commands:
        parser().parse_args(command)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target


def test_the_page_on_commands_knows_every_command_and_flag_of_replay(capsys):
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`{command}" in page for command in COMMANDS)
    with pytest.raises(SystemExit):
        parser().parse_args(["replay", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert {flag for flag in flags if flag not in page} == set()


def test_the_rooms_of_the_page_are_the_rooms_of_the_house():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for path in sorted((ROOT / "engine").iterdir()):
        if path.suffix == ".py" and not path.name.startswith("__"):
            assert f"`engine/{path.name}`" in page, path
        elif path.is_dir() and path.name != "__pycache__":
            assert f"`engine/{path.name}/`" in page, path
