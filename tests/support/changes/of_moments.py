"""Changes to moments in bf16 and in 8 bits, and to gradients that are kept on the device."""

from __future__ import annotations

from tests.support.changes.record import Change

PLACES = "engine/planning/layout/optimizer_states.py"
HOST = "engine/runtime/host/host_adamw.py"
KERNELS = "engine/runtime/optimizer/moment_kernels.py"
VALUES = "engine/runtime/optimizer/value_kernels.py"
DEVICE = "engine/runtime/optimizer/device_moments.py"
OPS = "engine/runtime/step/copy_ops.py"
RINGS = "engine/runtime/step/pinned_buffers.py"
WRITE = "engine/planning/schedule/unit_ops.py"
PLACE_TESTS = "tests/engine/planning/layout/test_moments.py"
KERNEL_TESTS = "tests/engine/runtime/host/test_moment_kernels.py"
ROUNDED = "tests/engine/runtime/test_rounded_moments.py"
ON_DEVICE = "tests/gpu/test_moments.py::test_the_same_moments_are_rounded_to_the_same_bits"
ON_GPU = "tests/engine/runtime/test_gradients_on_gpu.py"
KEPT_GRADIENT_BITS = f"{ON_GPU}::test_the_bits_are_those_of_a_plane_on_the_host"
EMBED_AND_HEAD_BITS = f"{ON_GPU}::test_embed_and_head_in_the_memory_of_kept_gradients_change_no_bit"

MOMENT_CHANGES = (
    Change(
        "blocks-cross-parameters",
        PLACES,
        "    is_whole = range_.start % BLOCK == range_.stop % BLOCK == 0\n",
        "    is_whole = True\n",
        "A block of codes goes on into the next parameter, so that one scales the other.",
        (PLACE_TESTS,),
    ),
    Change(
        "embedding-in-8-bits",
        "engine/config/optimizers.py",
        'return StateFormat.BF16 if kind == "embed" else self.format',
        "return self.format",
        "The embedding is kept in 8 bits too.",
        (PLACE_TESTS,),
    ),
    Change(
        "rounded-alike-in-every-step",
        "engine/runtime/host/host_optimizer.py",
        'f"{self._seed} {step} {unit}"',
        'f"{self._seed} {unit}"',
        "Moments in bf16 are rounded with the same random bits in every step, so they stall.",
        (f"{ROUNDED}::test_a_second_moment_in_bf16_follows_small_changes",),
    ),
    Change(
        "one-half-of-the-noise-for-both-moments",
        KERNELS,
        "exp_avg_sq[i] = rounded(second[i], upper)",
        "exp_avg_sq[i] = rounded(second[i], lower)",
        "Both moments are rounded up together.",
        (KERNEL_TESTS,),
    ),
    Change(
        "second-moment-with-the-code-of-0",
        KERNELS,
        "    least = np.int32(1) if largest > 0 and not is_signed else np.int32(0)\n",
        "    least = np.int32(0)\n",
        "A second moment beside a large one becomes 0: its weight is divided by eps alone.",
        (KERNEL_TESTS,),
    ),
    Change(
        "negative-tie-with-the-larger-code",
        VALUES,
        "builder.sub(found, sign)",
        "found",
        "A negative first moment on a boundary has the code of the smaller magnitude.",
        (KERNEL_TESTS,),
    ),
    Change(
        "second-moment-with-the-code-of-0-on-the-device",
        DEVICE,
        "codes.clamp(min=1)",
        "codes.clamp(min=0)",
        "The device gives second moments the code of 0.",
        (ON_DEVICE,),
    ),
    Change(
        "noise-of-a-chunk-from-its-own-start",
        DEVICE,
        "(step.key + part.start + start) & _MASK",
        "(step.key + start) & _MASK",
        "The device rounds by positions in its chunk, not in the unit.",
        (ON_DEVICE,),
    ),
    Change(
        "kept-gradients-not-clipped",
        OPS,
        "    update(op.unit, count, rate, result.clip_factor, _chunk(context, op))\n",
        "    factor = result.clip_factor if op.ring is None else 1.0\n"
        "    update(op.unit, count, rate, factor, _chunk(context, op))\n",
        "The clip factor is not applied to gradients that were kept on the GPU.",
        (KEPT_GRADIENT_BITS,),
    ),
    Change(
        "ring-buffers-in-the-same-memory",
        RINGS,
        "memory[start : start + numel]",
        "memory[:numel]",
        "A kept gradient overwrites one that the host still reads.",
        (KEPT_GRADIENT_BITS,),
    ),
    Change(
        "kept-gradient-read-before-it-comes",
        WRITE,
        "self._emit(Update, unit, {CLIP: READY} | gradient, weights, **place)",
        "self._emit(Update, unit, {CLIP: READY}, weights, **place)",
        "An update does not wait for the gradient that comes through its ring buffer.",
        (KEPT_GRADIENT_BITS,),
    ),
    Change(
        "every-chunk-gets-the-first-rows",
        "engine/runtime/step/compute_ops.py",
        "    first = start // width\n",
        "    first = 0 * start // width\n",
        "Rows of embed get the gradients of other rows.",
        (EMBED_AND_HEAD_BITS,),
    ),
    Change(
        "padding-gets-a-gradient-in-chunks",
        "engine/runtime/step/embedding_grad.py",
        "elsewhere = (local < 0) | (local >= rows) | (self.ids == self.padding)",
        "elsewhere = (local < 0) | (local >= rows)",
        "The row of the padding token receives a gradient.",
        (EMBED_AND_HEAD_BITS,),
    ),
    Change(
        "norm-of-embed-as-a-whole",
        "engine/runtime/step/main_grad.py",
        "size = context.plan.embed_chunk if unit == EMBED else 0",
        "size = 0",
        "The norm of embed depends on whether a plan accumulates it in chunks.",
        (EMBED_AND_HEAD_BITS,),
        survives="Norms of rows are added up in float64, and the clip factor is in fp32: it hardly "
        "ever shows the last bits of the sum.",
    ),
    Change(
        "slot-of-parts-as-a-whole",
        "engine/planning/schedule/device_updates.py",
        "return dict.fromkeys(self._slot_parts.get(slot, (slot,)), content)",
        "return dict.fromkeys((slot,), content)",
        "A prefetch into a slot that is updated in parts does not wait for the block before.",
        ("tests/engine/runtime/test_device_updated_units.py",),
    ),
    Change(
        "kept-gradient-sent-before-its-summary",
        WRITE,
        "reads = {staging: Content(ContentKind.MAIN_GRAD, unit), SUMMARY: READY}\n",
        "reads = {staging: Content(ContentKind.MAIN_GRAD, unit)}\n",
        "A kept gradient leaves before it is known whether the step is applied.",
        (f"{ON_GPU}::test_block_inputs_never_wait_for_kept_gradients",),
    ),
)
