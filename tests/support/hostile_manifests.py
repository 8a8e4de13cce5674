"""Forged manifests, whose digests match. Damage creates none of them, because the digest of a damaged one differs."""

import json
import random

from penstock.checkpoint.manifests import digest_of

NAMES = (
    "../../etc/passwd",
    "/dev/zero",
    "/etc/passwd",
    "pipe",
    "../00000001.base",
    "a/00000001.base",
    "00000001.base\n",
    "00000001.commit",
    "００００００01.base",
    "\ud800",
    "",
    ".",
    "00000001.base\x00",
    "0" * 300 + ".base",
    "00000001-1of0.base",
    "00000001-5of2.base",
)
VALUES = (
    None,
    True,
    7,
    -1,
    0,
    1.5,
    2**63,
    -(2**70),
    10**12,
    "x",
    "",
    [],
    {},
    [[]],
    {"a": 1},
    [3],
    float("nan"),
    float("inf"),
    "\ud800",
)
BODIES = {
    "a number": b"1",
    "null": b"null",
    "a text": b'"x"',
    "a list": b"[]",
    "nothing": b"",
    "200,000 brackets": b"[" * 200_000,
    "200,000 objects": b'{"a":' * 200_000,
    "a number of 5,000 digits": b'{"number": ' + b"9" * 5000 + b"}",
    "no UTF-8": b"\xff\xfe{}",
    "half": b'{"number": 1, "fi',
}


def sealed(body: bytes) -> bytes:
    """The manifest of this text: with the digest that fits."""
    return body + b"\n" + digest_of(body).encode() + b"\n"


def body_of(manifest: bytes) -> bytes:
    """A manifest without its digest."""
    return manifest.removesuffix(b"\n").rpartition(b"\n")[0]


def places_in(value, place=()):
    """The place of everything inside of plain data, as keys and indices."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield (*place, key)
        yield from places_in(child, (*place, key))


def changed(fields, place, change):
    """A copy of plain data whose value at a place is replaced: ``change`` gets the parent and the key."""
    copy = parent = json.loads(json.dumps(fields))
    for key in place[:-1]:
        parent = parent[key]
    change(parent, place[-1])
    return copy


def forged(manifest: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return the change and the manifest: a field has another value or type, is missing, or names another file."""
    if rng.random() < 0.1:
        name, body = rng.choice(list(BODIES.items()))
        return name, sealed(body)
    fields = json.loads(body_of(manifest))
    place = rng.choice(list(places_in(fields)))
    how = rng.choice(["value", "value", "name", "gone", "twice"])
    value = rng.choice(VALUES)
    if how == "name":
        place, value = ("files", rng.randrange(len(fields["files"])), "name"), rng.choice(NAMES)

    def change(parent, key):
        if how == "gone":
            del parent[key]
        elif how == "twice" and isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[key] = value

    label = f"{'.'.join(map(str, place))}: {how} {value!a}"
    return label, sealed(json.dumps(changed(fields, place, change)).encode())
