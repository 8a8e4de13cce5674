"""A table on the devices of a mesh that shares its arrays with no other."""

from penstock.bridge.backends import create_tables
from penstock.bridge.device_tables import DeviceTable, make_mesh
from penstock.bridge.sharding import TableDefinition


def device_table(mesh, layout, rule, starts=None, **options):
    """mesh : of any axes; starts : of the slots, 0.5 each by default; options : of ``create_tables``"""
    starts = (0.5,) * rule.num_slots if starts is None else tuple(starts)
    (tables,) = create_tables(make_mesh(mesh), [TableDefinition(layout, rule, starts)], **options)
    return DeviceTable(tables)
