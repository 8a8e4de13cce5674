"""A node whose network is cut and comes back: ``python tests/support/cluster/network.py`` (as root, with iproute2).

One node is in a network namespace. While a job runs, its link goes down; the cluster marks the node dead, and the job
continues elsewhere. The owner on that node still runs, with the checkpoint's folder in reach. Then, while the job still
runs, the link is up again. State hash and deltas must be those of one process.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.jobs import DriverProcess, Sources, batches_of

NAME, HOST, OTHER, PORT = "penstock-node", "10.99.7.1", "10.99.7.2", 6391
LINK, PEER = "penstock0", "penstock1"
# Ray gives a node up after three checks a second apart, instead of half a minute.
CHECKS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000"}
CHECKS |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "20000"}


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def tree(process):
    """The process, and everything below it."""
    processes = [process]
    for item in processes:
        with suppress(FileNotFoundError):
            processes += map(int, Path(f"/proc/{item}/task/{item}/children").read_text().split())
    return processes


def start_node(stack, before, *options):
    """Start a node that ends with the stack. before : words before the command"""
    command = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=8"]
    command += ["--resources", '{"owner": 1}']  # so that the job needs both nodes
    environment = {**os.environ, **CHECKS, "RAY_USAGE_STATS_ENABLED": "0"}
    output = subprocess.DEVNULL
    node = subprocess.Popen([*command, "--object-store-memory=100000000", *options], env=environment, stdout=output)

    def end():
        for process in tree(node.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    stack.callback(end)
    return node


def cut_until_dead(stack, moments):
    """Cut the link until the cluster has marked the node dead, and for some time while the job continues without it.

    moments : gets those at which the node was marked dead, and the link was up again
    """
    ip("-n", NAME, "link", "set", PEER, "down")
    began = time.monotonic()
    start_node(stack, [], f"--address={HOST}:{PORT}", f"--node-ip-address={HOST}")  # a place for the owner
    while OTHER in living():
        time.sleep(0.2)
    moments.append(time.monotonic())
    time.sleep(20)
    ip("-n", NAME, "link", "set", PEER, "up")
    moments.append(time.monotonic())
    print(f"the node was marked dead after {moments[0] - began:.1f} s, the link was up again after", end=" ")
    print(f"{moments[1] - began:.1f} s", flush=True)


def connect(ray, patience_s=90):
    """Connect to the cluster as soon as its head has started."""
    deadline = time.monotonic() + patience_s
    while not ray.is_initialized():
        try:
            ray.init(address=f"{HOST}:{PORT}", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def living():
    """Return the addresses of the nodes that the cluster believes alive."""
    import ray

    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def main():
    # A token of this cluster alone: its processes share no file with those of others.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # which reads the token

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-network-")))
        ip("netns", "add", NAME)
        stack.callback(ip, "netns", "del", NAME)
        ip("link", "add", LINK, "type", "veth", "peer", "name", PEER, "netns", NAME)
        ip("addr", "add", f"{HOST}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        for words in (
            ["addr", "add", f"{OTHER}/24", "dev", PEER],
            ["link", "set", PEER, "up"],
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{OTHER}/32", "dev", "lo"],  # so that the node reaches itself without the link
        ):
            ip("-n", NAME, *words)
        sources = Sources(folder, "static", 60)
        state_hash, deltas = sources.alone("wanted")
        start_node(stack, [], "--head", f"--node-ip-address={HOST}", f"--port={PORT}", "--include-dashboard=false")
        connect(ray)
        stack.callback(ray.shutdown)
        inside = ["ip", "netns", "exec", NAME]
        start_node(stack, inside, f"--address={HOST}:{PORT}", f"--node-ip-address={OTHER}")
        while OTHER not in living():
            time.sleep(1)
        places = {"checkpoint": str(folder / "commits"), "deltas": str(folder / "deltas.arrows")}
        driver = DriverProcess(
            f"{HOST}:{PORT}",
            sources,
            pace_s=0.8,
            shares=2,
            readers=2,
            rounds_per_block=1,
            every=3,
            owner_options={"resources": {"owner": 1}},
            **places,
        )
        ended, cut, moments, stepped = None, None, [], []
        for event in driver.events():
            if cut is None and event.get("step", 0) >= 10:
                cut = threading.Thread(target=cut_until_dead, args=(stack, moments))
                cut.start()
            stepped += [time.monotonic()] * ("step" in event)
            ended = event if "state_hash" in event else None
        code, lines = driver.end()
        cut.join()
        after = [sum(step > moment for step in stepped) for moment in moments]
        print(f"blocks applied while the node was dead: {after[0] - after[1]}, after its return: {after[1]}")
        print("\n".join(["the driver printed:", *lines]))
        continued = [line for line in lines if "the job continues from commit" in line]
        same = ended is not None and ended["state_hash"] == state_hash
        same = same and batches_of(folder / "deltas.arrows") == batches_of(deltas)
        print(f"exit code {code}, {len(continued)} failures, {'the same' if same else 'ANOTHER'} state and deltas")
        return int(not (same and continued and len(lines) == len(continued) and after[0] > after[1] > 0))


if __name__ == "__main__":
    sys.exit(main())
