"""Reads the ids of a log once, and follows keys and rows under every choice through the gate, as a replay would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from math import ceil, log2
from typing import Any

import penstock.base.interrupts as interrupts
from penstock.api.planning.choices import Choice
from penstock.api.planning.comparison import compared
from penstock.api.planning.forecast import LEAST_SHARD_BITS, Forecast, Opening, Openings, shard_bits
from penstock.base.errors import ConfigError, InputError
from penstock.base.html_tables import html_table
from penstock.base.threads import ThreadTeam
from penstock.base.validation import INT64_MAX
from penstock.core.pipeline import Pipeline, store_of
from penstock.core.trial_gate import TrialGate
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Frame
from penstock.model.gate_policy import GatePolicy
from penstock.model.stats import Counters, GateProgress, too_stale
from penstock.model.workers import frame_in_rounds
from penstock.pyx.keys.shard_sample import sampled
from penstock.rows.key_directory import bytes_of_directories, keys_of_opening

# Rows of all directories together that are followed exactly, 40 to 60 bytes each.
EXACT_ROWS = 100_000_000
# Keys that several choices follow at once: handing fewer to a thread costs as much as following them.
KEYS_AT_ONCE = 1 << 17
Progress = Callable[[Counters, GateProgress, float | None], None]


def reading(config: EmbeddingConfig, **options: Any) -> ReadOptions:
    """Return the options for reading a log without its gradients. options : the others of ReadOptions"""
    sizes = {name: (ids, 0) for name, (ids, _) in config.id_ranges.items()}
    return ReadOptions.of_config(config, options, sizes=sizes, num_tags=None, ids_only=True, unvalidated=True)


class Planner:
    """Follows the keys of dynamic tables and the rows of cached ones in a log, under several choices at once.

    policy : what opens the gate; None: the configuration's
    seed : of the tables: it decides about shards, victims and admission by chance
    sample : the share of the keys to follow; None: all, or if the directories have more than EXACT_ROWS rows together,
        as many as these. A table is never followed in fewer than 16 virtual shards, unless it has fewer

    counters : of the frames; gate : which they go through; forecasts : one per choice
    read_all : whether ``run`` has read its source to the end, or up to the limit
    Raises ConfigError for a configuration without a dynamic or cached table, and UsageError for choices that contradict
    it.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        choices: Sequence[Choice],
        *,
        policy: GatePolicy | None = None,
        seed: int = 0,
        threads: int | None = None,
        sample: float | None = None,
    ) -> None:
        specs = {spec.name: spec for spec in config.at_step(INT64_MAX).tables}
        trained = {name: spec for name, spec in specs.items() if spec.trainable}
        dynamic = [name for name, spec in trained.items() if spec.dynamic is not None]
        cached = [name for name, spec in trained.items() if spec.placement.where == "cached"]
        _check_subject(choices, bool(dynamic), bool(cached), "" if trained == specs else " that is trained")
        if config.mode == "INFERENCE":
            raise ConfigError("the configuration's mode is INFERENCE, which refuses updates; use TRAINING")
        planned = {name: specs[name] for name in dict.fromkeys([*dynamic, *cached])}
        chosen = [{name: choice.of(specs[name]) for name in dynamic} for choice in choices]
        num_rows = sum(spec.vocabulary_size for of_choice in chosen for spec in of_choice.values())
        share = min(1.0, EXACT_ROWS / num_rows) if sample is None and num_rows else sample or 1.0
        self._sample_bits = {}  # by dynamic table
        for name in dynamic:
            fewest = min(shard_bits(of_choice[name].vocabulary_size) for of_choice in chosen)
            bits = max(0, min(ceil(-log2(share)), fewest - LEAST_SHARD_BITS))
            self._sample_bits[name] = 0 if name in cached else bits  # rows that make room belong to all keys
        bytes_of_directories([(by_table[name], self._sample_bits[name]) for by_table in chosen for name in dynamic])
        self.forecasts = [Forecast(choice, planned, self._sample_bits, seed) for choice in choices]
        self._cached, settings = cached, {name: [of_choice[name].dynamic for of_choice in chosen] for name in dynamic}
        stores = {
            name: store_of(
                spec,
                sums=False,
                count_rows=any(setting is not None and setting.counts_rows for setting in settings.get(name, ())),
            )
            for name, spec in specs.items()
        }
        self.pipeline = Pipeline(stores, ThreadTeam(threads))
        self._policy = policy or config.gate_policy
        self._trial = TrialGate(self._policy, self.pipeline, self._step, config.tables)
        self.gate = self._trial.gate
        self.counters = Counters()
        self.read_all = False
        self._ahead: list[Openings] = []  # of the choices, which follow several steps at once
        self._num_ahead = 0  # keys

    @property
    def num_pending(self) -> int:
        """Frames in the gate."""
        return self._trial.num_pending

    @property
    def is_over(self) -> bool:
        """Whether a table is full under every choice, so that nothing more can be learned."""
        return all(forecast.full is not None for forecast in self.forecasts)

    def run(
        self,
        reader: FrameReader,
        *,
        limit: int | None = None,
        flush: bool = False,
        max_stale: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Push the frames of a source, read as ``reading`` says, until it ends or the plan is over.

        limit, flush, max_stale, progress : as for ``Engine.run``. Raises InputError and StateError.
        """
        try:
            self._push_all(reader, limit, flush, progress)
        except InputError:
            self._follow(to_the_end=True)
            if not self.is_over:  # else the plan ended before the bad row
                raise
        self._follow(to_the_end=True)
        problem = too_stale(self.counters.stale_rows, self.counters.rows, max_stale)
        if problem is not None and not self.is_over:
            raise InputError(problem)

    def _push_all(self, reader: FrameReader, limit: int | None, flush: bool, progress: Progress | None) -> None:
        names = self._policy.names_of_sources(len(reader.sources))
        with closing(reader.numbered()) as numbered:
            for number, frame in islice(numbered, limit):
                if self._policy.workers is not None:
                    frame = frame_in_rounds(frame, number, names)
                if not frame.is_void:
                    self.push(frame)
                if progress is not None:
                    progress(self.counters, self.gate, reader.fraction())
                interrupts.check()
                if self.is_over:
                    return
        self.read_all = True
        if flush:
            self._trial.open(early=True)

    def _repr_html_(self) -> str:
        """Return the choices as tables for notebooks, a row per choice and table."""
        return "".join(html_table(*table) for table in compared(self.forecasts))

    def push(self, frame: Frame) -> None:
        """Push one frame, and step if that opens the gate. Raises InputError for a bad row."""
        self.counters.count(*self._trial.admit(frame))
        self._trial.open()

    def _step(self) -> None:
        uses = {name: [frame.ids for frame in self.pipeline.stores[name].look()[0]] for name in self._cached}
        openings = Openings(dict(self._of_tables()), self.gate.global_step, self.pipeline.time, uses)
        if self._cached or len(self.forecasts) > 1:
            self._ahead.append(openings.copy())
            self._num_ahead += openings.num_keys
            if self._num_ahead >= KEYS_AT_ONCE:
                self._follow()
        else:
            self.forecasts[0].step(openings, self.pipeline.team.run)
        self.counters.steps += 1

    def _follow(self, to_the_end: bool = False) -> None:
        ahead, self._ahead, self._num_ahead = self._ahead, [], 0
        self.pipeline.team.run([partial(forecast.follow, ahead, to_the_end) for forecast in self.forecasts])

    def _of_tables(self) -> Iterator[tuple[str, Opening]]:
        for name, bits in self._sample_bits.items():
            directory = self.forecasts[0].directories[name]
            opening = Opening(*keys_of_opening(*self.pipeline.stores[name].look(), directory.array))
            yield name, opening if bits == 0 else opening.at(sampled(directory, opening.keys, bits))


def _check_subject(choices: Sequence[Choice], is_dynamic: bool, is_cached: bool, which: str) -> None:
    """Raise ConfigError if no table has what the choices are about. which : tables were looked at"""
    subject = f"no table of the configuration{which}"
    if not is_dynamic and not is_cached:
        both = "is dynamic or has the placement CACHED: there is nothing to plan"
        raise ConfigError(f"{subject} {both} (docs/dynamic.md, docs/placement.md)")
    if any(choice.capacity or choice.settings for choice in choices) and not is_dynamic:
        raise ConfigError(f"{subject} is dynamic: remove capacity, min-count and expire (docs/dynamic.md)")
    if any(choice.placement for choice in choices) and not is_cached:
        raise ConfigError(f"{subject} has the placement CACHED: remove device-bytes and look-ahead (docs/placement.md)")
