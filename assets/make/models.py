"""Fills in the shapes of `models.json`, the catalog of published models, and writes the shape of
the starter, which `starter.py` makes, to `starter-shape.json`.

    python assets/make/models.py                 writes the shape of every model
    python assets/make/models.py ID ...          writes these, and keeps the others
    python assets/make/models.py --check [ID ...]  compares; exit code 1 if anything differs

The id of the starter is assets/starter-model.

The facts of each model (all keys but `shape` and `adapters`) are written by hand, from the
published configuration. Each model is built on the meta device, in bfloat16 and in float32, without
adapters and with them; nothing is downloaded. A block of the largest takes some 16 GiB of memory to
try. A model that also reads images or sound is built whole, as `architectures` in its configuration
say; its shape is that of its language model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# The trial models are so small that threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.paths import PROGRAM_ROOT
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.catalog import FILE, STARTER_FILE, catalog, starter_shape
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.serialize import (
    ACTIVATION_FIELDS,
    LOW_RANK,
    AdaptedBlock,
    pack,
    pack_adapters,
)

FACTS = (
    "id",
    "also",
    "contexts",
    "title",
    "family",
    "published",
    "published_active",
    "unread",
    "source",
    "config",
)
STARTER = "assets/starter-model"
LOW, HIGH, CHECKED = (Adapters(rank=rank) for rank in (LOW_RANK, 2 * LOW_RANK, 5))
"""What is stored of adapters was counted with the first two of these, and is compared with what is
counted with the third.
"""


def meta_shape(
    config: Any, source: str, dtype: str, adapters: Adapters | None
) -> tuple[ModelShape, list[AdaptedBlock]]:
    """What the engine itself finds for a configuration of transformers. Raises ModelError for a
    model that it refuses.
    """
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of

    built = build_model(config, ModelConfig(source=source, dtype=dtype), adapters)
    blocks = []
    for unit in built.blocks:
        specs = unit.layout.parameters
        shapes = [spec.shape for spec in specs if spec.adapter]
        layers = [(a[1], b[0]) for a, b in zip(shapes[::2], shapes[1::2], strict=True)]
        blocks.append(AdaptedBlock(layers, [spec.numel for spec in specs if spec.keep_in_fp32]))
    return shape_of(built, source), blocks


def _published(config: dict[str, Any]) -> Any:
    """The facts of a model as a configuration of transformers."""
    from engine.model.build.library import transformers

    return transformers().AutoConfig.for_model(**copy.deepcopy(config))


def _shapes(
    config: Any, source: str, adapters: Adapters | None = None
) -> tuple[dict[str, ModelShape], list[AdaptedBlock]]:
    """In bfloat16 and, where the trial of one block fits into this machine's memory, in float32."""
    shape, blocks = meta_shape(config, source, "bfloat16", adapters)
    shapes = {"bfloat16": shape}
    try:
        shapes["float32"], _ = meta_shape(config, source, "float32", adapters)
    except ModelError as error:
        print(f"{source} has no float32 counts: {error}", flush=True)
    return shapes, blocks


def _rows(config: Any, source: str) -> dict[str, Any]:
    """What is stored of a model: the row of its shape, and that of its adapters."""
    whole, _ = _shapes(config, source)
    (low, blocks), (high, _) = (_shapes(config, source, adapters) for adapters in (LOW, HIGH))
    return {"shape": pack(whole), "adapters": pack_adapters(low, high, blocks)}


def _starter() -> tuple[bytes, Any]:
    """(the bytes of its config.json, its configuration)"""
    from engine.model.build.pretrained_files import load_config

    content = (PROGRAM_ROOT / STARTER / "config.json").read_bytes()
    return content, load_config(str(PROGRAM_ROOT / STARTER))


def write_starter() -> None:
    """The shape of the starter, under the sha256 of its configuration: a copy of its folder is the
    same model.
    """
    content, config = _starter()
    digest, rows = json.dumps(hashlib.sha256(content).hexdigest()), _rows(config, STARTER)
    lines = [f'"{name}": {json.dumps(row)}' for name, row in rows.items()]
    STARTER_FILE.write_text(
        f'{{"config_sha256": {digest},\n ' + ",\n ".join(lines) + "}\n", encoding="utf-8"
    )


def write(rows: Iterable[dict[str, Any]]) -> None:
    """One model in four lines: what is known of it, its configuration, its shape, its adapters."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    texts = []
    for row in rows:
        known = {name: row[name] for name in FACTS if name != "config" and name in row}
        facts = line(known)[1:-1]
        # A model whose turn is still to come may have no rows yet.
        names = [name for name in ("config", "shape", "adapters") if name in row]
        others = [f'"{name}": {line(row[name])}' for name in names]
        texts.append(f"  {{{facts},\n   " + ",\n   ".join(others) + "}")
    FILE.write_text('{"models": [\n' + ",\n".join(texts) + "\n]}\n", encoding="utf-8")


def differences(wanted: set[str]) -> list[str]:
    """What is bundled for these models (all, if none is named) and is not what the meta device
    gives, in words; every id of every entry, in both dtypes.
    """
    found = []
    for entry in catalog():
        if wanted and entry.id not in wanted:
            continue
        started = time.monotonic()
        for source in (entry.id, *entry.contexts):
            config = _published(entry.config_of(source))
            for adapters in (None, CHECKED):
                for dtype, built in _shapes(config, source, adapters)[0].items():
                    bundled = entry.shape(dtype, source=source, adapters=adapters)
                    non_text = built.untouched_numel + entry.unread
                    found += _unlike(bundled, replace(built, untouched_numel=non_text), adapters)
        print(f"{entry.id}: {time.monotonic() - started:.1f} s", flush=True)
    if not wanted or STARTER in wanted:
        content, config = _starter()
        for adapters in (None, CHECKED):
            for dtype, built in _shapes(config, STARTER, adapters)[0].items():
                bundled = starter_shape(content, dtype, "auto", STARTER, adapters)
                found += _unlike(bundled, built, adapters)
    return found


def _unlike(bundled: ModelShape | None, built: ModelShape, adapters: Adapters | None) -> list[str]:
    beside = " with adapters" if adapters else ""
    return [
        f"{built.source} in {built.dtype}{beside}: {item.name}"
        for item in fields(ModelShape)
        if bundled is None
        or getattr(_rounded(bundled), item.name) != getattr(_rounded(built), item.name)
    ]


def _rounded(shape: ModelShape) -> ModelShape:
    """Estimated activations differ by the rounding of their sums."""
    units = []
    for unit in shape.units:
        found = {name: getattr(unit, name) for name in ACTIVATION_FIELDS}
        rounded = {
            name: Activations(round(kept.per_token, 3), round(kept.per_pair, 3))
            for name, kept in found.items()
        }
        units.append(replace(unit, **rounded))
    return replace(shape, units=tuple(units))


def main() -> int:
    check, wanted = "--check" in sys.argv[1:], {name for name in sys.argv[1:] if name != "--check"}
    if check:
        found = differences(wanted)
        print("\n".join(found) or "What is bundled is what the meta device gives.")
        return 1 if found else 0
    rows = json.loads(FILE.read_text(encoding="utf-8"))["models"]
    for row in rows:
        if not wanted or row["id"] in wanted:
            started = time.monotonic()
            row.update(_rows(_published(row["config"]), row["id"]))
            print(f"{row['id']}: {time.monotonic() - started:.1f} s", flush=True)
            write(rows)
    if not wanted or STARTER in wanted:
        write_starter()
    return 0


if __name__ == "__main__":
    sys.exit(main())
