"""The restoration of an engine from a commit: what must match is checked here, by name, before any row is read."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.base.errors import CapacityError, ConfigError, StateError, UsageError, listed
from penstock.checkpoint.arrays import rows_of
from penstock.checkpoint.manifests import CLOCK_OFFSET, NORMS, VECTORS, num_pending, trusting
from penstock.checkpoint.parts import check_complete, directories_of, files_for
from penstock.checkpoint.session import CheckpointSession
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import ChangedTables, TableChanges, first_names, flag_text
from penstock.checkpoint.versions import NamedCommit
from penstock.core.engine_core import EngineCore
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import Initial
from penstock.model.config.tables import FromFile
from penstock.model.config.text_format import parse_stored
from penstock.model.frames import Float32, Int64
from penstock.model.gate_policy import GatePolicy
from penstock.model.options import AnyPath, TableChangeOptions
from penstock.rows.bridge.variants import VARIANTS
from penstock.rows.derived_slots import DerivedSlots
from penstock.rows.initial_vectors import VectorFile, check
from penstock.rows.shared.folder import SharedFolder
from penstock.rows.shares import checked_share, shares_of

if TYPE_CHECKING:
    import jax

log = logging.getLogger("penstock")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(TableChangeOptions):
    """The arguments of ``Engine.restore``."""

    path: AnyPath = field(kw_only=False)
    mesh: jax.sharding.Mesh | None = field(default=None, kw_only=False)
    threads: int | None = field(default=None, kw_only=False)
    config: EmbeddingConfig | None = None
    num_required: int | None = None
    reduction: str | None = None
    workers: int | Sequence[str] | None = None
    max_staleness: int | None = None
    share: tuple[int, int] | None = None
    version: str | int | None = None
    shared: AnyPath | SharedFolder | None = None


class Restorable(Protocol):
    """The part of an engine that a commit restores."""

    core: EngineCore
    session: CheckpointSession


E = TypeVar("E", bound=Restorable)


def restore(make: Callable[..., E], options: RestoreOptions) -> E:
    """Return an engine with the state of a commit, the newest one unless a version is named. Raises StateError.

    make : the engine's constructor
    """
    config, mesh, changes = options.config, options.mesh, TableChanges.among(vars(options))
    if config is not None and not isinstance(config, EmbeddingConfig):
        raise ConfigError(f"config: expected an EmbeddingConfig, got {type(config).__name__}")
    devices = mesh.devices.flat if mesh is not None and hasattr(mesh, "devices") else ()
    processes = {device.process_index for device in devices}
    if len(processes) > 1:
        raise UsageError(
            f"the mesh spans {len(processes)} processes, and checkpoints are of one: penstock export {options.path}, "
            "and call read_tables in every process (docs/scaling.md)"
        )
    chosen = NamedCommit.of(options.path, options.version)
    folder = chosen.folder

    def read(commit: Commit) -> E:
        place = f"{folder.path}, commit {commit.number}"
        with trusting(place):
            restored_config = (config or _config_of(commit, place)).at_step(commit.step)
            changed = changes.of(commit, restored_config, place)
            restored_config = restored_config.drawn_as(first_names(changed.contents))
            for name in ("num_required", "reduction"):
                value = getattr(options, name)
                if value is not None and value != commit.contents[name]:
                    raise StateError(
                        f"{place}: was made with {name} {commit.contents[name]}, not {value}; give the same"
                    )
            seed, files, more, shares = commit.contents["seed"], commit.files, {}, {}
            if options.share is not None:
                more = {"share": checked_share(options.share)}
                if _is_distributed_alike(changed.contents, restored_config):
                    mod = restored_config.sharding_strategy == "MOD"
                    shares = shares_of(restored_config.tables, mod, seed, *more["share"])
                    files = files_for(commit, shares)
            check_complete(commit, shares, place)
            _check_vectors(changed, restored_config, place)
            folder.checked(commit, files)
            programs = changed.contents["programs"]
            variants = {name: program["variant"] for name, program in programs.items()}
            for variant in variants.values():
                if variant not in VARIANTS:
                    raise StateError(f"{place}: variant {variant!r}; this penstock has {', '.join(VARIANTS)}")
            policy = _policy_of(options, commit, place)
            engine = make(
                restored_config,
                mesh,
                num_required=policy.num_required if policy.workers is None else None,
                workers=policy.workers,
                max_staleness=policy.max_staleness,
                reduction=commit.contents["reduction"],
                seed=seed,
                threads=options.threads,
                variant=variants,
                **more,
            )
            lost = _load(engine.core, folder, replace(commit, files=files, contents=changed.contents), changed)
            change = changed.change and replace(changed.change, lost_sums=lost)
            if change is not None:
                log.warning("%s: %s", place, change)
            engine.session.resume_from(folder, commit, change, changed.adds_rows)
        return engine

    return chosen.read(read)


def _policy_of(options: RestoreOptions, commit: Commit, place: str) -> GatePolicy:
    """Return what opens the gate: the saved policy, or another one if it holds no frames. Raises StateError."""
    saved = GatePolicy.from_state(commit.contents)
    if saved.workers is not None and options.num_required is not None:
        raise StateError(f"{place}: was made with rounds of {_of(saved)}, not num_required {options.num_required}")
    workers = options.workers
    if workers is None and options.num_required is None and options.config is not None:
        workers = options.config.gate_policy.workers  # which may have changed since
    policy = GatePolicy.of(saved, None, workers, options.max_staleness)
    pending = num_pending(commit.contents)
    if policy.workers != saved.workers and pending:
        how = "--flush them first" if saved.workers is None else "resume with these, and --on-missing skip opens it"
        raise StateError(f"{place}: {pending} frames in its gate wait for {_of(saved)}, not {_of(policy)}: {how}")
    return policy


def _of(policy: GatePolicy) -> str:
    """Return what a gate waits for, as text."""
    if policy.workers is None:
        return f"{policy.num_required} frames of any producer"
    return f"workers {policy.workers if isinstance(policy.workers, int) else listed(policy.workers)}"


def _check_vectors(changed: ChangedTables, config: EmbeddingConfig, place: str) -> None:
    """Raise StateError for a loaded table whose rows do not start from the vectors that they did."""
    files: dict[str, list[str]] = changed.contents.get(VECTORS, {})
    for old, name in changed.names.items():
        spec, at = config.table(name), f"{place}: table '{name}'"
        path = spec.initializer.path if isinstance(spec.initializer, FromFile) else None
        anew = f", or {flag_text('--reset-table', name)} to start it with its initial rows (reset_table=)"
        if old in files and path is not None:
            try:
                check(VectorFile(os.path.abspath(path), files[old][1]), at)
            except StateError as error:
                raise StateError(f"{error}{anew}") from None
        elif old in files or path is not None:
            start = f"vectors of {files[old][0]}" if old in files else "other rows than vectors of a file"
            raise StateError(f"{at} starts from {start}; give it the initializer that it had{anew}")


def _is_distributed_alike(contents: Mapping[str, Any], config: EmbeddingConfig) -> bool:
    """Return whether as many shares have the same rows with a configuration as when they wrote a commit."""
    saved = parse_stored(base64.b64decode(contents["config"])).tpu_embedding_configuration
    if saved.sharding_strategy != config.to_engine_proto().tpu_embedding_configuration.sharding_strategy:
        return False
    forms = {table["name"]: (table["vocabulary_size"], "dynamic" in table) for table in contents["tables"]}
    return all(forms[spec.name] == (spec.vocabulary_size, spec.dynamic is not None) for spec in config.tables)


def _load(core: EngineCore, folder: Folder, commit: Commit, changed: ChangedTables) -> dict[str, int]:
    """Set the state of a core. Return for each table that is not loaded the ids whose sums in the gate are dropped.

    commit : with the contents of ``changed``
    """
    directories = {old: state for old, state in directories_of(folder, commit).items() if old in changed.names}
    rows_now = {
        changed.names[old]: core.tables.dynamic[changed.names[old]].set_state(state)
        for old, state in directories.items()
    }
    rates = commit.contents["learning_rates"]
    core.last_rates = None if rates is None else tuple(rates)
    derived = DerivedSlots(core.tables, core.rates.expected(commit.contents["global_step"], core.last_rates))
    for old, ids, parts in rows_of(folder, commit):
        if old not in changed.names:
            continue
        name = changed.names[old]
        if name in changed.weights_only:
            spec = core.tables.specs[name]
            starts = zip(spec.slots, spec.part_dims[1:], strict=True)
            parts = [parts[0], *(np.full((len(ids), dim), start, np.float32) for (_, start), dim in starts)]
        if name in rows_now:  # the row of a key, and whether it has one, may differ here
            ids = rows_now[name][ids]
            here = ids >= 0
            ids, parts = ids[here], [rows[here] for rows in parts]
        else:
            ids, parts = core.tables.held.select(name, ids, parts)
        if name in core.tables.dynamic and name not in rows_now:
            ids = _admit(core, name, ids, parts, folder)
        else:
            core.tables.set_stored_rows(name, ids, dict(enumerate(parts)))
        if name in changed.weights_only and derived.slot(name):
            derived.derive(name, ids)
    derived.warn()
    core.tables.dynamic.forget_changes()
    saved_stores = _stores_of(folder, commit)
    stores = {changed.names[old]: sums for old, sums in saved_stores.items() if old in changed.names}
    frozen = {*core.tables.frozen, *core.tables.frozen_before(core.global_step)}
    for name in [name for name, sums in stores.items() if name in frozen or not core.pipeline.stores[name].takes(sums)]:
        if name not in changed.weights_only and name not in frozen:
            raise StateError(
                f"{folder.path}, commit {commit.number}: table '{name}' has another gradient_accumulation_status in "
                "the configuration, which frames in the gate prevent: --flush them with the one before"
            )
        del stores[name]
    contents = commit.contents
    core.tables.programs.resume(contents["programs"])

    def put() -> None:
        for name, store in core.pipeline.stores.items():
            store.set_state(core.tables.held.part_of(name, stores.get(name, {})))
        core.pipeline.set_state(contents["pipeline"])

    core.gate.set_state(contents["gate"], put)
    if core.turns is not None and GatePolicy.from_state(contents).workers == core.policy.workers:
        core.turns.set_state(contents["turns"], _early_frames(core, folder, commit, changed))
    core.freshness.restored(None if core.num_pending else core.pipeline.time)
    if core.limits is not None:
        core.limits.set_state(contents.get(NORMS, []))
    core.changed_step = int(contents["changed_step"])
    core.set_clock_offset(contents[CLOCK_OFFSET])
    lost = {old: _num_ids(sums) for old, sums in saved_stores.items() if changed.names.get(old) not in stores}
    return {name: count for name, count in lost.items() if count}


def _admit(core: EngineCore, name: str, ids: Int64, parts: list[Float32], folder: Folder) -> Int64:
    """Set rows of a table that was not dynamic: the ids of those that differ from their start become keys.

    Returns the local rows that were set, int64 (n,).
    """
    table = core.tables.dynamic[name]
    kept = table.differing(ids, parts) | (table.directory.rows(ids) >= 0)  # an earlier block may have admitted the id
    try:
        return core.tables.set_rows(name, ids[kept], dict(enumerate(rows[kept] for rows in parts)))
    except CapacityError as error:
        raise StateError(f"{folder.path}: rows that differ from their start become keys: {error}") from None


def _stores_of(folder: Folder, commit: Commit) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Return the gradients accumulated in the gate, by table, with those of all shares concatenated."""
    stores: dict[str, dict[str, list[npt.NDArray[Any]]]] = {}
    for record in folder.records(commit, commit.last_files):
        if record.kind == "store":
            of_table = stores.setdefault(record.header["table"], {})
            for key, array in record.arrays.items():
                of_table.setdefault(key, []).append(array)
    return {
        table: {key: np.concatenate(arrays) for key, arrays in of_table.items()} for table, of_table in stores.items()
    }


