"""Changes to AdamW, to the planes that it updates, and to the learning rate."""

from __future__ import annotations

from tests.support.changes.record import Change

HOST = "engine/runtime/host/host_adamw.py"
KERNELS = "engine/runtime/optimizer/host_kernels.py"
DEVICE = "engine/runtime/optimizer/device_adamw.py"
PARAMETERS = "engine/runtime/host/parameters.py"
SCHEDULE = "engine/training/loop/lr_schedule.py"
LAYOUT = "engine/planning/layout/layout.py"
BUILD = "engine/model/build/build.py"
ADAMW_TESTS = "tests/engine/runtime/host/test_adamw.py"
STORE_TESTS = "tests/engine/runtime/host/test_host_states.py"
DEVICE_UPDATES = "tests/engine/runtime/test_device_updated_units.py"
SCHEDULE_TESTS = "tests/engine/training/loop/test_schedule.py"
BF16 = "tests/engine/runtime/test_bf16_reference.py"

OPTIMIZER = (
    Change(
        "first-bias-correction-of-step-one",
        HOST,
        "learning_rate / (1.0 - self._beta1**step)",
        "learning_rate / (1.0 - self._beta1)",
        "The first moment is corrected in every step as in the first.",
        (ADAMW_TESTS,),
    ),
    Change(
        "second-bias-correction-without-root",
        HOST,
        "1.0 / math.sqrt(1.0 - self._beta2**step)",
        "1.0 / (1.0 - self._beta2**step)",
        "The correction of the second moment lacks its root.",
        (ADAMW_TESTS,),
    ),
    Change(
        "decay-without-the-rate",
        HOST,
        "1.0 - learning_rate * self._weight_decay",
        "1.0 - self._weight_decay",
        "Weight decay is not multiplied by the learning rate.",
        (ADAMW_TESTS,),
    ),
    Change(
        "decay-of-norms-and-biases",
        KERNELS,
        "return (scalars[0], np.float32(1), *scalars[2:])",
        "return (scalars[0], scalars[1], *scalars[2:])",
        "Norms and biases decay too.",
        (ADAMW_TESTS,),
    ),
    Change(
        "eps-under-the-root",
        KERNELS,
        "(m / (math.sqrt(v) * scalars[6] + scalars[7]))",
        "(m / (math.sqrt(v + scalars[7]) * scalars[6]))",
        "eps is added under the root of the second moment.",
        (ADAMW_TESTS,),
    ),
    Change(
        "gradients-not-clipped-in-bf16",
        KERNELS,
        "g = widen(grad[i]) * scalars[0]",
        "g = widen(grad[i])",
        "The clip factor is not applied to bf16 gradients.",
        (ADAMW_TESTS,),
    ),
    Change(
        "masters-rounded-to-bf16",
        KERNELS,
        "        bits = bits_to_keep(w)\n",
        "        bits = bits_to_keep(widen(high_of(bits_to_keep(w))))\n",
        "The fp32 master loses its lower half in every update.",
        (ADAMW_TESTS, BF16),
    ),
    Change(
        "ties-rounded-to-zero",
        KERNELS,
        "builder.add(args[0], _I32(0x8000))",
        "builder.add(args[0], _I32(0x7FFF))",
        "A weight half-way between two bf16 values is rounded towards zero.",
        (STORE_TESTS,),
    ),
    Change(
        "infinity-becomes-nan",
        KERNELS,
        'builder.icmp_unsigned(">", magnitude, _I32(_INFINITY))',
        'builder.icmp_unsigned(">=", magnitude, _I32(_INFINITY))',
        "An infinite weight is told as a NaN.",
        (STORE_TESTS,),
    ),
    Change(
        "subnormal-bias-left-out",
        HOST,
        "self._bias = _SQUARE_BIAS if bias_vanishes else 0.0",
        "self._bias = 0.0",
        "Second moments of tokens that no longer occur become subnormal, which is slow.",
        (ADAMW_TESTS,),
    ),
    Change(
        "subnormal-bias-for-any-eps",
        HOST,
        "self._bias = _SQUARE_BIAS if bias_vanishes else 0.0",
        "self._bias = _SQUARE_BIAS",
        "Where eps is tiny, the bias changes updates.",
        (ADAMW_TESTS,),
    ),
    Change(
        "subnormal-moments-kept-on-the-device",
        DEVICE,
        "m = torch.where(m.abs() < _SMALLEST_NORMAL, 0.0, m)",
        "m = torch.where(m.abs() < 0.0, 0.0, m)",
        "The device keeps first moments that the host sets to 0.",
        (DEVICE_UPDATES,),
    ),
    Change(
        "decay-of-norms-on-the-device",
        DEVICE,
        "        scalars[-1] = 1.0\n",
        "        scalars[-1] += 0.0\n",
        "Norms and biases decay too where the optimizer runs on the device.",
        (DEVICE_UPDATES,),
    ),
    Change(
        "infinite-loss-applied-on-the-device",
        DEVICE,
        "norm.isfinite() & norms[-1].isfinite()",
        "norm.isfinite()",
        "The device applies a step whose loss is not finite.",
        (DEVICE_UPDATES,),
    ),
    Change(
        "weights-cut-off-on-the-device",
        DEVICE,
        "((bits + 0x8000) >> 16)",
        "(bits >> 16)",
        "The device cuts a master off where the host rounds it.",
        (DEVICE_UPDATES,),
    ),
    Change(
        "remainder-of-older-weights-kept",
        PARAMETERS,
        "low[offset : offset + spec.numel].zero_()",
        "low[offset : offset + spec.numel]",
        "bf16 weights are written beside the remainder of what was there before.",
        (STORE_TESTS,),
    ),
    Change(
        "planes-copied-into-children",
        "engine/runtime/host/mapped_memory.py",
        "for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):",
        "for advice in (mmap.MADV_HUGEPAGE,):",
        "A forked child inherits the planes, and copies them page by page.",
        (STORE_TESTS,),
    ),
    Change(
        "all-planes-registered",
        "engine/runtime/host/placement.py",
        'DMA_PLANES = ("weight_high", "grad")',
        'DMA_PLANES = ("weight_high", "exp_avg", "grad")',
        "Planes that the device never copies are pinned.",
        (STORE_TESTS,),
    ),
    Change(
        "parameters-without-alignment",
        "engine/planning/layout/alignment.py",
        "ALIGN_ELEMENTS = 64",
        "ALIGN_ELEMENTS = 1",
        "Parameters do not start at the multiples that matrix kernels want.",
        ("tests/engine/model/test_layout.py",),
    ),
    Change(
        "decayed-range-too-long",
        LAYOUT,
        "decay_numel=stops[len(decayed)],",
        "decay_numel=stops[len(decayed) + len(spared)],",
        "The whole plane counts as decayed.",
        (ADAMW_TESTS, "tests/engine/model/test_layout.py"),
    ),
    Change(
        "biases-decay",
        "engine/model/build/parameter_names.py",
        'spared = [r"bias", ',
        "spared = [",
        "Biases decay, other than in transformers' Trainer.",
        ("tests/engine/model/test_layout.py",),
    ),
    Change(
        "kinds-by-shapes-alone",
        BUILD,
        "    return parts, shapes\n",
        "    return (shapes,)\n",
        "Sliding and full attention share a template, because their shapes are equal.",
        ("tests/engine/runtime/test_templates.py", "tests/engine/model/test_families.py"),
    ),
    Change(
        "rate-one-step-early",
        SCHEDULE,
        "before = step - 1",
        "before = step",
        "The schedule is one step ahead of transformers'.",
        (SCHEDULE_TESTS,),
    ),
    Change(
        "decay-of-the-rate-counts-the-warm-up",
        SCHEDULE,
        "decay_steps = max(1, total_steps - steady)",
        "decay_steps = max(1, total_steps)",
        "The rate does not reach zero at the end.",
        (SCHEDULE_TESTS,),
    ),
    Change(
        "warm-up-may-take-all-steps",
        SCHEDULE,
        "most = total_steps // 2",
        "most = total_steps",
        "A short run may spend all of its steps warming up.",
        (SCHEDULE_TESTS, "tests/engine/training/loop/test_edges.py"),
    ),
)
