"""Prints the path of a resumed run to its first frame: ``python tests/support/path_of_a_resume.py``.

A run reads a plain Arrow IPC stream with a limit, commits to a checkpoint, and ends. ``Engine.restore`` loads the
commit, and ``Engine.run`` resumes the stream without a limit. The path begins with this call, and ends when the run
pushes its first frames into the core.

What counts, by ``sys.setprofile`` on the thread of the run:

- modules: every module of ``penstock.checkpoint`` of which a Python function runs on the path;
- concepts: every class there of which a method or property runs. Records without any, such as SourcePosition, and
  compiled code do not count: the profiler does not see them.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from path_of_a_batch import module_of, write_stream

PACKAGE = "penstock.checkpoint."
FRAMES_BEFORE = 2


class CheckpointCall(NamedTuple):
    """A call of a function of the package. module : without the package; function : qualified by its class"""

    module: str
    function: str


class ResumeProfiler:
    """Collects the calls up to the first frame. push : the code of ``EngineCore.push_run``"""

    def __init__(self, push) -> None:
        self._push = push
        self.is_complete = False
        self.calls = []

    def __call__(self, frame, event, _) -> None:
        if event != "call" or self.is_complete:
            return
        self.is_complete = frame.f_code is self._push
        module = module_of(frame)
        if module.startswith(PACKAGE):
            self.calls.append(CheckpointCall(module.removeprefix(PACKAGE), frame.f_code.co_qualname))


def path_of_a_resume():
    """Return the calls of the package from ``Engine.run(resume=True)`` to the first frame, in order."""
    import penstock as ps
    from penstock.core import EngineCore

    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(10_000, 8, name="t")], ps.Adagrad(0.1))
    with tempfile.TemporaryDirectory() as folder:
        path, checkpoint = Path(folder) / "log.arrows", Path(folder) / "checkpoint"
        write_stream(path)
        ps.Engine(config, threads=1).run(path, checkpoint=checkpoint, limit=FRAMES_BEFORE)
        engine = ps.Engine.restore(checkpoint, threads=1)
        profiler = ResumeProfiler(EngineCore.push_run.__code__)
        sys.setprofile(profiler)
        try:
            report = engine.run(path, checkpoint=checkpoint, resume=True)
        finally:
            sys.setprofile(None)
    assert (profiler.is_complete, report.skipped) == (True, FRAMES_BEFORE)
    return profiler.calls


def main() -> int:
    calls = path_of_a_resume()
    for module, function in dict.fromkeys(calls):
        print(f"{module}: {function}")
    modules = sorted({call.module for call in calls})
    names = {call.function.partition(".")[0] for call in calls}
    concepts = sorted(name for name in names if name.lstrip("_")[0].isupper())
    print(f"{len(modules)} modules: {', '.join(modules)}")
    print(f"{len(concepts)} concepts: {', '.join(concepts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
