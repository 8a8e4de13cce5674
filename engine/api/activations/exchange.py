"""The two halves of a training step around a model: receive activations, send their gradients.

Mirrors XlaRecvTPUEmbeddingActivations and XlaSendTPUEmbeddingGradients.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.api.activations.batch_shape import num_samples
from penstock.api.activations.deduplication import (
    DeduplicationData,
    FeatureUses,
    UsesByPath,
    check_fingerprint,
    check_unique_ids,
    check_uses,
    fingerprint,
)
from penstock.api.activations.inputs import lookups
from penstock.api.activations.nesting import features_of, leaves, name_of, structure_for
from penstock.base.array_conversion import as_numbers
from penstock.base.errors import InputError, StateError, UsageError, UsageTypeError
from penstock.core.engine_core import EngineCore
from penstock.model.combiners import Lookups, combine, not_finite
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.features import flatten, pack
from penstock.model.frames import Float32, Frame, Int64, Rows, time_given
from penstock.rows.bridge.tracing import is_staging


class Exchange:
    """``recv`` and ``send`` of one engine; records what was sent, so that no gradient is applied twice."""

    def __init__(self, config: EmbeddingConfig, core: EngineCore) -> None:
        self._config, self._core = config, core
        self._fingerprint = fingerprint(config)
        # Pipelined, forward n+1 runs before backward n, so one step passes before gradients arrive.
        self._lag = int(config.to_engine_proto().tpu_embedding_configuration.pipeline_execution_with_tensor_core)
        self._lock = threading.Lock()
        self._received = 0
        self._sent: dict[int, int] = {}  # number → step, of data that could still be sent again

    def recv(self, features: Any, weights: Any = None) -> tuple[Any, DeduplicationData]:
        """Return activations nested like ``features``, and deduplication data for ``send`` of the same step.

        features, weights : as for ``Engine.recv_activations``
        An activation is float32 of its feature's input shape + [dim].
        """
        self._check_not_staging("recv_activations", "pass its activations to the jitted function")
        config = self._config
        unique, uses = deduplicated(config, features, weights)
        with self._core.reading():
            step, tables = self._core.global_step, self._core.tables
            rows = {name: tables.lookup(name, ids, True) for name, ids in unique.items()}  # as a forward pass sees them
        activations = {}
        for index, (feature, use) in enumerate(zip(config.features, uses, strict=True)):
            combined = combine(rows[feature.table], use.samples, use.gains, num_samples(feature), use.rows)
            activations[index] = combined.reshape(*feature.input_shape, combined.shape[1])
        with self._lock:
            self._received += 1
            number = self._received
        data = DeduplicationData(self._fingerprint, step, number, unique, UsesByPath(config, uses))
        structure = structure_for(config, features)
        return pack(structure, (activations[index] for index in flatten(structure))), data

    def send(self, gradients: Any, learning_rates: Any, data: DeduplicationData | None, time: Any = None) -> bool:
        """Push the gradients of activations as one frame. Return False if the gate found it stale.

        gradients : nested like the features, float32 of the activations' shapes, None for zeros
        time : of the frame, in seconds
        Raises InputError, StateError, UsageError, UsageTypeError. After a failed push the data can be sent again.
        """
        self._check_not_staging("send_gradients", "return the gradients from the jitted function")
        if data is None:
            raise StateError(
                "send_gradients needs deduplication_data=: what recv_activations gave with the activations"
            )
        if not isinstance(data, DeduplicationData):
            got = type(data).__name__
            raise UsageError(f"deduplication_data: expected a DeduplicationData (unpack makes one), got {got}")
        check_fingerprint(self._fingerprint, data.fingerprint)
        _check_scalars(learning_rates)
        seconds = time_given(time, self._config.needs_time, "send_gradients()")
        structure = structure_for(self._config, gradients)
        by_feature = leaves(structure, gradients, "gradients")
        frame = self._frame(data, [self._checked(index, by_feature[index]) for index in sorted(by_feature)], seconds)
        self._claim(data)
        try:
            return self._core.take_in(frame, learning_rates)
        except BaseException:
            self._release(data)
            raise

    def _check_not_staging(self, method: str, instead: str) -> None:
        if is_staging():
            raise UsageError(
                f"{method} was called inside jax.jit, where it would run once and not at every step: call it outside, "
                f"and {instead}; inside, use penstock.functional's EmbeddingTables"
            )

    def _checked(self, index: int, gradient: Any) -> Float32 | None:
        """Return a feature's gradient as float32 (samples, dim), or None, which means zeros."""
        feature, name = self._config.features[index], name_of(self._config, index)
        if gradient is None:
            return None
        shape = (*feature.input_shape, self._config.sizes[feature.table][1])
        array = as_numbers(gradient, f"gradient of {name}", UsageError)
        if array.dtype != np.float32:
            raise UsageTypeError(f"gradient of {name}: expected float32, got {array.dtype}; cast it")
        if array.shape != shape:
            raise UsageError(f"gradient of {name}: expected shape {list(shape)}, got {list(array.shape)}")
        finite = np.isfinite(array)
        if not finite.all():
            position = tuple(np.argwhere(~finite)[0].tolist())
            raise InputError(
                f"gradient of {name}: expected finite values, got {array[position]} at {list(position)}",
                reason="gradient_not_finite",
            )
        # No defensive copy, which would cost a pass: send() sums the frame before it returns.
        return np.ascontiguousarray(array).reshape(-1, shape[-1])

    def _frame(self, data: DeduplicationData, gradients: Sequence[Float32 | None], time: int | None) -> Frame:
        """Return the frame with each table's rows: its features in order, the lookups of each in order."""
        of_feature = {}
        for table, ids in data.unique_ids.items():
            check_unique_ids(table, ids, self._config.id_ranges[table][0])
        for index, (uses, gradient) in enumerate(zip(data.features.values(), gradients, strict=True)):
            if len(uses.rows):
                of_feature[index] = self._rows(index, data, uses, gradient)
        blocks: dict[str, list[Rows]] = {}
        for index, rows in of_feature.items():
            blocks.setdefault(self._config.features[index].table, []).append(rows)
        # Gradients belong to the step that they are applied in: pipelined, the one after the step of their rows.
        frame = Frame(
            {table: tuple(of_table) for table, of_table in blocks.items()},
            sum(len(rows.ids) for rows in of_feature.values()),
            max(data.step + self._lag, 0),
            source="send_gradients()",
            truncated=data.truncated,
            time=time,
        )
        # The gradients are finite, but may overflow times a weight: ``audit`` checks that when the sum is not finite.
        weighted = any(rows.gains is not None for rows in of_feature.values())
        return replace(frame, audit=partial(self._audited, frame, of_feature)) if weighted else frame

    def _rows(self, index: int, data: DeduplicationData, uses: FeatureUses, gradient: Float32 | None) -> Rows:
        feature = self._config.features[index]
        counts = len(data.unique_ids[feature.table]), num_samples(feature)
        check_uses(name_of(self._config, index), uses.rows, uses.samples, uses.gains, *counts)
        if gradient is None:
            gradient = np.zeros((num_samples(feature), self._config.sizes[feature.table][1]), np.float32)
        gains = None if uses.gains is None else np.ascontiguousarray(uses.gains, np.float32)
        return Rows(data.unique_ids[feature.table][uses.rows], gradient, uses.samples.astype(np.int64), gains)

    def _audited(self, frame: Frame, of_feature: Mapping[int, Rows]) -> Frame:
        for index, rows in of_feature.items():
            if rows.which is not None and not_finite(rows.grads, rows.which, rows.gains).any():
                name = name_of(self._config, index)
                problem = f"gradient of {name}: times a weight it is not finite as float32"
                raise InputError(problem, reason="gradient_not_finite")
        return frame

    def _claim(self, data: DeduplicationData) -> None:
        """Record data as sent. Raises StateError if it was sent before or its step is wrong.

        A step that has passed is wrong only if a step has one frame; otherwise the gate decides.
        """
        step = self._core.global_step
        if data.step > step:
            raise StateError(f"the deduplication data is of step {data.step}, and the engine's step is {step}")
        if self._core.gate.num_required == 1 and data.step + self._lag < step:
            raise StateError(
                f"the deduplication data is of step {data.step}, and the engine's step is {step}: its gradients come "
                "too late; receive activations again"
            )
        with self._lock:
            self._sent = {n: sent_step for n, sent_step in self._sent.items() if sent_step + self._lag >= step}
            if data.number in self._sent:
                raise StateError("gradients of this deduplication data were sent before; receive activations again")
            self._sent[data.number] = data.step

    def _release(self, data: DeduplicationData) -> None:
        with self._lock:
            self._sent.pop(data.number, None)


