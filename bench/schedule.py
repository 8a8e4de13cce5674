"""When the tasks of a step would end on many workers, by their times: the order and the rules are those of the engine.

It is a model. Tasks take as long as alone, whatever the others do: no memory bandwidth, no cache and no lock is shared,
and no thread has to be woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

MOST_FOLDING = 8  # threads share the rows of a fold by the groups of its slots: NUM_GROUPS of pyx/coalesce.pxd


class Task(NamedTuple):
    """phase : "split", "add", "find", "fold", "check", or "item" of an update; table : its number; seconds : alone"""

    phase: str
    table: int
    seconds: float


def makespan(tasks: Sequence[Task], workers: int) -> float:
    """Return when the last of the tasks ends.

    A worker that is free takes the first task that none has begun and that can begin: an "add" when all rows of its
    table are split, a "fold" with the "find" of its table, whose end is not before that one's. A fold can be shared by
    MOST_FOLDING workers, who have nothing else to begin.
    """
    left, shared = list[Task](), list[Task]()
    for task in tasks:
        if task.phase == "fold":
            part = task._replace(seconds=task.seconds / MOST_FOLDING)
            left.append(part)
            shared[:0] = [part] * (MOST_FOLDING - 1)  # the last ones first, which have most left
        else:
            left.append(task)
    left += shared
    splits = {task.table: 0 for task in tasks}
    for task in tasks:
        splits[task.table] += task.phase == "split"
    split_at = dict.fromkeys(splits, 0.0)  # when the last split that was begun ends
    found = dict[int, tuple[float, float]]()  # when the find of a table begins, and ends
    finds = {task.table for task in tasks if task.phase == "find"}
    free, end = [0.0] * workers, 0.0
    heapify(free)

    def ready(task: Task) -> float:
        if task.phase == "add":
            return float("inf") if splits[task.table] else split_at[task.table]
        if task.phase == "fold" and task.table in finds:
            return found.get(task.table, (float("inf"), 0.0))[0]
        return 0.0

    while left:
        now = heappop(free)
        number = next((number for number, task in enumerate(left) if ready(task) <= now), None)
        if number is None:
            heappush(free, min(map(ready, left)))
            continue
        task = left.pop(number)
        ends = now + task.seconds
        if task.phase == "fold" and task.table in found:
            ends = max(ends, found[task.table][1])
        elif task.phase == "find":
            found[task.table] = now, ends
        elif task.phase == "split":
            splits[task.table] -= 1
            split_at[task.table] = max(split_at[task.table], ends)
        heappush(free, ends)
        end = max(end, ends)
    return end
