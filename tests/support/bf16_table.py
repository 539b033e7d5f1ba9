"""Logits in bf16 of every family, streamed and by plain transformers, as a table.

python -m tests.support.bf16_table             prints the table of docs/precision.md
"""

from __future__ import annotations

import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel

from engine.model.build.attention import KERNELS
from engine.model.build.pretrained_files import load_config
from engine.model.build.units import StreamedModel
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.weights.weights import load_pretrained
from tests.support.checkpoints_of_families import (
    bf16_model,
    kept_in_fp32,
    load_plain,
    round_to_bf16,
    save_family,
)
from tests.support.families import PAGE_WIDTH, VOCAB

BOUND = 1.1
"""Where logits are not the same bits, their error against float32 is at most this many times that
of transformers.
"""
REFUSED = {
    "xlstm": "its code in transformers multiplies bfloat16 by float32 and fails; it trains in "
    "float32, and is refused by name in bfloat16",
}
UNMEASURED = {
    "emu3": "transformers saves its text part as a model that it does not read again",
}
OTHER_ORDER = {
    "mimo_v2_flash": "the attention that goes document by document has sinks here, and rounds them "
    "in another place than eager attention; with eager attention the bits are the same",
}
"""Families whose logits are not the same bits with the attention that we choose, and why."""


@dataclass(frozen=True)
class Compared:
    """The logits of one family with one attention."""

    attention: str
    same_bits: bool
    ours: float
    """The error against float32 is this share of the norm of the logits."""
    theirs: float


@dataclass(frozen=True)
class FamilyLogits:
    """What was compared for a family."""

    kept: bool
    """It has parameters that stay in fp32."""
    alike: Compared
    """Ours have the attention of transformers here."""
    chosen: Compared
    """Ours have the attention that a run uses."""


def compare(family: str) -> FamilyLogits:
    """Compares the logits of a tiny random checkpoint, for whole rows. What stays in fp32 must be
    what transformers keeps there.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = save_family(Path(place) / "model", family)
        config = load_config(str(folder))
        ours = bf16_model(folder, config)
        kept = kept_in_fp32(ours)
        exact = round_to_bf16(folder, kept)
        ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
        # Plain transformers has chosen this attention, for the model in fp32.
        attention = exact.config.get_text_config()._attn_implementation
        plain = load_plain(folder, torch.bfloat16, attn_implementation=attention)
        with torch.no_grad(), sdpa_kernel(KERNELS, set_priority=True):
            truth, theirs = (
                model(input_ids=ids, use_cache=False).logits.float() for model in (exact, plain)
            )
        assert kept == {n for n, p in plain.named_parameters() if p.dtype == torch.float32}
        for name, buffer in ours.persistent_buffers().items():
            assert buffer.dtype == plain.get_buffer(name).dtype, name

        def compared(model: StreamedModel) -> Compared:
            found, used = streamed_logits(model, folder, ids)
            same = torch.equal(found, theirs)
            return Compared(used, same, error(found, truth), error(theirs, truth))

        alike = bf16_model(folder, config, attention)
        return FamilyLogits(bool(kept), compared(alike), compared(ours))


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of `truth`."""
    return float((found - truth).norm() / truth.norm())


def streamed_logits(
    model: StreamedModel, folder: Path, ids: torch.Tensor
) -> tuple[torch.Tensor, str]:
    """Returns the logits [rows, tokens, vocabulary] of the streamed model with the weights in
    `folder`, with the whole tail at once, and the attention that it had.
    """
    states = HostStates(model.layouts, "bfloat16", threads=1)
    states.allocate_weights()
    load_pretrained(model, str(folder), states)
    settings = EngineSettings(PlanChoices().changed(slots=2, prefetch_depth=1), ids.numel())
    engine = StreamingEngine(model, states, CpuBackend(), settings)
    logits = engine._logits([ids.numpy()], [np.arange(ids.numel())])
    engine.close()
    states.close()
    used = model.skeleton.model.config.get_text_config()._attn_implementation
    return logits.view(*ids.shape, -1), used


def table(found: dict[str, FamilyLogits]) -> str:
    """Returns the text of docs/precision.md between its marks, of all families that were compared.

    It holds no measured number, so that it is the same on every machine.
    """
    same = [family for family, logits in sorted(found.items()) if logits.chosen.same_bits]
    kept = [family for family, logits in sorted(found.items()) if logits.kept]
    others = sorted(set(found) - set(same))
    rows = [
        *(f"| {family} | {OTHER_ORDER[family]} |" for family in others),
        *(f"| {family} | not compared: {why} |" for family, why in sorted(UNMEASURED.items())),
        *(f"| {family} | {why} |" for family, why in sorted(REFUSED.items())),
    ]
    return "\n".join(
        [
            _filled(
                f"**The same bits as plain transformers in bf16: {len(same)} families**, with the "
                f"attention that a run uses: {', '.join(same)}."
            ),
            "",
            _filled(
                f"Of these families, some have parameters that stay in fp32: {', '.join(kept)}."
            ),
            "",
            "| the others | |",
            "|---|---|",
            *rows,
        ]
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, PAGE_WIDTH, break_on_hyphens=False)


if __name__ == "__main__":
    from tests.support.family_parity import SUPPORTED

    left_out = {*REFUSED, *UNMEASURED}
    print(table({family: compare(family) for family in SUPPORTED if family not in left_out}))