def _check_scalars(rates: Any) -> None:
    """Raise UsageError for a rate that is an array. Resolving the rates checks that there is one per tag."""
    values = rates.values() if isinstance(rates, Mapping) else rates
    for rate in values if np.iterable(values) else ():
        if np.ndim(rate):
            raise UsageError(f"learning_rates: expected scalars, one per dynamic tag, got shape {np.shape(rate)}")


def deduplicated(
    config: EmbeddingConfig, features: Any, weights: Any = None
) -> tuple[dict[str, Int64], tuple[FeatureUses, ...]]:
    """Return the lookups of a batch: unique ids by table, ascending, and every feature's uses in order.

    features, weights : as for ``Engine.recv_activations``. Needs only the configuration, not the tables.
    """
    by_feature = _lookups(config, features, weights)
    unique: dict[str, Int64] = {}
    uses: dict[int, FeatureUses] = {}
    for table in config.table_names:
        indices = [index for index, feature in enumerate(config.features) if feature.table == table]
        ids = np.concatenate([np.zeros(0, np.int64), *(by_feature[index].ids for index in indices)])
        unique[table], inverse = np.unique(ids, return_inverse=True)
        ends = np.cumsum([len(by_feature[index].ids) for index in indices])
        for index, rows in zip(indices, np.split(inverse, ends[:-1]) if indices else [], strict=True):
            lookup = by_feature[index]
            uses[index] = FeatureUses(
                rows.astype(np.uint32), lookup.samples.astype(np.uint32), lookup.gains, lookup.truncated
            )
    return unique, tuple(uses[index] for index in range(len(by_feature)))


def _lookups(config: EmbeddingConfig, features: Any, weights: Any) -> list[Lookups]:
    structure = structure_for(config, features)
    ids = leaves(structure, features, "features")
    weights_by_index = dict.fromkeys(ids) if weights is None else leaves(structure, weights, "weights")
    return [
        lookups(feature, name_of(config, i), config.id_ranges[feature.table][0], ids[i], weights_by_index[i])
        for i, feature in enumerate(features_of(config))
    ]
