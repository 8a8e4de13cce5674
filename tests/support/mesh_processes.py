"""The processes of a JAX job on this machine, as a test starts them.

``python tests/support/mesh_processes.py OUT NAME…`` is one process of these jobs; the environment says which (``JOB``).
"""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import mesh_failures
import mesh_jobs
import mesh_kernel_jobs
import numpy as np
from limits import HANG_S

MODULES = mesh_jobs, mesh_failures, mesh_kernel_jobs


def main(out, *names):
    import jax

    job = json.loads(os.environ["JOB"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job["devices"])
    # The machine may suspend a process for minutes.
    patience = {"heartbeat_timeout_seconds": int(HANG_S), "shutdown_timeout_seconds": int(HANG_S)}
    jax.distributed.initialize(job["coordinator"], job["count"], job["rank"], **patience)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(job["count"], -1), ("x", "y"))
    jobs = [getattr(module, name) for name in names for module in MODULES if hasattr(module, name)]
    results = [job_of(mesh, job["rank"], job["count"], Path(out).parent) for job_of in jobs]
    Path(out).write_bytes(pickle.dumps(results))
    jax.distributed.shutdown()


def started(name, count, devices, folder, **environment):
    """Run a job in ``count`` processes of so many devices; return what each of them returned."""
    (result,) = all_started([name], count, devices, folder, **environment)
    return result


def all_started(names, count, devices, folder, **environment):
    """The same of several jobs in the same processes, one after the other: one list per job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    members = []
    for rank in range(count):
        job = {"coordinator": coordinator, "rank": rank, "count": count, "devices": devices}
        command = [sys.executable, __file__, str(folder / f"process{rank}"), *names]
        variables = os.environ | {"JOB": json.dumps(job)} | environment
        with (folder / f"process{rank}.log").open("w") as log:
            members.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables))
    try:
        codes = [member.wait(HANG_S) for member in members]
    finally:
        for member in members:
            member.kill()
    logs = [(folder / f"process{rank}.log").read_text() for rank in range(count)]
    assert codes == [0] * count, "\n".join(log[-3000:] for log in logs)
    results = [pickle.loads((folder / f"process{rank}").read_bytes()) for rank in range(count)]
    return [list(job) for job in zip(*results, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
