"""Configurations as recorded from TensorFlow: what a description in the recordings says, in penstock's classes."""

from typing import Any

import penstock


class EqualCallable:
    """A learning rate that equals every other one of the same value."""

    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value

    def __eq__(self, other):
        return isinstance(other, EqualCallable) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Schedule:
    def rate(self):
        return 0.5


def value(tagged, known):
    """A Python value of the recorded description; ``known`` are the callables and objects of the case by name."""
    if isinstance(tagged, list):
        return [value(v, known) for v in tagged]
    if not isinstance(tagged, dict):
        return tagged
    match next(iter(tagged)):
        case "$tuple":
            return tuple(value(v, known) for v in tagged["$tuple"])
        case "$callable":
            return known.setdefault(tagged["$callable"], lambda: tagged.get("value"))
        case "$bound_method":
            return known.setdefault(tagged["$bound_method"], Schedule()).rate
        case "$equal_callable":
            return EqualCallable(tagged["$equal_callable"])
        case "$optimizer":
            return getattr(penstock, tagged["$optimizer"])(**arguments(tagged["kwargs"], known))
        case "$quant":
            return penstock.QuantizationConfig(*tagged["$quant"])
        case "$float":
            return float(tagged["$float"])
        case "$str_dtype":
            return tagged["$str_dtype"]
        case "$table":
            return penstock.TableConfig(10, 4, name=f"ready_{tagged['$table']}")
    raise AssertionError(tagged)


def arguments(described, known):
    return {name: value(v, known) for name, v in described.items()}


def from_features(case):
    """The configuration that a case describes, with the callables it uses."""
    known: dict[str, Any] = {}
    tables = [penstock.TableConfig(**arguments(table, known)) for table in case["tables"]]

    def feature(described):
        return penstock.FeatureConfig(
            **arguments({**described, "table": None}, known) | {"table": tables[described["table"]]}
        )

    features = case["features"]
    structure = (
        {name: feature(f) for name, f in features.items()}
        if isinstance(features, dict)
        else [feature(f) for f in features]
    )
    strategy = case.get("strategy", {})
    return penstock.EmbeddingConfig.from_features(
        structure,
        batch_size=case.get("per_replica_batch_size"),
        optimizer=value(case["optimizer"], known),
        num_hosts=strategy.get("num_hosts", 1),
        num_replicas=strategy.get("num_replicas", 2),
        num_cores_per_replica=strategy.get("num_cores_per_replica"),
        per_replica_input_shapes=case.get("per_replica_input_shapes"),
        pipeline_execution_with_tensor_core=case.get("pipeline", False),
    )
