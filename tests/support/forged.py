"""Manifests of checkpoints that a forger wrote, with right checksums."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.files import body_checksum

MANIFEST = "manifest.json"
_DEEP = 500
_VALUES: dict[str, Any] = {
    "null": None,
    "a text": "x",
    "a list": [],
    "an object": {},
    "true": True,
    "a fraction": 0.5,
    "negative": -1,
    "zero": 0,
    "huge": 2**70,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "deep": [],  # made below
}
for _ in range(_DEEP):
    _VALUES["deep"] = [_VALUES["deep"]]
_OUTSIDE = (
    "../outside.planes",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/../b",
    "\0",
    "x" * 300,
    "manifest.json",
)
"""Names that a file of a checkpoint must not have."""


def body_of(checkpoint: Path) -> dict[str, Any]:
    """Returns what the manifest of a checkpoint says, without its checksum."""
    body = json.loads((checkpoint / MANIFEST).read_bytes())
    del body["checksum"]
    return body


def forge(checkpoint: Path, body: dict[str, Any]) -> None:
    """Replaces the manifest of a checkpoint; its checksum is right."""
    text = json.dumps({"checksum": body_checksum(body), **body})
    (checkpoint / MANIFEST).write_text(text, encoding="utf-8")


def forgeries(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields forged bodies of a manifest, each with a name that says what was done."""
    for place in _places(body):
        where = ".".join(map(str, place))
        for name, value in _VALUES.items():
            yield (
                f"{where} is {name}",
                _changed(body, place, lambda owner, key, v=value: owner.__setitem__(key, v)),
            )
        yield f"{where} is gone", _changed(body, place, lambda owner, key: owner.pop(key))
        if place[-1] == "file":
            for name in _OUTSIDE:
                found = repr(name[:20])
                yield (
                    f"{where} is {found}",
                    _changed(body, place, lambda owner, key, v=name: owner.__setitem__(key, v)),
                )
    yield from thought_of(body)


def thought_of(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields those that only a person thinks of."""
    for change in THOUGHT_OF:
        forged = copy.deepcopy(body)
        change(forged)
        yield change.__name__.strip("_").replace("_", " "), forged


def _changed(
    body: dict[str, Any], place: tuple, change: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    forged = copy.deepcopy(body)
    owner = forged
    for key in place[:-1]:
        owner = owner[key]
    change(owner, place[-1])
    return forged


def _places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yields where values are in a manifest; of a list, the first one and the last one."""
    if place:
        yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list) and value:
        for number in dict.fromkeys((0, len(value) - 1)):
            yield from _places(value[number], (*place, number))


# ---------------------------------------------------------------------- thought of by a person


def _without_planes(body: dict[str, Any]) -> None:
    for unit in body["units"]:
        unit["planes"] = {}


def _first_without_planes(body: dict[str, Any]) -> None:
    body["units"][0]["planes"] = {}


def _empty_planes(body: dict[str, Any]) -> None:
    for plane in body["units"][0]["planes"].values():
        plane |= {"bytes": 0, "checksums": []}


def _one_piece(body: dict[str, Any]) -> None:
    """A plane that ends after its first chunk."""
    plane = next(iter(body["units"][0]["planes"].values()))
    plane["bytes"] = min(plane["bytes"], body["chunk_bytes"]) // 2


def _fewer_checksums(body: dict[str, Any]) -> None:
    for plane in body["units"][0]["planes"].values():
        plane["checksums"] = plane["checksums"][:-1]


def _swapped(body: dict[str, Any]) -> None:
    planes = body["units"][0]["planes"]
    first, *_, last = planes
    planes[first], planes[last] = planes[last], planes[first]


def _same_plane(body: dict[str, Any]) -> None:
    planes = body["units"][1]["planes"]
    first = next(iter(planes))
    for plane in planes:
        planes[plane] = dict(planes[first])


def _beyond(body: dict[str, Any]) -> None:
    for plane in body["units"][0]["planes"].values():
        plane["offset"] = body["units"][0]["bytes"]


