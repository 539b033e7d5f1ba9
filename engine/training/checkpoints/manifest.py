"""What the manifest of a checkpoint says, typed.

A checkpoint may come from a stranger, and a checksum protects from damage alone. So a manifest is
taken only if all of it has the types, sizes and names that this program writes, and a file that it
names is one in the checkpoint's own folder. Whether it belongs to a model, and lacks nothing of it,
is verified before anything is loaded (`engine.training.checkpoints.same_model`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from engine import safe_files
from engine.config.optimizers import Optimizer
from engine.errors import CheckpointError
from engine.files import body_checksum
from engine.planning.schedule.ops import MainGrad

T = TypeVar("T")

FORMAT = 6
"""Format of all checkpoints. Those before it are not read: the names of settings in them are
others.
"""
MANIFEST = "manifest.json"
MOST_BYTES = 64 << 20
"""A manifest has at most this many bytes, enough for the checksums of 10 TB."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Step = Annotated[int, Meta(ge=0, lt=10**15)]
Number = Annotated[int, Meta(ge=1, lt=1 << 31)]
Text = Annotated[str, Meta(max_length=4096)]
FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=255)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class OtherCheckpointFormat(CheckpointError):
    """Another version of this program wrote the checkpoint, in a format of its own."""


class Parameter(Struct, frozen=True):
    """A parameter of a unit, as `engine.training.checkpoints.unit_files.description` writes it."""

    name: Text
    full_name: Text
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    decay: bool
    offset: Count
    """The element of a plane at which it starts."""
    frozen: bool = False


class Plane(Struct, frozen=True):
    """A plane of a unit: a range of the unit's file."""

    offset: Count
    bytes: Count
    checksums: tuple[Digest, ...]
    """One for each chunk."""


class UnitFile(Struct, frozen=True):
    """The file of a unit with its planes."""

    unit: Text
    numel: Count
    decay_numel: Count
    parameters: tuple[Parameter, ...]
    file: FileName
    bytes: Count
    planes: dict[Text, Plane]


class FrozenFile(Struct, frozen=True):
    """The file of a unit with its weights that are not trained."""

    unit: Text
    file: FileName
    bytes: Count
    checksums: tuple[Digest, ...]


class BuffersFile(Struct, frozen=True):
    """The file of the persistent buffers."""

    file: FileName
    bytes: Count
    checksum: Digest


class Manifest(Struct, frozen=True):
    """A manifest that was verified. `Contents` in `engine.training.checkpoints.checkpoint` is
    written so.
    """

    format: Number
    step: Step
    dtype: Literal["bfloat16", "float32"]
    units: tuple[UnitFile, ...]
    state: dict[str, Any]
    """What a resume needs beside the planes; what is known of it has the types of `_State`."""
    holds: Literal["full", "weights"]
    optimizer: Optimizer
    """The moments are those of this optimizer."""
    chunk_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    buffers: BuffersFile | None = None
    """None if the model has none."""
    frozen: tuple[FrozenFile, ...] = ()
    manifest_bytes: int = 0
    """The bytes of the manifest itself."""

    @property
    def files(self) -> Iterator[UnitFile | FrozenFile | BuffersFile]:
        """The files of the checkpoint beside the manifest."""
        yield from self.units
        yield from self.frozen
        if self.buffers is not None:
            yield self.buffers


# ---------------------------------------------------------------------- the state


class _Rounding(Struct):
    """`Chosen.rounding`."""

    micro_batch_size: Number
    loss_chunk: Number
    main_grad: MainGrad
    rounds: Number
    ranks: Number
    replicas: Number
    nodes_per_replica: Number
    compiled: bool
    tile_tokens: Count


class _Settings(Struct):
    """Those settings of the session that wrote a checkpoint which are more than compared."""

    method: Literal["full", "lora", "parts"] = field(default="full", name="train.method")
    source: Text = field(default="", name="model.source")
    rope_scaling: Text = field(default="none", name="model.rope_scaling")
    add_tokens: list[Text] = field(default_factory=list, name="data.add_tokens")


class _Adapters(Struct):
    """The same of a session that trained adapters."""

    rank: Number = field(name="train.lora_rank")
    alpha: float = field(name="train.lora_alpha")
    dropout: float = field(name="train.lora_dropout")
    rslora: bool = field(name="train.lora_rslora")
    targets: list[Text] = field(name="train.lora_targets")
    save_modules: list[Text] = field(name="train.lora_save_modules")
    target_parameters: list[Text] = field(default_factory=list, name="train.lora_target_parameters")


