"""What the tests of many processes share: a job whose members are threads, connected as processes are."""

import itertools
import socket
import threading
import traceback

import numpy as np
import pyarrow as pa
from limits import HANG_S

import penstock as ps
from penstock.distributed.member import Member
from penstock.distributed.peers import Peers

THREE = {"num_required": 3}


def connected(count):
    """Connections between ``count`` members: [{rank: socket}]."""
    connections = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        connections[one][other], connections[other][one] = socket.socketpair()
    return connections


def together(count, work):
    """``work(peers)`` by as many members at once. Returns what each returned, or the error that it ended with."""
    results = [None] * count

    def member(rank, connections):
        try:
            with Peers(rank, count, connections) as peers:
                results[rank] = work(peers)
        except BaseException as error:
            error.trace = traceback.format_exc()
            results[rank] = error

    threads = [
        threading.Thread(target=member, args=(rank, of), daemon=True) for rank, of in enumerate(connected(count))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads), "a member of the job hangs"
    return results


def all_well(results):
    for result in results:
        assert not isinstance(result, BaseException), result.trace
    return results


def replayed(count, config, sources, mesh=None, engine=None, **arguments):
    """State hash and report of every member after a run.

    sources : or what makes them, where they can be read once only; engine : what of Member's arguments matters
    """

    def work(peers):
        member = Member(peers, config, mesh, **(engine or {}))
        report = member.run(sources() if callable(sources) else sources, **arguments)
        return member.state_hash(), report

    return all_well(together(count, work))


def alone(config, sources, engine=None, **arguments):
    one = ps.Engine(config, **(engine or {}))
    report = one.run(sources, merge="round", **arguments)
    return one.state_hash(), report


def gradients_of(rng, rows):
    values = pa.array(rng.standard_normal(2 * rows).astype(np.float32))
    return pa.FixedSizeListArray.from_arrays(values, 2)


def made_of(frames):
    """A source with a frame per list of ids; the gradients are the same whenever it is made."""
    schema = pa.schema({"id": pa.int64(), "gradient": pa.list_(pa.float32(), 2)})
    rng = np.random.default_rng(len(frames))
    return pa.RecordBatchReader.from_batches(
        schema,
        [pa.record_batch([pa.array(ids, pa.int64()), gradients_of(rng, len(ids))], schema=schema) for ids in frames],
    )


def errors_of(count, config, sources, engine=None, **arguments):
    def work(peers):
        Member(peers, config, **(engine or {})).run(sources() if callable(sources) else sources, **arguments)

    return together(count, work)
