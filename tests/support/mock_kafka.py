"""``python tests/support/mock_kafka.py``: librdkafka's mock cluster in a separate process, until its input ends."""

import sys

if __name__ == "__main__":
    import confluent_kafka

    keeper = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused"})
    (broker,) = keeper.list_topics(timeout=60).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    sys.stdin.read()
