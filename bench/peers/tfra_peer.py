"""TensorFlow Recommenders Addons: its cuckoo hash table, with rows as values. A new key is one that the table lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra

from penstock.bench.contestants import KeyWay


def ways(threads: int) -> list[KeyWay]:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return [
        KeyWay(
            "tfra_cuckoo",
            "tensorflow_recommenders_addons",
            lambda capacity: CuckooTable(capacity),
            lambda table, keys: table.number(keys),
            look_up=lambda table, keys: table.rows(keys),
            convert=tf.constant,
            to_numpy=lambda tensor: np.asarray(tensor),
        )
    ]


class CuckooTable:
    def __init__(self, capacity: int) -> None:
        self._table = tfra.dynamic_embedding.CuckooHashTable(
            tf.int64, tf.int64, tf.constant([-1], tf.int64), init_size=capacity
        )
        self._num_keys = 0

    def rows(self, keys: Any) -> Any:
        return tf.reshape(self._table.lookup(keys), [-1])

    def number(self, keys: Any) -> Any:
        rows = self.rows(keys)
        new = tf.boolean_mask(keys, rows < 0)
        num_new = int(new.shape[0])
        if not num_new:
            return rows
        numbers = tf.range(self._num_keys, self._num_keys + num_new, dtype=tf.int64)
        self._table.insert(new, tf.reshape(numbers, [-1, 1]))
        self._num_keys += num_new
        return tf.tensor_scatter_nd_update(rows, tf.where(rows < 0), numbers)
