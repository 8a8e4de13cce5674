"""``store``: opens the tables of an engine or of a service for modules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as distributed

from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.torch.stores import EngineStore, Store

if TYPE_CHECKING:
    from penstock.api.engine import Engine


def store(
    tables: Engine | str,
    token: str | None = None,
    *,
    contributor: str | None = None,
    roots: str | None = None,
    patience_s: float = 30.0,
    timeout_s: float = 600.0,
) -> Store:
    """Open the tables of an engine or of a service for modules and a ``Step``.

    Parameters
    ----------
    tables : Engine or str
        An engine of this process, or the address of a service (``penstock serve``).
    token, roots, patience_s
        For a service, as for ``penstock.connect``. The token needs the role ``operator``, to read and put.
    contributor : str or None
        The name of this process's frames, by which a service counts them: unique, and the same after a restart. None:
        ``rank-R`` of ``torch.distributed``, else ``rank-0``. If two trainers use one name at the same time, the step of
        one raises UsageError.
    timeout_s : float
        The limit of each wait for a service: for rows, for a frame to be applied and, in synchronous training, for the
        frames of the other ranks. A wait is logged each minute (``waiting``), and ends with ServiceTimeoutError, which
        names the service, frame and step, the frames in the gate and the ranks that are missing.

    Returns
    -------
    Store
        A context manager; closing it waits for the last acknowledgement. A forked process, such as a worker of a
        DataLoader, can read from the store of an engine, but not from that of a service.

    Raises
    ------
    UsageTypeError
        If ``tables`` is neither an engine nor an address.
    UsageError
        If ``timeout_s`` is no positive number.

    Examples
    --------
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table])))
    >>> pt.Embedding(8, 2, store=store)
    Embedding(8, 2, table='user')
    """
    if contributor is None:
        contributor = f"rank-{distributed.get_rank() if is_distributed() else 0}"
    if not timeout_s > 0:
        raise UsageError(f"timeout_s: expected seconds above 0, got {timeout_s!r}")
    if isinstance(tables, str):
        from penstock.contrib.torch.service_store import ServiceStore
        from penstock.serving.flight import connect

        return ServiceStore(partial(connect, tables, token, roots=roots, patience_s=patience_s), contributor, timeout_s)
    if not hasattr(tables, "apply"):
        raise UsageTypeError(f"store: expected an Engine or the address of a service, got {type(tables).__name__}")
    return EngineStore(tables, contributor)


def is_distributed() -> bool:
    """Return whether this process is a rank of ``torch.distributed``."""
    return bool(distributed.is_available() and distributed.is_initialized())
