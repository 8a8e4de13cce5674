"""What replays leave: commits, deltas, bad rows and tables (write.py)."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from frames import (
    DYNAMIC_DIMS,
    DYNAMIC_MOST,
    GATE,
    STATIC_DIMS,
    STATIC_MOST,
    STOP,
    damaged,
    dynamic_config,
    frames_of,
    static_config,
)


class Replays:
    """Writes into the working directory. expected : of each folder"""

    def __init__(self):
        import penstock as ps

        self.ps, self.expected = ps, {}

    def penstock(self, *words, code=0):
        command = [sys.executable, "-m", "penstock", *map(str, words), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, (words, done.stderr)
        return json.loads(done.stdout)

    def sources(self, folder, config, frames):
        from penstock.io.log import LogWriter

        os.makedirs(folder)
        config.save(f"{folder}/tables.pbtxt")
        with LogWriter(f"{folder}/log.arrows", frames[0].schema) as log:
            for frame in frames:
                log.write(frame)
        return ["replay", f"{folder}/tables.pbtxt", f"{folder}/log.arrows"]

    def check(self, folder, words, *flags, commits="commits"):
        """Record the state of a checkpoint, and that of all of its sources, to which resuming a copy must lead."""
        engine = self.ps.Engine.restore(f"{folder}/{commits}")
        whole = self.penstock(*words, *flags)
        shutil.copytree(f"{folder}/{commits}", "copy")
        again = self.penstock(*words, *flags, "--checkpoint", "copy", "--resume")
        shutil.rmtree("copy")
        assert again["state_hash"] == whole["state_hash"] != engine.state_hash(), folder
        self.expected[f"{folder}/{commits}"] = {
            "step": engine.global_step,
            "pending": engine.gate.num_accumulated,
            "skipped": again["skipped"],
            "restored": engine.state_hash(),
            "resumed": whole["state_hash"],
        }

    def replays(self):
        from cached import cached
        from cached import config_of as cached_config
        from cached import log_of as cached_log

        static, dynamic = frames_of(STATIC_DIMS, STATIC_MOST), frames_of(DYNAMIC_DIMS, DYNAMIC_MOST)
        logs = {
            "static": (static_config(self.ps), damaged(static)),
            "dynamic": (dynamic_config(self.ps), damaged(dynamic)),
            "cached": (cached_config(cached(0.1)), cached_log(steps=5, rows=10)),
        }
        for folder, (config, frames) in logs.items():
            words = self.sources(folder, config, frames)
            gate = ("--num-required", 2) if folder == "cached" else GATE
            stop = 7 if folder == "cached" else STOP
            form = ["--deltas-slots", "all"]
            bad = ["--on-bad-row", f"quarantine={folder}/bad.arrows"]
            saving = ["--checkpoint", f"{folder}/commits", "--every", 1, "--limit", stop]
            self.penstock(*words, *gate, *saving, *form, "--deltas", f"{folder}/deltas.arrows", *bad)
            assert list(Path(folder, "commits").glob("*.delta"))
            self.check(folder, words, *gate, "--on-bad-row", "drop")
            self.initial(folder, words, gate)

    def initial(self, folder, words, gate):
        """``--out`` of a replay that begins at the first frame, and one that begins at its tables."""
        self.penstock(*words, *gate, "--on-bad-row", "drop", "--limit", 12, "--out", f"init/{folder}")
        found = self.penstock(*words, *gate, "--on-bad-row", "drop", "--init", f"init/{folder}")
        self.expected[f"init/{folder}"] = {"resumed": found["state_hash"]}

    def shares(self):
        from sharing import LocalJob

        frames = frames_of(DYNAMIC_DIMS | {"visitor": 1}, DYNAMIC_MOST)
        config = dynamic_config(self.ps, 8192, 1)  # two virtual shards, so that both shares have keys
        words = self.sources("job", config, frames)
        job = LocalJob(config, 2, num_required=3)
        job.run(words[2:], limit=7).commit("job/shares")
        job = LocalJob(config, 2, "job/shares")
        job.run(words[2:], limit=STOP - 7).commit("job/shares")
        self.check("job", words, *GATE, "--merge", "round", commits="shares")

    def ray(self):
        words = ["replay", "job/tables.pbtxt", "job/log.arrows"]
        saving = ["--checkpoint", "job/ray", "--every", 2, "--limit", STOP]
        self.penstock(*words, *GATE, *saving, "--ray", "local", "--shares", 2)
        assert {path.name[8:14] for path in Path("job/ray").glob("*.base")} == {"-0of2.", "-1of2."}
        self.check("job", words, *GATE, "--merge", "round", commits="ray")

    def passes(self):
        from penstock.cli import main
        from penstock.shares.multi_pass import MultiPass

        words = self.sources("passes", static_config(self.ps), frames_of(STATIC_DIMS, STATIC_MOST)[:20])
        flags = [
            *GATE,
            "--passes",
            3,
            "--checkpoint",
            "passes/commits",
            "--every",
            1,
            "--deltas",
            "passes/deltas.arrows",
        ]
        before = MultiPass._progress

        def progress(replay, number):
            def interrupt(counters, gate, done):
                if number == 1 and counters.frames == STOP:
                    raise KeyboardInterrupt

            return interrupt

        MultiPass._progress = progress
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*map(str, [*words, *flags]), "--json"]) == 130
        MultiPass._progress = before
        assert Path("passes/commits/.passes/replay.json").exists()
        whole = self.penstock(*words, *GATE)["state_hash"]
        shutil.copytree("passes", "before")
        assert self.penstock(*words, *flags, "--resume")["state_hash"] == whole
        shutil.rmtree("passes")
        os.rename("before", "passes")
        self.expected["passes"] = {"resumed": whole}
