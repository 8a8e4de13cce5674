"""What a history happens to: services of one lineage, a store, its followers, and the rows that each position has.

The rows of a position are those of a separate engine, which the pushed frames were applied to.
"""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field

from limits import HANG_S
from services import client_of, free_port, service_of
from stores import config_of, frame, rows_of

import penstock as ps
from penstock.base.errors import InputError, PenstockError, StateError, TargetError
from penstock.serving.flight import connect
from penstock.serving.flight.connection import Address
from penstock.serving.followers.follower import Follower
from penstock.serving.service.limits import Limits

# Lines that a follower may end with.
REASONS = ("another follower is ahead: it holds step",)
# A round fails if the store has just been restarted, or the service is not there.
PASSING = (TargetError, InputError)
MOST_ROUNDS = 20


class FaultError(AssertionError):
    """The property does not hold."""


@dataclass
class Copy:
    """One folder of checkpoints, and the service that runs on it. frames : the number of each frame that it contains"""

    folder: object
    port: int
    frames: list = field(default_factory=list)
    service: object = None
    running: ExitStack | None = None


class World:
    """Everything that a history changes. draw : of random numbers; log : what happened"""

    def __init__(self, store, folder, draw):
        self.store, self.folder, self.draw, self.log = store, folder, draw, []
        self.config = config_of()
        self.copies = [Copy(folder / "a", free_port()), Copy(folder / "b", free_port())]
        self.backups, self.snapshots = [], []
        self.frames_of = {}  # of each epoch, shared with the copy that continues it
        self.twin, self.states = None, {}
        self.followers = [None, None]
        self.num_frames, self.num_ended, self.num_named = 0, 0, 0
        self.start(self.copies[0])

    def close(self):
        for follower in filter(None, self.followers):
            self._close(follower)
        for copy in self.copies:
            self.stop(copy)

    # ---- the services

    def start(self, copy):
        """Start a service on a folder, empty or not. Its epoch has all frames of the folder."""
        is_new = not copy.folder.exists()
        engine = ps.Engine(self.config) if is_new else ps.Engine.restore(copy.folder)
        copy.frames = copy.frames[: engine.global_step]
        limits = Limits(delta_bytes=int(self.draw.choice([2_000, 1 << 20, 1 << 20, 1 << 20])))
        arguments = {"limits": limits, "per_steps": int(self.draw.integers(1, 4))}
        copy.running = ExitStack()
        address = Address("127.0.0.1", copy.port, False)
        running = service_of(engine, folder=copy.folder, resume=not is_new, address=address, **arguments)
        copy.service = copy.running.enter_context(running)
        self.frames_of[copy.service.status()["epochs"][-1][0]] = copy.frames

    def stop(self, copy):
        if copy.running is not None:
            copy.running.close()
            copy.running = copy.service = None

    def restart(self, copy, folder=None, frames=None):
        """Kill a service and start it again. folder, frames : what its folder is replaced by"""
        before = self.folder / "killed"
        shutil.copytree(copy.folder, before) if folder is None else None  # its end commits, a kill does not
        self.stop(copy)
        if copy.folder.exists():
            shutil.rmtree(copy.folder)
        shutil.copytree(folder or before, copy.folder)
        shutil.rmtree(before, ignore_errors=True)
        copy.frames = list(copy.frames if frames is None else frames)
        self.start(copy)

    def push(self, copy):
        """Push frames: a step each, one commit. Keep a backup of the folder."""
        numbers = range(self.num_frames, self.num_frames + int(self.draw.integers(1, 5)))
        self.num_frames = numbers.stop
        copy.frames.extend(numbers)
        with client_of(copy.service) as client:
            client.put([frame(number) for number in numbers], "w0")
        backup = self.folder / f"backup-{len(self.backups)}"
        shutil.copytree(copy.folder, backup)
        self.backups.append((backup, list(copy.frames)))

    def remove_commits(self, copy):
        """Remove the newest commits of a service, as its error about a damaged one advises."""
        self.stop(copy)
        commits = sorted(copy.folder.glob("*.commit"))
        for commit in commits[len(commits) - int(self.draw.integers(0, len(commits))) :]:
            commit.unlink()
        copy.frames = list(copy.frames)
        self.start(copy)

    # ---- the followers

    def follow_anew(self, number, copy=None):
        """Start a follower. copy : that it follows"""
        if self.followers[number] is not None:
            self._close(self.followers[number])
        address = f"grpc://127.0.0.1:{(copy or self.copies[0]).port}"
        client = connect(address, patience_s=0.05)
        self.followers[number] = Follower(client, self.store.open_target(), 0.0, 0.0)

    def round(self, number, between=None):
        """Let a follower do one round. between : called once inside its next transaction, or before it"""
        follower = self.followers[number]
        if between is not None:
            _interrupt(follower.target, self.store.is_optimistic, between)
        try:
            return follower.round()
        except PASSING as error:
            self.log.append(f"  {number}: {error}")
        except StateError as error:
            self.log.append(f"  {number} ends: {error}")
            if not any(reason in str(error) for reason in REASONS):
                raise FaultError(f"a follower ended with: {error}") from error
            self.num_ended += 1
            self.follow_anew(number, chosen(self.draw, [copy for copy in self.copies if copy.service]))
        except PenstockError as error:
            raise FaultError(f"a follower ended with: {type(error).__name__}: {error}") from error
        finally:
            _resume(follower.target)
        return None

    def catch_up(self, number):
        for _ in range(MOST_ROUNDS):
            if self.round(number):
                return

    # ---- what has to hold

    def rows_at(self, position):
        """The rows of a position, by the frames that were pushed."""
        epoch, step = position
        if epoch not in self.frames_of:
            raise FaultError(f"the store names epoch {epoch}, which no service had")
        frames = tuple(self.frames_of[epoch][:step])
        if len(frames) < step:
            raise FaultError(f"the store names step {step} of epoch {epoch}, which had {len(frames)}")
        if frames not in self.states:
            if self.twin is None or self.twin[0] != frames[: len(self.twin[0])]:
                self.twin = (), ps.Engine(self.config)
            done, engine = self.twin
            for end in range(len(done), len(frames)):
                engine.run(iter([frame(frames[end])]))
                self.states[frames[: end + 1]] = rows_of(engine)
            self.states.setdefault(frames, rows_of(engine))
            self.twin = frames, engine
        return self.states[frames]

    def check(self):
        """Raise FaultError unless the store has the rows of the position that it names."""
        position = self.store.position()
        if position is None:
            return
        self.num_named += 1
        wanted, rows = self.rows_at(position), self.store.read()
        if rows != wanted:
            wrong = [
                (name, id_)
                for name in wanted
                for id_ in {*wanted[name], *rows[name]}
                if wanted[name].get(id_) != rows[name].get(id_)
            ]
            raise FaultError(f"the store names {position}, and {len(wrong)} rows differ: {wrong[:5]}")

    def check_end(self):
        """A new follower makes the store equal the first service."""
        copy = self.copies[0]
        for number in (0, 1):
            if self.followers[number] is not None:
                self._close(self.followers[number])
                self.followers[number] = None
        target = self.store.open_target()
        with client_of(copy.service) as client:
            Follower(client, target, HANG_S, 0.0).run(once=True)
        target.close()
        self.check()
        if self.store.position()[1] != len(copy.frames):
            raise FaultError(f"at the end the store names {self.store.position()}, not step {len(copy.frames)}")
        if self.store.read() != rows_of(copy.service.engine):
            raise FaultError("at the end the store differs from the service")

    def _close(self, follower):
        follower.target.close()
        follower.client.close()


def _interrupt(target, is_inside, between):
    """Call a function once: inside a target's next transaction, after it compared, or before the transaction."""

    def once(name, call):
        def interrupted(*arguments):
            _resume(target)
            call(*arguments) if is_inside else between()
            between() if is_inside else call(*arguments)

        setattr(target, name, interrupted)

    for name in ("compare",) if is_inside else ("apply", "replace"):
        once(name, getattr(target, name))


def _resume(target):
    for name in ("compare", "apply", "replace"):
        target.__dict__.pop(name, None)


def chosen(draw, sequence):
    return sequence[int(draw.integers(len(sequence)))]
