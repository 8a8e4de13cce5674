"""A job whose shares are engines of this process: every frame is routed to each of them in turn."""

import penstock as ps
from penstock.api.deltas import Deltas
from penstock.checkpoint.parts import join_parts
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Folder
from penstock.contrib.shares import Router, WholeTables, frames_of
from penstock.contrib.shares.joined_deltas import JoinedDeltas
from penstock.core.observers import Context
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.model.frames import FrameRun
from penstock.model.learning_rates import LearningRates
from penstock.model.options import DeltaOptions
from penstock.model.stats import Counters


class LocalJob:
    """Some shares of one state. folder : of a commit to begin with"""

    def __init__(self, config, count, folder=None, *, seed=0, sums=False, frames_per_block=3, **engine):
        self.config, self.count, self.frames_per_block = config, count, frames_per_block
        ranks = [(rank, count) for rank in range(count)]
        if folder is None:
            self.engines = [ps.Engine(config, seed=seed, share=rank, **engine) for rank in ranks]
        else:
            self.engines = [ps.Engine.restore(folder, config=config, share=rank, **engine) for rank in ranks]
        self.positions = self.engines[0].session.positions
        self.deltas = []
        self.router = Router(config, count, seed, sums=sums)

    def frames(self, sources, **options):
        read = ReadOptions(
            self.config.id_ranges, merge="round" if isinstance(sources, list) else None, num_tags=0,
            needs_time=self.config.needs_time, **options,
        )  # fmt: skip
        reader = FrameReader(sources, read)
        before, self.positions = self.positions, Positions([source.name for source in reader.sources], read.merge)
        frames = reader.numbered()
        before.skip(frames, self.positions)
        return frames

    def emit(self, **options):
        """Collect the deltas of all shares as those of one engine."""
        options = DeltaOptions(numbered=True, **options)
        changed_step = max(engine.core.changed_step for engine in self.engines)
        self._joined = JoinedDeltas(self.config.tables, options, changed_step)
        self._emitters = [Deltas(engine.core, options) for engine in self.engines]
        return self

    def _emit(self, batches_of):
        results = [list(batches_of(emitter)) for emitter in self._emitters]
        intervals = [
            [(engine.global_step, item)] if item else [] for engine, item in zip(self.engines, results, strict=True)
        ]
        self.deltas += self._joined.join(intervals)

    _emitters = ()

    def run(self, sources, limit=None, **options):
        frames, context = self.frames(sources, **options), Context(LearningRates(0, None, {}), Counters())
        dims = {spec.name: spec.dim for spec in self.config.tables}
        left = 10**9 if limit is None else limit
        while subset := [frame for _, frame in zip(range(min(self.frames_per_block, left)), frames, strict=False)]:
            left -= len(subset)
            block = self.router.block([frame for _, frame in subset])
            for engine, batch in zip(self.engines, block.batches, strict=True):
                for frame in frames_of(block.heads, batch, dims):
                    engine.core.push(FrameRun.of(frame), context).check()
            if self._emitters:
                self._emit(lambda emitter: emitter.due())
            for number, frame in subset:
                self.positions.count(number, FrameRun.of(frame), 0, 1)
        return self

    def commit(self, path, attempt="a0"):
        folder = Folder(path)
        folder.lock()
        number = folder.next_number()
        parts = [engine.session.write_part(folder, number, attempt) for engine in self.engines]
        join_parts(folder, number, parts, {"positions": self.positions.get_state()})
        folder.unlock()

    def flush(self):
        for engine in self.engines:
            engine.flush()
        if self._emitters:
            self._emit(lambda emitter: emitter.rest())
        return self

    @property
    def tables(self):
        return WholeTables(self.config, [engine.core.tables for engine in self.engines])

    def state_hash(self):
        (step,) = {engine.global_step for engine in self.engines}
        return self.tables.hash(step)
