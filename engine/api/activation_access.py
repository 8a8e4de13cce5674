"""Activations out of an engine's tables, and their gradients in, as TensorFlow's TPU embedding exchanges them."""

from __future__ import annotations

from typing import Any

from penstock.api.activations.deduplication import DeduplicationData
from penstock.api.activations.exchange import Exchange
from penstock.core.engine_core import EngineCore
from penstock.model.learning_rates import Rates


class ActivationAccess:
    """The methods of an Engine that receive activations and send their gradients."""

    core: EngineCore
    _exchange: Exchange

    def recv_activations(self, features: Any, weights: Any = None) -> tuple[Any, DeduplicationData]:
        """Look up a batch: return its activations, and the data that ``send_gradients`` needs.

        Parameters
        ----------
        features : nested like the configuration's features
            The ids of each feature: lists, arrays, ragged or sparse values, or CooIds (docs/activations.md).
        weights : nested like ``features``, or None
            The weight of each id.

        Returns
        -------
        activations : nested like ``features``
            float32, the feature's input shape followed by dim.
        deduplication_data : DeduplicationData
            The lookups, for ``send_gradients``.

        Raises
        ------
        InputError
            If an id or a weight is invalid.
        UsageError
            If the structure or a shape does not match the configuration.
        ConfigError
            If the configuration has no features.

        References
        ----------
        TensorFlow's ``XlaRecvTPUEmbeddingActivations`` and ``XlaRecvTPUEmbeddingDeduplicationData``

        Examples
        --------
        >>> import numpy as np
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> engine = ps.Engine(config)
        >>> activations, dedup = engine.recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> activations["clicked"]
        array([[2., 2.],
               [0., 0.],
               [1., 1.]], dtype=float32)
        """
        with self.core.sharing_errors():
            return self._exchange.recv(features, weights)

    def send_gradients(
        self,
        gradients: Any,
        learning_rates: Rates = None,
        deduplication_data: DeduplicationData | None = None,
        time: int | None = None,
    ) -> bool:
        """Apply gradients of activations as one frame.

        Parameters
        ----------
        gradients : nested like the configuration's features
            float32, each of the shape of its activation; None at a leaf means zeros.
        learning_rates : mapping of int to float, sequence of float or None
            By tag; take precedence over the schedules.
        deduplication_data : DeduplicationData or None
            What ``recv_activations`` returned for this batch.
        time : int or None
            Of the frame, in seconds, for tables with the clock "time", which need it.

        Returns
        -------
        bool
            False if the frame was stale and dropped.

        Raises
        ------
        InputError
            If a gradient is not finite; nothing is applied then.
        ConfigError
            If a dynamic learning rate has no value.
        UsageError
            If the structure, a shape or a dtype does not match the activations.
        StateError
            If ``deduplication_data`` is missing or belongs to another configuration.

        References
        ----------
        TensorFlow's ``XlaSendTPUEmbeddingGradients``

        Examples
        --------
        >>> import numpy as np
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> engine = ps.Engine(config)
        >>> activations, dedup = engine.recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> engine.send_gradients({"clicked": np.ones((3, 2), np.float32)}, deduplication_data=dedup)
        True
        >>> engine.lookup("item", [7, 3])
        array([[0. , 0. ],
               [0.5, 0.5]], dtype=float32)
        """
        with self.core.sharing_errors():
            return self._exchange.send(gradients, learning_rates, deduplication_data, time)
