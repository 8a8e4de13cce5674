"""Brokers that gradients arrive from: Kafka and NATS JetStream (docs/brokers.md)."""
