"""One case of the fuzzer: damaged bytes, and the command that reads them."""

import functools
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuzz import seeds, server
from fuzz.craft import crafted_inputs
from fuzz.handmade import handmade_inputs
from fuzz.mutate import mutate
from fuzz.seeds import Seed
from hostile_manifests import forged

COMMANDS = ("validate", "validate", "inspect", "replay")
MANIFEST_COMMANDS = ("inspect", "export", "diff", "resume")
MANIFEST = "00000001.commit"


@dataclass(frozen=True)
class Case:
    """name : how it is asked for again; kind : of the input, for the figures; change : to it, in words"""

    name: str
    kind: str
    change: str
    content: bytes
    suffix: str
    command: str
    is_config: bool = False
    is_log: bool = False
    is_manifest: bool = False

    @property
    def codes(self) -> tuple[int, ...]:
        """The exit codes that it may end with."""
        return (0, 3, 4, 5) if self.is_manifest else (0, 3, 4)

    def written(self, folder: Path) -> list[str]:
        """The words of the command line, once the files are there."""
        if self.is_manifest:
            return _manifest_words(self.command, folder, _checkpoint() | {MANIFEST: self.content})
        damaged = folder / f"damaged{self.suffix}"
        damaged.write_bytes(self.content)
        return _words(self.command, folder, damaged, self.is_config, self.is_log)

    def kept(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"case-{self.name.replace('/', '-')}{self.suffix}"
        path.write_bytes(self.content)
        return path

    def wrong(self, ended: server.Ended) -> str | None:
        """A log that is read without complaint must give what was written."""
        if not self.is_log or self.command != "replay" or ended.code != 0:
            return None
        got = json.loads(ended.stdout)
        if got["verified"] and got["dropped"] == {} and got["rows"] == seeds.NUM_BATCHES * seeds.NUM_ROWS:
            return None
        return "a damaged log was read as whole, with another result"


def drawn(seed: int, number: int, no_replay: bool) -> Case:
    rng = random.Random(f"{seed} {number}")
    first = rng.choice(_seeds())
    kind, content = mutate(first, rng)
    command = rng.choice(COMMANDS)
    # A damaged number in a configuration may ask for tables of any size, and be right to.
    if command == "replay" and (no_replay or first.is_config):
        command = "validate"
    description = f"{command} of {first.name}, {kind}"
    return Case(str(number), _kind(first), description, content, first.suffix, command, first.is_config, first.is_log)


def drawn_manifest(seed: int, number: int) -> Case:
    """A checkpoint with a forged manifest."""
    rng = random.Random(f"manifest {seed} {number}")
    kind, content = forged(_checkpoint()[MANIFEST], rng)
    command = rng.choice(MANIFEST_COMMANDS)
    return Case(f"manifest-{number}", "manifest", f"{command}, {kind}", content, ".commit", command, is_manifest=True)


def crafted(no_replay: bool, only: str | None = None) -> list[Case]:
    """Every crafted input through every command, or the case of this name."""
    commands = sorted(set(COMMANDS) - ({"replay"} if no_replay else set()))
    wanted = None if only is None else only.rpartition("-")[0]
    return [
        Case(f"{name}-{command}", "crafted", f"{command} of {name}", content, suffix, command)
        for name, (suffix, content) in server.apart(functools.partial(crafted_inputs, wanted)).items()
        for command in commands
    ]


def by_hand(one_of: int) -> list[Case]:
    """Every so many-th message that was made by hand, the commands in turn."""
    return [
        Case(f"{name}-{command}", "handmade", f"{command} of {name}", content, suffix, command)
        for number, (name, (suffix, content)) in enumerate(server.apart(handmade_inputs).items())
        for command in [COMMANDS[1 + number // one_of % 3]]
        if number % one_of == 0
    ]


def good(command: str, folder: Path) -> list[str]:
    """The command on a small good file."""
    if command in ("export", "diff"):
        return _manifest_words(command, folder, _checkpoint())
    first = next(seed for seed in _seeds() if seed.name == "plain/parquet-none")
    path = folder / "good.parquet"
    path.write_bytes(first.content)
    return _words(command, folder, path, False, False)


def _words(command: str, folder: Path, path: Path, is_config: bool, is_log: bool) -> list[str]:
    config = folder / "good.pbtxt"
    config.write_text(seeds.ENGINE_CONFIG)  # whose table "user" is dynamic
    source = folder / "good.arrows"
    if is_config and not source.exists():
        source.write_bytes(_seeds()[0].content)
    if command == "inspect":
        return ["inspect", str(path)]
    paths = [str(path), str(source)] if is_config else [str(config), str(path)]
    return [command, *paths, *(["--json"] if is_log and command == "replay" else [])]


def _manifest_words(command: str, folder: Path, files: Mapping[str, bytes]) -> list[str]:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    for name, content in files.items():
        (run / name).write_bytes(content)
    if command == "export":
        return ["export", str(run), str(folder / "exported")]
    if command == "diff":
        return ["diff", str(run), str(run)]
    if command == "inspect":
        return ["inspect", str(run)]
    config, source = folder / "good.pbtxt", folder / "good.arrows"
    config.write_text(seeds.ENGINE_CONFIG)
    source.write_bytes(_seeds()[0].content)
    return ["replay", str(config), str(source), "--checkpoint", str(run), "--resume", "--no-hash"]


@functools.cache
def _checkpoint() -> dict[str, bytes]:
    return server.apart(seeds.checkpoint)


def _kind(seed: Seed) -> str:
    layout, container = seed.name.split("/")
    layout = layout if layout in ("config", "example") else "rows"
    return f"{layout} {container.partition('-')[0]}"


@functools.cache
def _seeds() -> list[Seed]:
    return server.apart(seeds.all_seeds)
