"""The rule of cached tables in plain Python, and Belady's, for comparison with RowCache and the counts of engines."""

import math
from bisect import bisect_right


def mix(row):
    """A hash of a row, by which rows of equal use are ordered."""
    x, mask = row, 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def simulated(openings, places, look_ahead):
    """What the rule moves: (rows that go up, rows that go down, hits) of every chunk, both ascending.

    openings : the uses of each, a use being distinct rows; look_ahead : openings; places : on the device
    """
    uses = [(number, sorted(map(int, rows))) for number, uses in enumerate(openings) for rows in uses if len(rows)]
    when = {}  # row → the numbers of its uses
    for number, (_, rows) in enumerate(uses):
        for row in rows:
            when.setdefault(row, []).append(number)
    last_use, num_chunks, moves = {}, 0, []
    for number, (opening, rows) in enumerate(uses):

        def rank(row, now=number, known=opening + look_ahead if look_ahead else -1):
            after = bisect_right(when[row], now)
            is_known = after < len(when[row]) and uses[when[row][after]][0] <= known
            return -when[row][after] if is_known else -math.inf, last_use[row], mix(row)

        order = [row for row in rows if row in last_use] + [row for row in rows if row not in last_use]
        for first in range(0, len(order), places):
            chunk = order[first : first + places]
            up = [row for row in chunk if row not in last_use]
            num_down = max(0, len(last_use) + len(up) - places)
            down = sorted(set(last_use) - set(chunk), key=rank)[:num_down] if num_down else []
            for row in down:
                del last_use[row]
            num_chunks += 1
            last_use.update(dict.fromkeys(chunk, num_chunks))
            moves.append((sorted(up), sorted(down), len(chunk) - len(up)))
    return moves


def fewest_misses(uses, places):
    """Belady's misses: the residents whose next use is farthest leave. No use has more rows than places."""
    following, upcoming = [{} for _ in uses], {}
    for number in range(len(uses) - 1, -1, -1):
        for row in uses[number]:
            following[number][row] = upcoming.get(row, math.inf)
            upcoming[row] = number
    resident, misses = {}, 0  # row → its next use
    for number, rows in enumerate(uses):
        missing = [row for row in rows if row not in resident]
        misses += len(missing)
        others = sorted(resident.keys() - set(rows), key=resident.__getitem__, reverse=True)
        for row in others[: max(0, len(resident) + len(missing) - places)]:
            del resident[row]
        resident.update(following[number])
    return misses
