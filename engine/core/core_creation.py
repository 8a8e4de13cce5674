"""Which core an engine has: with rounds or without, or one whose tables span processes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.base.errors import ConfigError, UsageError
from penstock.base.integrations import PROCESSES
from penstock.base.threads import ThreadTeam
from penstock.core.engine_core import EngineCore
from penstock.core.pipeline import Pipeline, store_of
from penstock.core.rounds_core import RoundsCore
from penstock.model.config.clipping import check_no_norms
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.gate_policy import GatePolicy
from penstock.rows.table_set import TableSet


def create_core(
    config: EmbeddingConfig,
    tables: TableSet,
    policy: GatePolicy,
    reduction: str,
    seed: int,
    team: ThreadTeam,
) -> EngineCore:
    """Return the core of an engine."""
    if policy.workers is not None and tables.held.is_share:
        raise ConfigError("rounds: an engine with a share of the rows takes the frames of its job; use one engine")
    if tables.held.is_share:
        check_no_norms(config.clip, config.limit, "an engine with a share of the rows")
    if tables.processes is not None:
        check_no_norms(config.clip, config.limit, "a mesh of several processes")
    mean = reduction == "mean"
    stores = {name: store_of(spec, mean, is_share=tables.held.is_share) for name, spec in tables.held.specs.items()}
    if tables.processes is None:
        core_class = EngineCore if policy.workers is None else RoundsCore
        return core_class(config, tables, Pipeline(stores, team), policy, reduction, seed)
    create: Callable[..., EngineCore] = import_module(PROCESSES["core"]).create_core
    return create(config, tables, stores, policy, reduction, seed, team)


def checked_reduction(config: Any, mesh: Any, reduction: str | None) -> str:
    """Return the given reduction, else the configuration's, else "mean". Raises ConfigError or UsageError."""
    if not isinstance(config, EmbeddingConfig):
        raise ConfigError(f"config: expected an EmbeddingConfig, got {type(config).__name__}")
    if mesh is not None and not hasattr(mesh, "devices"):
        raise UsageError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    reduction = reduction or config.gate_reduction or "mean"
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction: expected 'mean' or 'sum', got '{reduction}'")
    return reduction
