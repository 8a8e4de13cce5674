"""All pages: their Python runs, their commands parse, their links have targets, and they name what exists."""

import doctest
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scripts import loaded
from services import frame, service_of

import penstock
from penstock.cli.command_line import parse
from penstock.cli.main import COMMANDS, main, parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
LOG = """
    import os, numpy as np, pyarrow as pa, pyarrow.dataset, pyarrow.parquet, penstock as ps
    batch = pa.record_batch({"id": [1, 2], "gradient": [[0.5, 0.5], [1.0, 1.0]], "step": [0, 0]})
    batches, schema, table = [batch], batch.schema, ps.TableConfig(9, 2, name="user", optimizer=ps.SGD(0.1))
    with pa.ipc.new_stream("monday.arrows", schema) as writer:
        writer.write_batch(batch)
    engine, mesh = ps.Engine(ps.EmbeddingConfig.from_tables([table])), None
"""
# Page → the code that runs before its Python, which is a part of a larger program, and after that of LOG.
SETUP_CODE = {
    "docs/activations.md": """
        config_of = {"f": ps.FeatureConfig(ps.TableConfig(9, 2, name="user"))}
        engine = ps.Engine(ps.EmbeddingConfig.from_features(config_of, batch_size=4, optimizer=ps.SGD(0.1),
                                                                    pipeline_execution_with_tensor_core=True))
        features = {"f": np.array([[1], [2], [1], [8]])}
        batches = [features] * 3
        gradients_of = lambda dedup: {"f": np.ones((4, 2), np.float32)}
    """,
    "docs/checkpoints.md": "",
    "docs/change_tables.md": 'engine.save("run1")',
    "docs/deltas.md": """
        engine = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 2, optimizer=ps.Adagrad(0.1))]))
        serving = follower = type("Rows", (list,), {"upsert": list.append, "take": list.append})()
        ps.Engine(engine.config).save("run1")
    """,
    "docs/bad_rows.md": """
        engine.config.save("tables.pbtxt")
        for name, id in (("monday", 9), ("repaired", 8)):  # 9 is outside the table
            with pa.ipc.new_stream(f"{name}.arrows", schema) as writer:
                writer.write_batch(batch.set_column(0, "id", pa.array([1, id])))
    """,
}
# Pages whose commands run between their blocks of Python. A test below parses those of other pages.
RUN_COMMANDS = ("docs/get_started", "docs/bad_rows", "docs/placement", "docs/readers", "docs/tutorials/")
# Page → the library that its Python needs.
LIBRARIES = dict.fromkeys(["docs/torch.md", "docs/tutorials/from_torch.md", "docs/tutorials/ranks.md"], "torch")
GENERATED = loaded("docs/hooks.py").GENERATED
# Blocks that need a library that may be missing here, or a running service, are compiled and not run.
COMPILE_ONLY = re.compile(r"\b(optax\.|ray\.|(connect|store)\(\"grpc)")


def blocks(page, language):
    matches = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [re.sub(r"\\\n +", "", block) for block in matches] if language == "console" else matches


CODE_PAGES = [page for page in PAGES if page.startswith("docs/") and (blocks(page, "python") or page in SETUP_CODE)]


def run_python(page, service=None, language="python", **namespace):
    """Run the Python of a page, at this service in place of the one that it names. Return its names."""
    for block in blocks(page, language):
        code = block.replace("grpc://127.0.0.1:8815", service.address.uri) if service else block
        exec(compile(code, page, "exec"), namespace)
    return namespace


@pytest.mark.promise("README's programs print what README shows")
def test_the_readmes_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_python("README.md")
    assert [capsys.readouterr().out] == blocks("README.md", "text")


def test_the_home_page_begins_with_the_readmes_first_screen():
    hooks = loaded("docs/hooks.py")
    home = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    page = hooks.on_page_markdown((ROOT / "docs" / "index.md").read_text(), home)
    assert [block for language in ("python", "text", "console") for block in blocks("README.md", language)[:1]] == [
        re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)[1] for language in ("python", "text", "console")
    ]
    assert "](pictures/gradient.svg)" in page
    assert "](docs/" not in page


def test_the_diagrams_are_those_that_their_script_draws():
    pictures = loaded("docs/pictures.py")
    drawn = {f"{name}.svg": draw() for name, draw in pictures.PICTURES.items()}
    assert {path.name: path.read_text() for path in pictures.FOLDER.iterdir()} == drawn, "run: python docs/pictures.py"


def test_the_screenshots_are_on_a_page_and_light():
    """Their script needs a browser, this test does not."""
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    pictures = list((ROOT / "docs" / "screenshots").iterdir())
    assert {path.name for path in pictures} == set(re.findall(r"\]\(screenshots/(.*?)\)", pages))
    assert [path.name for path in pictures if path.stat().st_size > 60_000] == []


