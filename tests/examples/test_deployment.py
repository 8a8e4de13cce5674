"""The units, the container file and the manifest of examples/: their commands run, and end as a manager ends them."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from limits import HANG_S, until
from scripts import ROOT
from services import config_of, frame, free_port, self_signed

from penstock.serving.flight import connect

UNITS = ("penstock-serve.service", "penstock-follow.service", "penstock-replica.service")
EXAMPLES = ROOT / "examples"


def unit_of(name):
    """The sections of a unit, its lines joined."""
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str
    parser.read_string(text)
    return parser


def started(words, replaced, **more):
    """Start a command line, with places of this test in it."""
    command = []
    for word in words:
        for old, new in replaced.items():
            word = word.replace(old, str(new))
        command.append(word)
    assert command[0].endswith("penstock")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "penstock", *command[1:]], **pipes, **more)


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for other in UNITS:  # with a program that is there
        text = (EXAMPLES / other).read_text().replace("/usr/local/bin/penstock", sys.executable)
        (tmp_path / other).write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=HANG_S)
    assert not [line for line in done.stderr.splitlines() if name in line], done.stderr


def test_the_units_start_in_any_order_and_end_with_0(tmp_path):
    serve, follow, replica = (unit_of(name)["Service"] for name in UNITS)
    for service in (serve, follow, replica):
        assert service["Restart"] == "on-failure"  # so that an end in order, exit code 0, is none
        assert service.get("KillSignal", "SIGTERM") == "SIGTERM"
    config_of().save(tmp_path / "tables.pbtxt")
    replaced = {"/etc/penstock": tmp_path, "/var/lib": tmp_path, "8815": free_port(), "9090": free_port()}
    following = started(shlex.split(follow["ExecStart"]), replaced)
    serving = started(shlex.split(serve["ExecStart"]), replaced)
    try:
        with connect(f"grpc://127.0.0.1:{replaced['8815']}", patience_s=HANG_S) as client:
            client.put([frame(number) for number in range(10)], "w0")
        rows = tmp_path / "penstock-follow" / "tables"
        until(lambda: (rows / "current").exists())
        for process in (serving, following):
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, log
    finally:
        for process in (serving, following):
            process.kill()
            process.communicate()
    assert (tmp_path / "penstock" / "checkpoint").is_dir()


def instructions():
    """(instruction, arguments) of the container file, in order."""
    text = re.sub(r"^#.*\n", "", (EXAMPLES / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_the_command_of_the_container_serves_and_its_health_check_passes(tmp_path):
    lines = dict(instructions())
    command = json.loads(lines["ENTRYPOINT"]) + json.loads(lines["CMD"])
    assert lines["STOPSIGNAL"] == "SIGTERM"
    config_of().save(tmp_path / "tables.pbtxt")
    self_signed(tmp_path)
    (tmp_path / "tokens").write_text("operator ours\nreader theirs\n")
    (tmp_path / "state").mkdir()
    replaced = {"/etc/penstock": tmp_path, "/run/secrets": tmp_path, "/state": tmp_path / "state"}
    replaced |= {"8815": free_port(), "9090": free_port()}
    name, _, roots = lines["ENV"].partition("=")
    environment = os.environ | {name: roots.replace("/run/secrets", str(tmp_path)), "PENSTOCK_FLIGHT_TOKEN": "theirs"}
    serving = started(command, replaced)
    try:
        check = json.loads(lines["HEALTHCHECK"].removeprefix("CMD"))

        def is_healthy():
            health = started(check, replaced, env=environment)
            health.communicate(timeout=HANG_S)
            time.sleep(0.1)
            return health.returncode == 0

        until(is_healthy)
        serving.send_signal(signal.SIGTERM)
        _, log = serving.communicate(timeout=HANG_S)
        assert serving.returncode == 0, log
        assert {"listening", "ending"} <= {json.loads(line)["event"] for line in log.splitlines()}
    finally:
        serving.kill()
        serving.communicate()
    assert (tmp_path / "state" / "checkpoint").is_dir()


def test_the_manifest_for_kubernetes_fits_the_container():
    """Where the image reads and writes, something is mounted, and the probe is its health check."""
    text = (EXAMPLES / "penstock.yaml").read_text()
    lines = dict(instructions())
    (probe,) = re.findall(r"exec: \{command: (\[.*?\])\}", text)
    assert json.loads(probe) == json.loads(lines["HEALTHCHECK"].removeprefix("CMD"))
    mounted = set(re.findall(r"mountPath: ([\w/]+)", text))
    used = {os.path.dirname(word) for word in json.loads(lines["CMD"]) if word.startswith("/")}
    assert used == mounted
    ports = set(re.findall(r"port: (\d+)", text)) | set(re.findall(r"containerPort: (\d+)", text))
    assert ports == set(lines["EXPOSE"].split())
    names = re.findall(r"- \{name: (\w+), mountPath", text)
    volumes = re.findall(r"- \{name: (\w+), (?:configMap|secret):|- metadata: \{name: (\w+)\}", text)
    assert set(names) == {name for pair in volumes for name in pair if name}
