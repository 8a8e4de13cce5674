"""``inspect.signature`` and ``help`` show every keyword, as they did when this record was made, or more."""

import json
from pathlib import Path

import pytest
from public_calls import shown

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "public_calls.json").read_text())
SHOWN = shown()


def test_every_recorded_call_still_exists():
    assert RECORDED.keys() - SHOWN.keys() == set()


@pytest.mark.parametrize("name", [name for name in RECORDED if name in SHOWN])
def test_a_call_shows_what_it_showed_or_more(name):
    before, after = RECORDED[name], SHOWN[name]
    assert after["has_help"] >= before["has_help"]
    assert set(before["explained"]) - set(after["explained"]) == set()
    if before["parameters"] is None:
        return
    parameters = after["parameters"]
    assert {key: parameters.get(key) for key in before["parameters"]} == before["parameters"]
    by_position = [key for key, (kind, _) in before["parameters"].items() if kind.startswith("positional")]
    assert list(parameters)[: len(by_position)] == by_position
    added = {key: default for key, (_, default) in parameters.items() if key not in before["parameters"]}
    assert None not in added.values(), "a new parameter has a default"
