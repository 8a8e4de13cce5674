"""The diagrams of README.md and the site: ``python docs/pictures.py`` writes them to docs/pictures/; a test compares.

Each has its own background, dark where the reader's system is, so that it is readable on any page.
"""

from __future__ import annotations

import html
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
STYLE = """
.card{fill:#f7f9fb}.box{fill:#fff;stroke:#7b8794}.ours{fill:#1b6ca8}.line{stroke:#7b8794;fill:none;stroke-width:1.6}
.head{fill:#7b8794}.ink{fill:#1f2933}.pale{fill:#5b6773}.white{fill:#fff}text{font:14px sans-serif;text-anchor:middle}
.small{font-size:12px}
@media(prefers-color-scheme:dark){.card{fill:#14181d}.box{fill:#1c2229}.ink{fill:#dde3ea}.pale{fill:#98a4b0}}
""".replace("\n", "")


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, name: str, note: str = "", ours: bool = False) -> str:
    """Return a box of height 46 whose upper left corner is at (x, y). ours : a part of penstock"""
    middle = x + width / 2
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="46" rx="6" class="{"ours" if ours else "box"}"/>'
    name_y = y + (20 if note else 28)
    below = text(middle, y + 37, note, f"small {'white' if ours else 'pale'}") if note else ""
    return rect + text(middle, name_y, name, "white" if ours else "ink") + below


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through the points, with a head at the last one."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    head = [(x1, y1), (x1 - 8 * dx - 4 * dy, y1 - 8 * dy - 4 * dx), (x1 - 8 * dx + 4 * dy, y1 - 8 * dy + 4 * dx)]
    corners = " ".join(f"{x:g},{y:g}" for x, y in head)
    return f'<polyline points="{path}" class="line"/><polygon points="{corners}" class="head"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="{width}" height="{height}" rx="10" class="card"/>' + "\n".join(["", *parts, "</svg>", ""])
    )


def gradient() -> str:
    """Return the path of a gradient: from the workers to the tables and what leaves them."""
    sources, results, middle = (24, 84, 144), (24, 84, 144), 107
    stages = [("validate", "every row"), ("sum", "by id"), ("gate", "N frames"), ("optimizer", "once per row")]
    parts = [box(20, y, 122, *words) for y, words in zip(sources, SOURCES, strict=True)]
    parts += [box(670, y, 194, *words) for y, words in zip(results, OUTPUTS, strict=True)]
    parts += [arrow((142, y + 23), (166, y + 23), (166, middle), (196, middle)) for y in sources]
    parts += [text(81, 207, "as Arrow", "small pale")]
    for number, (name, note) in enumerate(stages):
        x = 196 + 114 * number
        parts.append(box(x, 84, 96, name, note, ours=True))
        if number:
            parts.append(arrow((x - 18, middle), (x, middle)))
    parts += [arrow((634, middle), (650, middle), (650, y + 23), (670, y + 23)) for y in results]
    parts += [arrow((244, 130), (244, 160)), text(244, 177, "a bad row: an error,", "small pale")]
    parts += [text(244, 193, "nothing of its frame counts", "small pale")]
    parts += [arrow((472, 130), (472, 160)), text(472, 177, "stale frames: dropped,", "small pale")]
    parts += [text(472, 193, "and counted", "small pale")]
    return picture(884, 216, "Workers send gradients as Arrow; penstock updates the tables", parts)