def _swapped_files(body: dict[str, Any]) -> None:
    one, two = body["units"][1], body["units"][2]
    one["file"], two["file"] = two["file"], one["file"]


def _same_file(body: dict[str, Any]) -> None:
    body["units"][2]["file"] = body["units"][1]["file"]
    body["units"][2]["planes"] = copy.deepcopy(body["units"][1]["planes"])


def _swapped_units(body: dict[str, Any]) -> None:
    one, two = body["units"][1], body["units"][2]
    one["unit"], two["unit"] = two["unit"], one["unit"]


def _small_chunks(body: dict[str, Any]) -> None:
    body["chunk_bytes"] = 1


def _old_format(body: dict[str, Any]) -> None:
    body["format"] = 1


def _twice(body: dict[str, Any]) -> None:
    body["units"].append(copy.deepcopy(body["units"][0]))


def _all_twice(body: dict[str, Any]) -> None:
    body["units"] += copy.deepcopy(body["units"])


def _extra_unit(body: dict[str, Any]) -> None:
    body["units"].append(body["units"][0] | {"unit": "block.99"})


def _no_last_unit(body: dict[str, Any]) -> None:
    body["units"].pop()


def _reversed(body: dict[str, Any]) -> None:
    body["units"].reverse()


def _only_weights(body: dict[str, Any]) -> None:
    """It says that it is full, and has no moments."""
    for unit in body["units"]:
        unit["planes"] = {
            name: plane for name, plane in unit["planes"].items() if "exp" not in name
        }


def _no_weights(body: dict[str, Any]) -> None:
    for unit in body["units"]:
        unit["planes"] = {name: plane for name, plane in unit["planes"].items() if "exp" in name}


def _unknown_plane(body: dict[str, Any]) -> None:
    planes = body["units"][0]["planes"]
    planes["weight_highest"] = planes.pop("weight_high")


def _gradients(body: dict[str, Any]) -> None:
    planes = body["units"][0]["planes"]
    planes["grad"] = dict(planes["weight_high"])


def _foreign_buffers(body: dict[str, Any]) -> None:
    unit = body["units"][0]
    body["buffers"] = {"file": unit["file"], "bytes": unit["bytes"], "checksum": "0" * 32}


def _foreign_frozen(body: dict[str, Any]) -> None:
    unit = body["units"][0]
    body["frozen"] = [{key: unit[key] for key in ("unit", "file", "bytes")} | {"checksums": []}]


def _later_step(body: dict[str, Any]) -> None:
    body["step"] += 1000


def _earlier_step(body: dict[str, Any]) -> None:
    body["step"] = 0


def _many_units(body: dict[str, Any]) -> None:
    body["units"] = [body["units"][0]] * 2_000


def _no_shape(body: dict[str, Any]) -> None:
    for unit in body["units"]:
        for parameter in unit["parameters"]:
            parameter["shape"] = []


def _wrong_shape(body: dict[str, Any]) -> None:
    shape = body["units"][0]["parameters"][0]["shape"]
    shape[0], shape[-1] = shape[-1], shape[0]


def _huge_shape(body: dict[str, Any]) -> None:
    body["units"][0]["parameters"][0]["shape"][0] = 2**60


def _no_parameters(body: dict[str, Any]) -> None:
    body["units"][0]["parameters"] = []


def _later_format(body: dict[str, Any]) -> None:
    body["format"] = 10**6


THOUGHT_OF: tuple[Callable[[dict[str, Any]], None], ...] = (
    _without_planes,
    _first_without_planes,
    _empty_planes,
    _one_piece,
    _fewer_checksums,
    _swapped,
    _same_plane,
    _beyond,
    _swapped_files,
    _same_file,
    _swapped_units,
    _small_chunks,
    _old_format,
    _twice,
    _all_twice,
    _extra_unit,
    _no_last_unit,
    _reversed,
    _only_weights,
    _no_weights,
    _unknown_plane,
    _gradients,
    _foreign_buffers,
    _foreign_frozen,
    _later_step,
    _earlier_step,
    _many_units,
    _no_shape,
    _wrong_shape,
    _huge_shape,
    _no_parameters,
    _later_format,
)
