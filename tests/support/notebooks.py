"""Runs notebooks without Jupyter. ``python tests/support/notebooks.py FILE…`` writes what cells show into the files.

The value of a cell's last line is shown as text, and as HTML or SVG where it has IPython's methods for them.
"""

import ast
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

METHODS = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(path):
    """The outputs of each code cell. They run in order, in one namespace, in a new folder with examples/data."""
    notebook, namespace, before = json.loads(path.read_text()), {"__name__": "__main__"}, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(path.parent / "data", Path(folder) / "data")
        os.chdir(folder)
        try:
            return [
                _outputs("".join(cell["source"]), namespace, f"{path.name}, cell {number}", number)
                for number, cell in enumerate(code_cells(notebook), 1)
            ]
        finally:
            os.chdir(before)
            for process in namespace.values():  # of a cell that failed
                if isinstance(process, subprocess.Popen) and process.poll() is None:
                    process.kill()
                    process.communicate()


def _outputs(source, namespace, name, number):
    tree, value = ast.parse(source, name), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(text)})
    if value is not None:
        data = {kind: getattr(value, method)() for kind, method in METHODS.items() if hasattr(value, method)}
        data = {kind: _lines(text) for kind, text in {**data, "text/plain": repr(value)}.items()}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text):
    return text.splitlines(keepends=True)


def main(*paths):
    for path in map(Path, paths):
        path = path.absolute()
        notebook = json.loads(path.read_text())
        for number, (cell, outputs) in enumerate(zip(code_cells(notebook), executed(path), strict=True), 1):
            cell.update(execution_count=number, outputs=outputs)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
