"""What a typed user writes; checked by mypy (make types), never run."""

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.ray import Job


def configure() -> ps.EmbeddingConfig:
    user = ps.TableConfig(vocabulary_size=1000, dim=16, name="user", optimizer=ps.SGD(learning_rate=0.1))
    item = ps.TableConfig(vocabulary_size=50, dim=8, name="item")
    return ps.EmbeddingConfig.from_tables([user, item], ps.Adagrad(0.25))


def train(config: ps.EmbeddingConfig) -> ps.Report:
    engine = ps.Engine(config, num_required=2, reduction="mean", seed=1, threads=2)
    accepted: bool = engine.apply({"user": (np.array([1, 2]), np.ones((2, 16), np.float32))}, local_step=0)
    if not accepted:
        raise ps.StateError("stale")
    report = engine.run("log.arrows", columns={"gradient": "grad"}, flush=True)
    rows: npt.NDArray[np.float32] = engine.lookup("user", [1, 2])
    steps: int = report.steps + len(rows)
    stale: dict[str, int] = {"stale": report.stale, "steps": steps}
    digest: str = engine.state_hash()
    print(stale, digest, report.tables["user"].rows)
    return report


def complain(error: ps.InputError) -> tuple[str | None, int | None]:
    return error.source, error.row


def accumulate() -> npt.NDArray[np.float32]:
    with ps.SparseConditionalAccumulator("float32", shape=(1000, None), reduction="SUM") as acc:
        fresh: bool = acc.apply_gradient([1, 2], np.ones((2, 16), np.float32), local_step=0, contributor="a")
        waiting = acc.take_gradient_async(2)
        taken: ps.SparseGradient = acc.take_gradient(num_required=1, timeout=0.5) if fresh else waiting.result()
        late: int = acc.stale.by_lateness[1]
        print(late, acc.explain(), acc.num_accumulated())
    mean: npt.NDArray[np.float32] = ps.ConditionalAccumulator().take_gradient(1)
    return mean + taken.values


def look_up(engine: ps.Engine) -> bool:
    """One shape of a lookup, and one value for a version, wherever rows are read."""
    with ps.Reader("tables") as reader, ps.connect("grpc://127.0.0.1:8815") as service:
        shapes = [where.lookup("user", [1]).shape for where in (engine, engine.reads)]
        shapes += [reader.lookup("user", [1]).shape, service.lookup("user", [1]).shape]
        both = [where.lookup({"user": [1], "item": [2]}) for where in (engine, engine.reads)]
        both += [reader.lookup({"user": [1]}, consistent=True), service.lookup({"user": [1]}, consistent=True)]
        versions: list[ps.Version] = [rows.version for rows in both]
        versions += [engine.version, reader.version, service.status().version, ps.Version(str(versions[0]))]
        deltas = list(service.deltas(service.table("user").version))
    return all(delta.version.follows(version) for delta in deltas for version in versions) and len(shapes) == 4


def push(engine: ps.Engine) -> bool:
    return engine.apply({"user": ([1], np.ones((1, 16)))}, local_step=3, contributor=7)


def follow(engine: ps.Engine, config: ps.EmbeddingConfig) -> None:
    for batch in engine.stage(
        "log.arrows", slots=["accumulators"], numbered=True, per_steps=10, checkpoint="c", every=2
    ):
        print(batch.num_rows)
    report = engine.run("log.arrows", deltas="deltas.arrows", slots=True, limit=3)
    print(report.steps)
    stage: ps.StageFunction = ps.stage_fn(config, num_required=2, flush=True)
    print(next(iter(stage([]))), stage.schema)


def complain_of_keywords(engine: ps.Engine, config: ps.EmbeddingConfig) -> None:
    """mypy reports each of these: an ignored line without an error is itself an error."""
    engine.run("log.arrows", limitt=3)  # type: ignore[call-arg]
    engine.run("log.arrows", limit="3")  # type: ignore[arg-type]
    engine.stage("log.arrows", deltas="deltas.arrows")  # type: ignore[call-arg]
    engine.run(source="log.arrows", flush=1.5)  # type: ignore[arg-type]
    engine.lookup({"user": [1]}, [1])  # type: ignore[call-overload]
    ps.connect("grpc://127.0.0.1:8815").deltas(3)  # type: ignore[arg-type]
    ps.Engine.restore("c", drop_tables=["item"])  # type: ignore[call-arg]
    Job(config, ["log.arrows"], shares=2, per_rows=3)  # type: ignore[call-arg]