def test_the_script_of_screenshots_says_that_it_needs_a_browser(monkeypatch, capsys):
    script = loaded("docs/screenshots.py")
    monkeypatch.setattr(script, "CHROMIUM", None)
    assert script.main() == 1
    assert "install chromium" in capsys.readouterr().err


@pytest.mark.parametrize("page", CODE_PAGES)
def test_a_pages_python_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    if page in LIBRARIES:
        pytest.importorskip(LIBRARIES[page])
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in (LOG, SETUP_CODE[page]) if page in SETUP_CODE else ():
        exec(textwrap.dedent(code), namespace)
    languages = "python|console" if page.startswith(RUN_COMMANDS) else "python"
    for language, block in re.findall(rf"```({languages})\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if language == "console":
            printed = run_commands(block, capsys).splitlines()
            assert [line for line in block.splitlines() if line[:2] != "$ " and line not in printed] == []
        elif not COMPILE_ONLY.search(block):
            exec(compile(block, page, "exec"), namespace)
        else:
            compile(block, page, "exec")


def run_commands(block, capsys):
    """Run the commands of a block. Return their output."""
    capsys.readouterr()
    for line in block.splitlines():
        arguments = shlex.split(line.removeprefix("$ "), comments=True)
        if arguments[0] == "penstock" and arguments[1] != "serve":  # serve runs until a signal
            assert main(arguments[1:]) == 0, line
    return capsys.readouterr().out


def test_the_tutorial_for_torch_runs_with_its_service(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    page = "docs/tutorials/from_torch.md"
    monkeypatch.chdir(tmp_path)
    config = penstock.EmbeddingConfig.from_tables(
        [penstock.TableConfig(1000, 8, name=name) for name in ("user", "item")], penstock.Adagrad(0.1)
    )
    with service_of(penstock.Engine(config), tmp_path / "served") as service:
        namespace = run_python(page, service)
        trainer = next(block for block in blocks("docs/torch.md", "python") if "trainer-0" in block)
        for _ in range(2):
            exec(compile(trainer.replace("grpc://127.0.0.1:8815", service.address.uri), page, "exec"), namespace)
        assert penstock.EmbeddingConfig.load("tables.pbtxt").to_proto() == config.to_proto()
        assert service.status()["frames"] == 20 + 30  # the second start repeats ten batches, which are skipped
        assert namespace["first"] == 20


def test_the_python_of_the_page_on_services_runs():
    tables = [penstock.TableConfig(500, dim, name=name) for name, dim in (("user", 4), ("item", 2))]
    config = penstock.EmbeddingConfig.from_tables(tables, optimizer=penstock.SGD(0.1))
    frames = [frame(number, table="user") for number in range(3)]
    with service_of(penstock.Engine(config)) as service:
        namespace = run_python("docs/serve.md", service, "py", frames=frames[:2], frame=frames[2], ids=[1, 2])
        assert service.status()["frames"] == 3
        for name, ids in (("user", [3, 8]), ("item", [7])):
            np.testing.assert_array_equal(namespace[name], service.engine.lookup(name, ids))
        assert namespace["version"].step == 3


def test_every_command_on_a_page_parses():
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.splitlines():
                arguments = shlex.split(line.removeprefix("$ "), comments=True)
                if line.startswith("$ penstock ") and "…" not in line:
                    parse(parser(arguments[1:]), arguments[1:])


def test_the_generated_pages_have_every_command_and_lead_to_pages():
    generated = {name: create() for name, create in GENERATED.items()}
    assert [name for name in COMMANDS if f"\n## penstock {name}\n" not in generated["reference/help.md"]] == []
    targets = {target for page in generated.values() for target in re.findall(r"\]\(([^)#]+)", page)}
    assert "../ray.md" in targets
    assert [target for target in targets if not (ROOT / "docs" / "reference" / target).exists()] == []


def test_the_page_of_promises_lists_the_tests_that_are_marked():
    promises = loaded("docs/hooks.py").promises()
    assert promises.count("\n- **") >= 25
    listed = "    - `tests/repository/test_docs.py::test_the_readmes_replay_prints_the_output_that_it_shows`\n"
    assert listed in promises


def groups_of_the_site():
    """Group → its pages, in the order of the navigation."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    groups = re.split(r"^  - ", nav, flags=re.MULTILINE)[1:]
    return {group.partition(":")[0]: re.findall(r"(?:- |: )([a-z_/]+\.md)$", group, re.MULTILINE) for group in groups}


def test_every_page_is_in_the_sites_navigation():
    nav = [page for pages in groups_of_the_site().values() for page in pages]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted(pages | GENERATED.keys())


class UntimedChecker(doctest.OutputChecker):
    """Compares outputs without the seconds in them, which differ from run to run."""

    def check_output(self, want, got, optionflags):
        want, got = (re.sub(r"\b\d+\.\d s\b", "N s", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


@pytest.mark.parametrize(("page", "num_examples"), [("accumulators.md", 12), ("activations.md", 12)])
def test_sessions_on_pages_show_their_real_output(page, num_examples):
    text = (ROOT / "docs" / page).read_text()
    examples = doctest.DocTestParser().get_doctest(text, {}, page, None, 0)
    output = []
    results = doctest.DocTestRunner(UntimedChecker(), verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(
        examples, out=output.append
    )
    assert (results.failed, results.attempted) == (0, num_examples), "".join(output)


def test_the_page_on_your_own_gradients_works_and_names_the_bad_row(tmp_path, monkeypatch, capsys):
    page = "docs/gradients.md"
    monkeypatch.chdir(tmp_path)
    (python, example), (text,), (console,) = (blocks(page, language) for language in ("python", "text", "console"))
    namespace = {}
    exec(compile(python, page, "exec"), namespace)
    (tmp_path / "mine.pbtxt").write_text(text)
    output = run_commands(console, capsys)
    exec(compile(example, page, "exec"), namespace)
    printed = capsys.readouterr().out
    assert "3 rows, 1 steps, 0 stale frames" in printed
    assert "apply('item'): row 1, column 'id': expected 0 <= id < 5000" in printed
    assert "nothing to remark" in output
    assert "6 steps" in output
    assert (tmp_path / "mine" / "user.parquet").exists()


@pytest.mark.promise("README's programs print what README shows")
def test_the_readmes_replay_prints_the_output_that_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = blocks("README.md", "console")[0]
    shown = [line for line in block.splitlines() if line[:2] != "$ "]
    printed = run_commands(block, capsys).splitlines()
    assert shown[1:] == printed[1 - len(shown) :]  # the first line has the seconds of the run


@pytest.mark.parametrize("page", PAGES)
def test_links_have_existing_targets(page):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        place = (ROOT / page).parent / target
        is_generated = os.path.relpath(place, ROOT / "docs") in GENERATED
        assert target.startswith("https://") or is_generated or place.exists(), target


def test_the_architecture_names_every_package():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for root in ("engine", "io", "pyx", "bench"):
        for init in (ROOT / root).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT)
            if str(folder) in ("engine/functional", "engine/shared", "io/targets"):  # import paths that stay
                continue
            assert f"`{folder}/`" in page or f"`{folder.name}/`" in page, folder


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_the_repository_that_a_page_names_exists(page):
    """Except those of an earlier commit, which the page then names."""
    path = r"`(?:python |bash )?((?:engine|io|pyx|bench|tests|examples|docs|\.ci)/[a-z\d_./-]*)(?: [^`]*)?`"
    for name in re.findall(rf"{path}(?!\s+of\s+(?:the\s+)?commit)", (ROOT / page).read_text()):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), name


def test_every_hint_to_install_an_extra_names_the_package_and_one_of_its_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hint = re.compile(r"pip install ([^\n`]*?)'([^'\[\]\n]*)\[([a-z-]+)\]'")
    folders = [(ROOT / name).rglob("*") for name in ("docs", "engine", "io", "bench", "examples")]
    files = [path for folder in (ROOT.glob("*.md"), *folders) for path in folder if path.suffix in (".md", ".py")]
    hints = {hint_text for path in files for hint_text in hint.findall(path.read_text())}
    assert {(how, package) for how, package, _ in hints} == {("", "penstock")}
    assert {extra for _, _, extra in hints} <= set(extras)


@pytest.mark.parametrize(("codes", "exit_code"), [(["kill", "kill", "0"], 0), (["kill", "3"], 3), (["130"], 130)])
def test_the_script_of_the_page_on_checkpoints_restarts_a_killed_process(tmp_path, codes, exit_code):
    """``penstock`` is a stub that exits with the next of ``codes`` at each call; "kill" is a SIGKILL."""
    (script,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    assert "--resume" in script
    (tmp_path / "codes").write_text("\n".join(codes))
    stub = tmp_path / "penstock"
    stub.write_text(
        '#!/bin/sh\necho x >>calls\ncode=$(sed -n "$(wc -l <calls)p" codes)\n'
        '[ "$code" = kill ] && kill -9 $$\nexit "$code"\n'
    )
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert result.returncode == exit_code
    assert len((tmp_path / "calls").read_text().split()) == len(codes)
