"""The conditional accumulators reproduce TensorFlow's recorded traces event by event, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps

OWN_COPY = Path(__file__).parents[2] / "data" / "golden_accumulators.json"
# Recorded events of each file; results compared with tf_compat, and without it (ascending, distinct ids only).
FILES = {"dense": (201, 41, 41), "sparse": (200, 45, 32), "blocking": (20, 7, 7)}


def cases_of(path):
    return json.loads(path.read_text())["cases"]


def exact(array, dtype):
    """Shape and bits; -0.0 and 0.0 are two things, and so are the NaNs of two signs."""
    array = np.asarray(array, dtype)
    return array.shape, array.tobytes()


class Player:
    """Plays one case's events on an accumulator, and says of each what TensorFlow's trace says."""

    def __init__(self, case, tf_compat):
        self.case, self.sparse = case, case["kind"] == "sparse"
        settings = case["dtype"], case["shape"], case["reduction"]
        if self.sparse:
            self.acc = ps.SparseConditionalAccumulator(*settings, tf_compat=tf_compat)
        else:
            self.acc = ps.ConditionalAccumulator(*settings)
        self.takers = {}
        self.plain = True  # every gradient since the last take had ascending, distinct ids
        self.tf_compat = tf_compat
        self.num_results = 0

    def play(self, event):
        done = {name for name, future in self.takers.items() if future.done()}
        status, result = "ok", None
        try:
            result = getattr(self, event["op"])(event)
        except ps.TakeTimeoutError:
            status = "blocked_then_cancelled"
        except ps.InputError:  # TensorFlow's InvalidArgumentError, of a gradient
            status = "error" if event["op"] == "apply" else "not an error of this kind"
        except ps.UsageError:  # and of an argument
            status = "error" if event["op"] == "take" else "not an error of this kind"
        assert ("started" if event["op"] == "take_async" else status) == event["status"]
        assert self.acc.num_accumulated() == event["num_accumulated"]
        if "result" in event:
            self.compare(result, event["result"])
        resolved = [taker for taker in self.takers if self.takers[taker].done() and taker not in done]
        assert resolved == [entry["taker"] for entry in event.get("resolved", [])]
        for item in event.get("resolved", []):
            self.compare(self.takers[item["taker"]].result(), item["result"])

    def apply(self, event):
        values = np.array(event["values"], self.case["dtype"]).reshape(event["values_shape"])
        if not self.sparse:
            return self.acc.apply_gradient(values, event["local_step"])
        grad_shape = event["grad_shape"] if self.case["has_known_shape"] else None
        before = self.acc.num_accumulated()
        self.acc.apply_gradient(event["indices"], values, event["local_step"], grad_shape=grad_shape)
        if self.acc.num_accumulated() != before:
            self.plain = (self.plain or not before) and event["indices"] == sorted(set(event["indices"]))
        return None

    def take(self, event):
        return self.acc.take_gradient(event["num_required"], timeout=0)

    def take_async(self, event):
        self.takers[event["taker"]] = self.acc.take_gradient_async(event["num_required"])

    def set_global_step(self, event):
        self.acc.set_global_step(event["step"])

    def compare(self, got, wanted):
        dtype = self.case["dtype"]
        if not self.sparse:
            assert exact(got, dtype) == exact(wanted["value"], dtype)
            self.num_results += 1
        elif self.tf_compat or self.plain:
            assert got.indices.tolist() == wanted["indices"]
            values = np.array(wanted["values"], dtype).reshape(len(wanted["indices"]), *wanted["dense_shape"][1:])
            assert exact(got.values, dtype) == exact(values, dtype)
            assert got.dense_shape.tolist() == wanted["dense_shape"]
            self.num_results += 1
        self.plain = True


def play_all(cases, tf_compat):
    """How many events and how many results were compared."""
    players = [(Player(case, tf_compat), case) for case in cases if "events" in case]
    for player, case in players:
        for number, event in enumerate(case["events"]):
            try:
                player.play(event)
            except AssertionError as error:
                raise AssertionError(f"{case['id']}, event {number}: {error}") from error
    return sum(len(case["events"]) for _, case in players), sum(player.num_results for player, _ in players)


@pytest.mark.parametrize("tf_compat", [True, False], ids=["tf_compat", "ours"])
def test_decisive_cases_are_reproduced(tf_compat):
    assert play_all(cases_of(OWN_COPY), tf_compat) == (156, 35 if tf_compat else 30)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tf_compat", [True, False], ids=["tf_compat", "ours"])
@pytest.mark.promise("Conditional accumulators do what TensorFlow's do")
def test_every_recorded_event_is_reproduced(shared, name, tf_compat):
    events, exactly, plainly = FILES[name]
    actual = play_all(cases_of(shared(f"golden/accum_{name}.json")), tf_compat)
    assert actual == (events, exactly if tf_compat else plainly)


def test_dtypes_without_a_kernel_in_tensorflow_are_refused_when_made():
    (case,) = [case for case in cases_of(OWN_COPY) if case["id"] == "unsupported_dtypes"]
    for dtype in [unsupported_dtype["dtype"] for unsupported_dtype in case["unsupported_dtypes"]]:
        for kind in (ps.ConditionalAccumulator, ps.SparseConditionalAccumulator):
            with pytest.raises(ps.UsageError, match="dtype: expected one of float16, float32, float64"):
                kind(dtype)
    for dtype in case["supported_dtypes_measured"]:
        assert ps.ConditionalAccumulator(dtype).dtype.name == dtype
