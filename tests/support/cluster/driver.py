"""The driver of one job, as a process: ``python driver.py JSON``, which jobs.py starts.

It kills actors of the job at the steps that it was given, and prints a JSON line per block, kill and result.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoints import config_of as static_config
from dynamic import ALL_POLICIES
from dynamic import config_of as dynamic_config

from penstock.contrib.ray import Job

LOCK = threading.Lock()


def say(**fields):
    with LOCK:  # threads that kill print too
        print(json.dumps(fields), flush=True)


def kill(actor, kind, number, delay_s):
    """Kill the process of an actor, whatever it does at that moment."""
    import ray

    process = None
    while process is None:
        with suppress(ray.exceptions.RayError):  # it is dead already, with its node, and will be back
            process = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    time.sleep(delay_s)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    say(killed=kind, number=number)


def main():
    settings = json.loads(sys.argv[1])
    logging.basicConfig(format="%(message)s")  # what anything warns of is a line on standard error
    config = static_config() if settings["kind"] == "static" else dynamic_config(ALL_POLICIES, rows=16_384)
    job = Job(config, settings["logs"], address=settings["address"], **settings["options"])
    kills = sorted(settings["kills"])

    def progress(counters, step):
        while kills and step >= kills[0][0]:
            _, kind, number, delay_s = kills.pop(0)
            actors = getattr(job.actors, kind + "s")
            arguments = (actors[number % len(actors)], kind, number, delay_s)
            threading.Thread(target=kill, args=arguments, daemon=True).start()
        say(step=step)
        time.sleep(settings["pace_s"])

    job.progress = progress
    report = job.run()
    say(state_hash=report.state_hash, frames=report.frames, skipped=report.skipped, unused=kills)


if __name__ == "__main__":
    main()
