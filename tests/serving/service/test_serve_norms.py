"""A service with a limit of contributors: frames that are left out are acknowledged, and counted."""

import numpy as np
from batches import batch
from services import DIM, VOCABULARY, client_of, config_of, service_of

import penstock as ps
from penstock.model.config.engine_config_pb2 import LimitSettings

FRAMES, POISONED = 106, {101, 102}


def config_with_limit():
    message = config_of().to_engine_proto()
    message.limit.CopyFrom(LimitSettings(contributor_norm=10.0, action=LimitSettings.QUARANTINE))
    return ps.EmbeddingConfig.from_proto(message)


def frames():
    for number in range(FRAMES):
        rng = np.random.default_rng(number)
        grads = rng.normal(size=(4, DIM)) * (1e6 if number in POISONED else 1)
        yield rng.integers(0, VOCABULARY, 4), grads.astype(np.float32)


def test_a_poisoned_producer_leaves_no_trace_and_is_acknowledged(tmp_path):
    engine, clean = ps.Engine(config_with_limit()), ps.Engine(config_of())
    with service_of(engine, tmp_path, every=10) as service, client_of(service) as client:
        with client.producer("worker") as producer:
            for each in frames():
                producer.send(batch(*each))
            ack = producer.wait()
        assert (ack.position, ack.dropped) == (FRAMES, {"norm_limit": 8})
        status = client.status()
        assert (status["frames"], status["global_step"], status["dropped"]) == (FRAMES, FRAMES - 2, ack.dropped)
        assert service.engine.core.limits.medians().keys() == {"worker"}
    for number, each in enumerate(frames()):
        if number not in POISONED:
            clean.apply({"user": each})
    assert engine.state_hash() == clean.state_hash()
    with service_of(ps.Engine.restore(tmp_path), tmp_path, resume=True) as service:
        assert service.engine.core.limits.get_state() == engine.core.limits.get_state()
