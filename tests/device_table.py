"""A table on the devices of a mesh that shares its arrays with no other, and steps of it."""

import numpy as np

from penstock.bridge import cpu_ffi
from penstock.bridge.backends import create_tables
from penstock.bridge.device_tables import DeviceTable, make_mesh
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.updates import Ops, update


def device_table(mesh, layout, rule, starts=None, **options):
    """mesh : of any axes; starts : of the slots, 0.5 each by default; options : of ``create_tables``"""
    starts = (0.5,) * rule.num_slots if starts is None else tuple(starts)
    (tables,) = create_tables(make_mesh(mesh), [TableDefinition(layout, rule, starts)], **options)
    return DeviceTable(tables)


def cpu_table(mesh_of, rule, rows, dim, devices=1, mod=True, **options):
    layout = Layout("t", rows, dim, rule.num_slots, devices, mod, row_slots=rule.row_slots)
    definition = TableDefinition(layout, rule, (0.5,) * rule.num_slots)
    return DeviceTable(cpu_ffi.CpuTables(make_mesh(mesh_of(devices)), [definition], **options))


def some_rows(seed, num_rows, vocabulary, dim):
    """Distinct ids and their gradients, of which every third is 0."""
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((num_rows, dim), np.float32)
    grads[::3] = 0
    return rng.permutation(vocabulary)[:num_rows], grads


def parts_of(table):
    return [table.read(np.arange(table.layout.vocabulary_size), part) for part in range(len(table.part_dims))]


def stepped(rule, lr, parts, ids, grads):
    """All parts of a table after one step with distinct ids, by the equations in NumPy."""
    if rule.non_lazy:
        whole = np.zeros_like(parts[0])
        whole[ids] = grads
        ids, grads = np.arange(len(whole)), whole
    with np.errstate(all="ignore"):
        weights, slots = update(Ops(np), rule, np.float32(lr), grads, parts[0][ids], tuple(p[ids] for p in parts[1:]))
    after = [part.copy() for part in parts]
    for part, rows in zip(after, (weights, *slots), strict=True):
        part[ids] = rows
    return after


def bits(values):
    """To compare; which NaN it is says nothing."""
    return np.where(np.isnan(values), np.float32(np.nan), values).tobytes()
