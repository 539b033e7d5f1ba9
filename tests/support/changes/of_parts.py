"""Changes to what is done for parameters that are not trained."""

from __future__ import annotations

from tests.support.changes.record import Change

PARITY = "tests/engine/runtime/test_trained_parts.py"
PLANS = "tests/engine/planning/schedule/test_plans_of_parts.py"
SIZES = "tests/engine/planning/fit/test_sizes_of_parts.py"
RUNS = "tests/engine/training/loop/test_runs_of_parts.py"

PART_CHANGES = (
    Change(
        "frozen-weights-not-fetched",
        "engine/runtime/step/copy_ops.py",
        "(0, layout.high_numel) if is_whole",
        "(0, layout.numel) if is_whole",
        "A prefetch leaves out the weights that are not trained.",
        (PARITY,),
    ),
    Change(
        "one-template-for-other-parts",
        "engine/model/build/units.py",
        "kinds.setdefault((unit.kind, frozen), len(kinds))",
        "kinds.setdefault((unit.kind, ()), len(kinds))",
        "Blocks share a template, though other parameters of them are trained.",
        (f"{PARITY}::test_parts_anywhere",),
    ),
    Change(
        "frozen-fp32-weights-decay",
        "engine/planning/layout/layout.py",
        "if spec.decay and not spec.frozen]",
        "if spec.decay]",
        "Weights that stay in fp32 and are not trained decay.",
        (f"{PARITY}::test_frozen_weights_in_fp32_do_not_change",),
    ),
    Change(
        "frozen-weights-rounded-away-from-zero",
        "engine/runtime/host/parameters.py",
        "content = chunk.to(dtype).view(torch.uint8).numpy()",
        "content = (piece * (1 + 2**-9)).to(dtype).view(torch.uint8).numpy()",
        "A frozen weight is rounded otherwise than transformers rounds it.",
        (f"{RUNS}::test_weights_in_fp32_are_rounded_as_transformers_rounds_them",),
    ),
    Change(
        "backward-below-what-is-trained",
        "engine/planning/schedule/rounds.py",
        "self.forward_only = units[:first]",
        "self.forward_only = units[: first // 2]",
        "Units below the first trained one have a backward.",
        (PLANS,),
    ),
    Change(
        "no-backward-through-frozen-units",
        "engine/planning/schedule/rounds.py",
        "if block not in self.forward_only]",
        "if block not in self._frozen]",
        "A frozen block above a trained one has no backward.",
        (PLANS,),
    ),
    Change(
        "block-inputs-below-what-is-trained",
        "engine/planning/schedule/unit_ops.py",
        "if block in self.trained.forward_only:\n            return Keeps.NOTHING",
        "if block in self.trained.forward_only:\n            return Keeps.BLOCK_INPUT",
        "Blocks without a backward keep their input.",
        (PLANS,),
    ),
    Change(
        "frozen-weights-keep-inputs",
        "engine/model/build/activations.py",
        "parameters[name].requires_grad_(not is_frozen)",
        "parameters[name].requires_grad_(True)",
        "The report counts activations for gradients of frozen weights.",
        (SIZES,),
    ),
    Change(
        "flops-of-frozen-weights",
        "engine/planning/shape/active_parameters.py",
        "return (forward + inputs + trained) // 3",
        "return (forward + inputs + inputs) // 3",
        "The rate that is shown counts gradients of frozen weights as work.",
        (SIZES,),
    ),
    Change(
        "slots-without-frozen-weights",
        "engine/planning/shape/block_sizes.py",
        "numel = max(self._weights[start:stop], default=0)",
        "numel = max(self._numels[start:stop], default=0)",
        "The report counts slots without the weights that are not trained.",
        (SIZES,),
    ),
    Change(
        "other-parts-after-a-resume",
        "engine/training/loop/resume.py",
        "if before and _parts(before) != _parts(now):",
        "if not before:",
        "A resume that is to train other parts is not refused by name.",
        (f"{RUNS}::test_a_resume_trains_the_same_parts",),
    ),
)