def _early_frames(
    core: EngineCore, folder: Folder, commit: Commit, changed: ChangedTables
) -> list[tuple[Mapping[str, Any], dict[str, npt.NDArray[Any]]]]:
    """Return the frames that wait for their turn, each with its rows of all shares. Raises StateError."""
    frames: dict[tuple[int, int], tuple[Mapping[str, Any], dict[str, list[npt.NDArray[Any]]]]] = {}
    for record in folder.records(commit, commit.last_files):
        if record.kind == "early":
            tables = record.header["tables"]
            frozen = {*core.tables.frozen, *core.tables.frozen_before(record.header["turn"])}
            if any(changed.names.get(table) != table or table in frozen for table in tables):
                raise StateError(
                    f"{folder.path}, commit {commit.number}: frames that wait for their turn have rows of tables that "
                    "are renamed, frozen or gone: --flush them with the configuration before"
                )
            _, arrays = frames.setdefault((record.header["worker"], record.header["turn"]), (record.header, {}))
            for number, table in enumerate(tables):
                ids, (grads,) = core.tables.held.select(
                    table, record.arrays[f"{number}.ids"], [record.arrays[f"{number}.grads"]]
                )
                arrays.setdefault(f"{number}.ids", []).append(ids)
                arrays.setdefault(f"{number}.grads", []).append(grads)
    return [
        (header, {key: np.concatenate(parts) for key, parts in arrays.items()}) for header, arrays in frames.values()
    ]


def _num_ids(sums: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return how many ids have sums, those of every frame that is kept separate."""
    return sum(len(array) for key, array in sums.items() if key.endswith(".ids"))


def _config_of(commit: Commit, place: str) -> EmbeddingConfig:
    if commit.contents["python"]:
        raise StateError(
            f"{place}: its configuration holds {', '.join(commit.contents['python'])}, which no file can; give config="
        )
    files = commit.contents.get(VECTORS, {})
    try:
        message = parse_stored(base64.b64decode(commit.contents["config"]))
        for settings in message.table:  # a relative path is of the folder that the engine ran in
            path = files.get(settings.name, [""])[0]
            if path and os.path.abspath(getattr(settings.initial, "from")) != path:
                settings.initial.CopyFrom(Initial(**{"from": path}))
        return EmbeddingConfig.from_proto(message)
    except ConfigError as error:
        raise StateError(f"{place}: its configuration cannot be loaded: {error}; give config=") from None
