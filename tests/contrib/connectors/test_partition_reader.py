"""A partition read over failures: a scripted broker shows what the mock of Kafka does not."""

import pytest
from brokers import Scripted, numbers_of

from penstock.base.errors import InputError, StateError
from penstock.io.partitions.partition_reader import PartitionReader


def test_markers_and_aborted_transactions_leave_gaps():
    reader = PartitionReader(Scripted([1, 2, 5, 9, 10]), 0, 60)
    assert numbers_of(reader, 5) == [1, 2, 5, 9, 10]
    assert not reader.read(0)


def test_a_new_job_begins_with_the_oldest_message_that_is_retained():
    assert numbers_of(PartitionReader(Scripted([7, 8], low=7), 0, 60), 2) == [7, 8]
    assert not PartitionReader(Scripted([], low=7), 0, 60).read(0)


def test_a_message_that_is_delivered_again_is_passed_over():
    partition = Scripted([1, 2, 3, 4])
    reader = PartitionReader(partition, 0, 60)
    assert numbers_of(reader, 3) == [1, 2, 3]
    partition.next = 2
    assert numbers_of(reader, 1) == [4]


def test_each_message_arrives_once_over_failures_of_every_call():
    for number in range(12):
        partition = Scripted([1, 2, 4, 5], failures=[False] * number + [True])
        assert numbers_of(PartitionReader(partition, 0, 60), 4) == [1, 2, 4, 5]
        assert not partition.failures or partition.opened == 1


def test_a_broker_that_does_not_return_is_bad_input():
    reader = PartitionReader(Scripted([1], failures=[True] * 99), 0, 0)
    with pytest.raises(InputError, match=r"kafka://b/t, partition 0: the broker cannot be reached: broker transport"):
        reader.read(0)


def test_retention_that_passes_the_position_is_an_incompatible_state():
    lost = r"partition 0, offset 3 is next, and the topic retains only what follows kafka://b/t, partition 0, offset 5;"
    with pytest.raises(StateError, match=lost):
        PartitionReader(Scripted([7, 8], low=7), 3, 60).read(0)
    partition = Scripted(list(range(1, 10)))
    reader = PartitionReader(partition, 0, 60)
    assert numbers_of(reader, 3) == [1, 2, 3]
    partition.low = 7  # while the reader is slow
    with pytest.raises(StateError, match=lost):
        reader.read(0)


def test_a_topic_that_ends_before_the_position_was_replaced():
    with pytest.raises(StateError, match=r"offset 8 is in the tables, and the topic ends before it, after 3 messages"):
        PartitionReader(Scripted([1, 2, 3]), 9, 60).read(0)
    assert not PartitionReader(Scripted([1, 2, 3]), 3, 60).read(0)
    assert not PartitionReader(Scripted([], low=4), 3, 60).read(0)