class _Parts(Struct):
    """The same of a session that trained parts of a model."""

    part_names: list[Text] = field(name="train.part_names")
    last_blocks: Count = field(name="train.last_blocks")


_METHODS: dict[str, type] = {"lora": _Adapters, "parts": _Parts}


class _State(Struct):
    """What is known of a state. That of the best weights has a score alone."""

    data: Text = ""
    rounding: dict[str, Any] | None = None
    total_steps: Step | None = None
    skipped: list[Step] = field(default_factory=list)
    settings: dict[str, Any] | None = None
    loss: float | None = None
    correct: Count = 0
    total: Count = 0


def _verify_state(state: dict[str, Any]) -> None:
    """Raises msgspec.ValidationError for a state of other types."""
    known = msgspec.convert(state, _State)
    if known.rounding:
        msgspec.convert(known.rounding, _Rounding)
    if known.settings:
        method = msgspec.convert(known.settings, _Settings).method
        if method in _METHODS:
            msgspec.convert(known.settings, _METHODS[method])


# ---------------------------------------------------------------------- reading


def run_of(checkpoint: Path) -> Path:
    """Returns the folder below which no link is followed to a checkpoint: that of its run."""
    return checkpoint.parent.parent


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of the checkpoint in `path` after verifying its checksum and its types.

    Raises CheckpointError if it cannot be read or is damaged, and OtherCheckpointFormat for
    another format.
    """
    try:
        content = safe_files.read_bytes(path / MANIFEST, run_of(path), MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"Checkpoint {path} has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {path} cannot be read ({MANIFEST}: {error.strerror})."
        ) from None
    return _typed(path, content)


def _typed(path: Path, content: bytes) -> Manifest:
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
        is_right = isinstance(body, dict) and body.pop("checksum", None) == body_checksum(body)
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise CheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} is not what was written.")
    found = body.get("format")
    if isinstance(found, int) and found != FORMAT:
        shown = found if abs(found) < 10**6 else "of another version"
        raise OtherCheckpointFormat(
            f"Checkpoint {path} has format {shown}, which this version cannot read; use the "
            "version of Ramstream that wrote it."
        )
    try:
        manifest = msgspec.convert(body | {"manifest_bytes": len(content)}, Manifest)
        _verify_state(manifest.state)
    except (ValueError, OverflowError, RecursionError) as error:
        why = str(error).splitlines()[0][:200].rstrip(".")
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {MANIFEST} is not as this program writes it ({why})."
        ) from None
    _refuse_contradictions(path, manifest)
    return manifest


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refuse_contradictions(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for a manifest that does not agree with itself or with its folder."""
    step = step_in(path.name)
    problem = ""
    if step not in (None, manifest.step):
        problem = f"it is of step {manifest.step:,}"
    names = [each.file for each in manifest.files]
    if len({*names, MANIFEST}) != len(names) + 1:
        problem = "two of its files have one name"
    if len({each.unit for each in manifest.units}) != len(manifest.units):
        problem = "a unit is there twice"
    for each in manifest.units:
        problem = _problem_of_planes(each, manifest) or problem
    for frozen in manifest.frozen:
        if len(frozen.checksums) != _chunks(frozen.bytes, manifest):
            problem = f"{frozen.file} has other checksums than chunks"
    if problem:
        raise CheckpointError(f"Checkpoint {path} is damaged: {problem}.")


def _problem_of_planes(unit: UnitFile, manifest: Manifest) -> str:
    """Returns in words what is wrong with where the planes of a unit are, or an empty text."""
    end = 0
    for name, plane in unit.planes.items():
        if plane.offset < end or plane.offset + plane.bytes > unit.bytes:
            return f"{name} of unit {unit.unit} is not where it can be in {unit.file}"
        end = plane.offset + plane.bytes
        if len(plane.checksums) != _chunks(plane.bytes, manifest):
            return f"{name} of unit {unit.unit} has other checksums than chunks"
    return ""


def _chunks(size: int, manifest: Manifest) -> int:
    return -(-size // manifest.chunk_bytes)


# ---------------------------------------------------------------------- the names of checkpoints


def step_in(name: str) -> int | None:
    """Returns the step of a checkpoint's folder by its name, or None for another name.

    A ``.step-N.old`` is the checkpoint of step N while another takes its place.
    """
    stem = name.removeprefix(".").removesuffix(".old") if name.startswith(".") else name
    digits = stem.removeprefix("step-")
    is_one = stem != digits and digits.isascii() and digits.isdigit() and len(digits) < 16
    is_one = is_one and (not name.startswith(".") or name.endswith(".old"))
    return int(digits) if is_one and digits == str(int(digits)) else None
