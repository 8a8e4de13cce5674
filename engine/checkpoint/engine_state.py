"""The state of an engine in a commit, apart from its rows. Everything but arrays is plain data in the manifest."""

from __future__ import annotations

import base64
from typing import Any

from penstock.checkpoint.incremental import CommitContents, Saved
from penstock.checkpoint.ledger import Ledger
from penstock.checkpoint.manifests import CLOCK_OFFSET, NORMS, VECTORS
from penstock.checkpoint.records import Record
from penstock.checkpoint.table_changes import TABLE_CHANGES, described, states_of
from penstock.core.engine_core import EngineCore
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import Initializer


def describe(core: EngineCore, ledger: Ledger) -> CommitContents:
    """Return the current state without the rows. Call it under the gate's lock."""
    changes = ledger.changes
    plain: dict[str, Any] = {
        "global_step": core.global_step,
        "changed_step": core.changed_step,
        CLOCK_OFFSET: core.clock_offset,
        "tables": [described(spec) for spec in core.config.tables],
        "programs": core.tables.programs.get_state(),
        "num_required": core.policy.num_required,
        **core.policy.get_state(),
        "reduction": core.reduction,
        "seed": core.seed,
        "learning_rates": core.last_rates,
        "positions": ledger.positions.get_state(),
        **ledger.files.commit(),
        "counters": ledger.totals.get_state(),
        "gate": core.gate.get_state(),
        **({} if core.turns is None else {"turns": core.turns.get_state()}),
        **({} if core.limits is None else {NORMS: core.limits.get_state()}),
        "pipeline": core.pipeline.get_state(),
        "config": encoded(core.config),
        "python": _only_in_python(core.config),
        **({TABLE_CHANGES: states_of(changes)} if changes else {}),
        **(
            {VECTORS: {name: list(file) for name, file in files.items()}} if (files := core.tables.vector_files) else {}
        ),
    }
    stores = core.pipeline.stores.items()
    held = core.tables.held
    records = [Record("store", {"table": name}, held.by_id(name, store.get_state())) for name, store in stores]
    for header, arrays in () if core.turns is None else core.turns.records():
        by_id = {
            key: held.ids(header["tables"][int(key.partition(".")[0])], array) if key.endswith(".ids") else array
            for key, array in arrays.items()
        }
        records.append(Record("early", header, by_id))
    dynamic = core.tables.dynamic.items()
    records += [Record("directory", {"table": name}, table.get_state()) for name, table in dynamic]
    # Two rollbacks to one commit write equal rows: the record tells their files apart.
    records += [Record("clock", {"offset": core.clock_offset})] if core.clock_offset else []
    return CommitContents(plain, records)


def tables_to_save(core: EngineCore) -> dict[str, Saved]:
    """Return the tables of an engine by name, in the form that a saver expects."""
    return {
        name: Saved(core.tables.table(name), spec.vocabulary_size, spec.rule.non_lazy)
        for name, spec in core.tables.held.specs.items()
    }


def encoded(config: EmbeddingConfig) -> str:
    return base64.b64encode(config.to_engine_proto().SerializeToString(deterministic=True)).decode()


def _only_in_python(config: EmbeddingConfig) -> list[str]:
    """Return the parts of a configuration that its protobuf message cannot represent, for messages."""
    objects = [f"the schedule of tag {tag}" for tag in config.schedules]
    for spec in config.tables:
        if not isinstance(spec.initializer, Initializer):
            objects.append(f"the initializer of table '{spec.name}'")
        if spec.rule.program is not None:
            objects.append(f"the program of table '{spec.name}'")
    return objects