def gates() -> str:
    """Return what opens a gate: a number of frames, or one frame of each worker."""
    policies = [
        (
            "num_required: 2",
            ("worker a", "worker b", "worker c"),
            0,
            "2 frames",
            "the order of arrival",
            "stale: dropped",
        ),
        ("rounds, 2 workers", ("rank-0", "rank-1", "rank-0"), 1, "one of each", "rank-0 + rank-1", "early: waits"),
    ]
    parts = []
    for number, (policy, workers, step, opens, order, rest) in enumerate(policies):
        x = 20 + 440 * number
        parts.append(text(x + 202, 24, policy, "ink"))
        for y, worker, frame_step in zip((40, 96, 152), workers, (0, 0, step), strict=True):
            parts.append(box(x, y, 104, worker, f"step {frame_step}"))
        parts += [arrow((x + 104, y), (x + 122, y), (x + 122, 91), (x + 140, 91)) for y in (63, 119)]
        parts += [box(x + 140, 68, 104, "gate", opens, ours=True), arrow((x + 244, 91), (x + 268, 91))]
        parts += [box(x + 268, 68, 136, "step 0 → 1", order, ours=True)]
        parts += [arrow((x + 104, 175), (x + 140, 175)), text(x + 200, 179, rest, "small pale")]
    return picture(884, 216, "A gate opens when N frames have arrived, or one frame of each worker", parts)


def commits() -> str:
    """Return what leaves an engine: commits, which versions name, and deltas, which followers apply."""
    parts = [
        box(20, 46, 150, "engine, service", "a step at a time", ours=True),
        arrow((170, 69), (236, 69)),
        text(203, 60, "every N", "small pale"),
        box(236, 46, 170, "commit", "rows, slots, gate, position", ours=True),
        arrow((406, 69), (472, 69)),
        box(472, 46, 180, "checkpoint", "a folder, or an object store"),
        arrow((652, 69), (700, 69)),
        box(700, 46, 164, "tags, branches", "keep versions"),
        arrow((562, 46), (562, 30), (95, 30), (95, 46)),
        text(
            328, 22, "resume: the bits of a run without a kill; rollback: a step to the rows of a version", "small pale"
        ),
        arrow((95, 92), (95, 151), (236, 151)),
        text(165, 143, "changed rows", "small pale"),
        box(236, 128, 170, "deltas", "numbered by step", ours=True),
        arrow((406, 151), (472, 151)),
        box(472, 128, 180, "followers", "each once, in order", ours=True),
        arrow((652, 151), (700, 151)),
        box(700, 128, 164, "Redis, Kafka, LMDB,", "Delta, Lance, Parquet"),
        arrow((562, 174), (562, 219), (700, 219)),
        box(700, 196, 164, "shared files", "readers, replicas"),
    ]
    return picture(884, 260, "An engine writes commits, which tags keep, and deltas, which followers apply", parts)


def scaling() -> str:
    """Return the ways to scale: where rows live, from the smallest tables to the largest."""
    steps = [
        ("devices", "the default", "on the mesh"),
        ("host memory", "HOST, CACHED", "devices too small"),
        ("disk", "penstock passes", "memory too small, offline"),
        ("many machines", "shares of the rows", "memory too small, online"),
    ]
    parts = []
    for number, (name, note, why) in enumerate(steps):
        x = 20 + 172 * number
        parts += [box(x, 62, 148, name, note, ours=True), text(x + 74, 48, why, "small pale")]
        if number:
            parts.append(arrow((x - 24, 85), (x, 85)))
    ways = [
        ("penstock job", "on Ray"),
        ("mesh of all processes", "of a JAX job"),
        ("share=(rank, count)", "your own system"),
    ]
    for y, words in zip((10, 62, 114), ways, strict=True):
        parts += [box(730, y, 180, *words), arrow((684, 85), (706, 85), (706, y + 23), (730, y + 23))]
    return picture(930, 172, "Where rows live: devices, host memory, disk, many machines", parts)


SOURCES = [("workers", "over Flight"), ("topics", "Kafka, NATS"), ("files, queries", "polars, Delta")]
OUTPUTS = [
    ("tables", "on TPU, GPU or CPU"),
    ("checkpoints, deltas", "stores, Parquet"),
    ("report", "and a hash of the state"),
]
PICTURES = {"gradient": gradient, "gates": gates, "commits": commits, "scaling": scaling}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
