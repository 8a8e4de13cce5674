"""The packages that are mutated: their modules, and the tests that must notice."""

from pathlib import Path

from mutations.operators import Mutation, mutations

ROOT = Path(__file__).resolve().parents[3]

# package → (modules, or folders of them; test files, those of the package's promises first)
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "core": (
        ["engine/core/engine_core.py", "engine/core/observed_tables.py", "engine/core/observers.py"],
        [
            "core",
            "engine",
            "engine_rates",
            "engine_parameters",
            "dirty_rows",
            "stage",
            "dynamic",
            "dynamic_capacity",
            "rollback",
            "groupings",
        ],
    ),
    "gate": (
        ["engine/core/gate.py", "engine/contrib/accumulators/taker_gate.py"],
        ["gate", "plan", "accumulators_takers", "accumulators_golden", "accumulators_interleaved"],
    ),
    "pipeline": (
        ["engine/core/pipeline.py", "engine/core/frame_gate.py"],
        ["gate", "engine", "engine_rates", "threads", "metrics", "checkpoint", "shares"],
    ),
    "accumulate": (
        ["engine/contrib/accumulators"],
        ["accumulators", "checkpoint", "accumulators_golden", "accumulators_takers", "masked_arrays"],
    ),
    "reader": (
        ["io/decoding"],
        [
            "frames",
            "frames_order",
            "columns",
            "columns_roles",
            "columns_rows",
            "plain_rows",
            "coded_tables",
            "rounds",
            "file_names",
            "examples_oracle",
        ],
    ),
    "checkpoint": (
        ["engine/checkpoint"],
        ["checkpoint", "checkpoint_folder", "checkpoint_throttle", "checkpoint_runs", "dirty_rows", "rollback"],
    ),
}


def modules_of(package: str, root: Path = ROOT) -> list[Path]:
    paths = [root / name for name in PACKAGES[package][0]]
    return sorted(module for path in paths for module in (path.rglob("*.py") if path.is_dir() else [path]))


def selected_tests(package: str) -> list[str]:
    paths = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    return [paths[f"test_{name}"] for name in PACKAGES[package][1]]


def all_mutations(package: str, root: Path = ROOT) -> list[Mutation]:
    modules = modules_of(package, root)
    return [m for path in modules for m in mutations(str(path.relative_to(root)), path.read_bytes())]
