"""A table on the devices of a mesh that shares its arrays with no other, and steps of it."""

import numpy as np

from penstock.base.threads import ThreadTeam
from penstock.model.updates import Ops, UpdateRule, update
from penstock.pyx.update import rules
from penstock.rows.bridge.backends import create_tables
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.host_tables import HostTables
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.sharding import Layout, TableDefinition

SLOTS = {**rules(), "stochastic_gradient_descent": 0, "user_defined_program": 0}
HYPER = (("momentum", 0.5), ("beta1", 0.5), ("beta2", 0.75), ("rho", 0.5), ("epsilon", 0.25), ("l1", 0.125))
HYPER += (("l2", 0.25), ("exponent", 2.0), ("lr_power", -0.5), ("max_var_update", 0.5), ("max_delta", 8.0))
TEAM = ThreadTeam(2)


def device_table(mesh, layout, rule, starts=None, **options):
    """mesh : of any axes; starts : of the slots, 0.5 each by default; options : of ``create_tables``"""
    starts = (0.5,) * rule.num_slots if starts is None else tuple(starts)
    (tables,) = create_tables(make_mesh(mesh), [TableDefinition(layout, rule, starts)], TEAM, **options)
    return DeviceTable(tables)


def host_table(mesh_of, rule, rows, dim, devices=1, mod=True, team=TEAM, target=""):
    """A table that the CPU's own update keeps; its slots start at 0.5."""
    layout = Layout("t", rows, dim, rule.num_slots, devices, mod, row_slots=rule.row_slots)
    definition = TableDefinition(layout, rule, (0.5,) * rule.num_slots)
    return DeviceTable(HostTables(make_mesh(mesh_of(devices)), [definition], team, target))


def addresses(tables):
    """The addresses of the shards of the arrays of a table ``t`` that a user's own step updates."""
    return [shard.data.unsafe_buffer_pointer() for array in tables["t"].arrays for shard in array.addressable_shards]


def addresses_of(table):
    """The addresses of the shards of the arrays, which an update in place never moves, after every dispatch is done."""
    table.wait()
    addresses = []
    for array in table.backend.arrays:
        if isinstance(array, np.ndarray):
            addresses.append(array.ctypes.data)
        else:
            addresses += [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    return addresses


def shapes_of(layout):
    """The shapes of the arrays of a layout or a stack."""
    return [shape for shape, _ in layout.line.arrays(layout.num_devices * layout.lines_per_device)]


def some_rows(seed, num_rows, vocabulary, dim):
    """Distinct ids and their gradients, of which every third is 0."""
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((num_rows, dim), np.float32)
    grads[::3] = 0
    return rng.permutation(vocabulary)[:num_rows], grads


def parts_of(table):
    """Weights, then slots, of every row."""
    return [table.read(np.arange(table.layout.vocabulary_size), part) for part in range(len(table.part_dims))]


def rate_of(rule, lr):
    """The rate of an update: of a rule that corrects the bias of its moments, with some factors."""
    return (lr, 1.25, 1.5) if rule.is_corrected else lr


def stepped(rule, lr, parts, ids, grads):
    """All parts of a table after one step with distinct ids, by the equations in NumPy. lr : see ``rate_of``"""
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


def rule_of(name, **switches):
    """An update rule with all of its hyperparameters."""
    program = (lambda g, w: w - g * w) if name == "user_defined_program" else None
    return UpdateRule(name, SLOTS[name], HYPER, program=program, **switches)


def table_of(mesh_of, rule, rows, dim, devices=1, variant="xla", mod=False, lanes=128, bfloat16=False):
    """A table that XLA or a kernel updates."""
    layout = Layout("t", rows, dim, rule.num_slots, devices, mod, lanes, bfloat16, row_slots=rule.row_slots)
    return device_table(mesh_of(devices), layout, rule, variant=variant)


def bytes_of(table):
    """The bits of weights, then of slots."""
    return [part.tobytes() for part in parts_of(table)]


def started(table):
    """The table with random weights."""
    rng = np.random.default_rng(7)
    table.fill(lambda ids: rng.standard_normal((len(ids), table.layout.dim), np.float32))
    return table
