"""Changes to what a training step computes: ops, sums, loss, evaluation."""

from __future__ import annotations

from tests.support.changes.record import Change

OPS = "engine/runtime/step/compute_ops.py"
PASSES = "engine/runtime/step/activation_checkpointing.py"
MAIN_GRAD_FILE = "engine/runtime/step/main_grad.py"
BLOCK_OPS = "engine/runtime/step/copy_ops.py"
LOSS = "engine/runtime/step/cross_entropy.py"
ENGINE = "engine/runtime/step/streaming_engine.py"
TEMPLATES = "engine/runtime/step/templates.py"
EXECUTOR = "engine/runtime/step/executor.py"
BF16 = "tests/engine/runtime/test_bf16_reference.py"
PARITY = "tests/engine/runtime/test_parity.py"
LAWS = "tests/engine/planning/schedule/test_laws.py"
DROPOUT = "tests/engine/runtime/test_dropout.py"
CLIPPING = "tests/engine/runtime/test_clipping.py"
FAMILIES = "tests/engine/model/test_families.py"
NORMS = "tests/engine/runtime/test_norms.py"
COMPILED = "tests/engine/runtime/test_compiled.py"

STEPS = (
    Change(
        "main-grads-rounded-each-time",
        MAIN_GRAD_FILE,
        "buffer[offset : offset + spec.numel].view(spec.shape).add_(gradient)",
        "buffer[offset : offset + spec.numel].view(spec.shape).add_(gradient)\n"
        "            buffer.copy_(buffer.to(gradient.dtype))",
        "Sums of gradients are rounded to bf16 after every micro-batch.",
        (BF16,),
    ),
    Change(
        "norm-of-rounded-gradients",
        MAIN_GRAD_FILE,
        "        add_squares(context, op.unit, grad, start)",
        "        add_squares(context, op.unit, grad.to(staging.dtype).float(), start)",
        "The norm is taken of the gradient after its rounding to bf16.",
        (BF16,),
    ),
    Change(
        "squares-of-a-unit-added-in-a-row",
        MAIN_GRAD_FILE,
        'if values.device.type != "cpu":',
        'if values.device.type != "meta":',
        "On the CPU, squares of a whole unit are added in fp32, as torch's vector_norm does.",
        (NORMS,),
    ),
    Change(
        "loss-of-many-chunks-added-in-fp32",
        LOSS,
        "total = torch.zeros((), dtype=torch.float64, device=hidden.device)",
        "total = torch.zeros((), dtype=torch.float32, device=hidden.device)",
        "The losses of the chunks of a micro-batch are added up in fp32.",
        (NORMS,),
    ),
    Change(
        "loss-of-bf16-logits",
        LOSS,
        'torch_cross_entropy(logits.float(), labels, reduction="sum")',
        'torch_cross_entropy(logits, labels, reduction="sum")',
        "Cross-entropy is computed in bf16.",
        (BF16,),
    ),
    Change(
        "evaluation-averages-means",
        ENGINE,
        "total = summed(total, [loss for loss, _ in losses])\n"
        "                weight += loss_weight_of(sweep)\n",
        "for (loss, _), batch in zip(losses, sweep):\n"
        "                    total += float(loss) / max(1, int(batch.loss_tokens))\n"
        "                weight += len(sweep)\n",
        "An evaluation is the mean of its micro-batches' means, not of its tokens.",
        (BF16, "tests/engine/training/loop/test_evaluation_loss.py"),
    ),
    Change(
        "clipping-without-its-1e-6",
        "engine/runtime/optimizer/device_adamw.py",
        "(max_grad_norm / (norm + 1e-6))",
        "(max_grad_norm / norm)",
        "The clip factor leaves out the 1e-6 that torch adds to the norm.",
        (CLIPPING,),
    ),
    Change(
        "infinite-loss-applied",
        BLOCK_OPS,
        "if not math.isfinite(value):",
        "if math.isnan(value):",
        "A step whose loss is infinite is applied.",
        (CLIPPING,),
    ),
    Change(
        "sum-of-the-step-before-kept",
        MAIN_GRAD_FILE,
        "    if first:\n        buffer.zero_()\n    add(",
        "    add(",
        "A unit with gaps in its plane adds to the sum of the step before.",
        (LAWS, PARITY),
    ),
    Change(
        "sum-of-the-head-not-zeroed",
        OPS,
        "main_grad(context, owner, op, HEAD).zero_()",
        "main_grad(context, owner, op, HEAD)",
        "The head adds its gradient to the sum of the step before.",
        (BF16, PARITY),
    ),
    Change(
        "loss-adds-up-over-steps",
        OPS,
        "        context.state.norms[-1].zero_()\n",
        "        context.state.norms[-1].add_(0)\n",
        "The loss of a step contains those of all steps before.",
        (BF16, PARITY),
    ),
    Change(
        "rounds-overwrite-the-sum",
        MAIN_GRAD_FILE,
        "        grad.add_(staging)\n",
        "        grad.add_(0)\n",
        "Where the host sums, only the last round counts.",
        (PARITY + "::test_rounds", PARITY),
    ),
    Change(
        "mean-of-micro-batches",
        ENGINE,
        "loss_scale=1.0 / (shard.loss_weight or 1.0)",
        "loss_scale=1.0 / max(1, int(shard.batches[0].loss_tokens) * len(shard.batches))",
        "Tokens count as if every micro-batch had as many as the first.",
        (BF16, PARITY),
    ),
    Change(
        "first-token-id-has-no-loss",
        "engine/runtime/step/step.py",
        "np.flatnonzero(labels >= 0)",
        "np.flatnonzero(labels > 0)",
        "A label that is token 0 is taken for one without a loss.",
        (BF16,),
    ),
    Change(
        "evaluation-with-dropout",
        TEMPLATES,
        "            template.train(training)\n",
        "            template.train(True)\n",
        "Blocks draw dropout in evaluation and sampling.",
        (DROPOUT,),
    ),
    Change(
        "dropout-alike-in-every-step",
        PASSES,
        "(step.inputs.seed, step.inputs.number, position, micro_batch)",
        "(step.inputs.seed, position, micro_batch)",
        "Every step drops the same activations.",
        (DROPOUT,),
    ),
    Change(
        "dropout-alike-in-every-micro-batch",
        PASSES,
        "(step.inputs.seed, step.inputs.number, position, micro_batch)",
        "(step.inputs.seed, step.inputs.number, position)",
        "All micro-batches of a step drop the same activations.",
        (DROPOUT,),
    ),
    Change(
        "dropout-alike-in-every-block",
        PASSES,
        "(step.inputs.seed, step.inputs.number, position, micro_batch)",
        "(step.inputs.seed, step.inputs.number, micro_batch)",
        "All blocks drop the same activations.",
        (DROPOUT,),
    ),
    Change(
        "dropout-drawn-anew-in-the-recompute",
        PASSES,
        "    seed(context, op, step)\n    unit = context.units[op.unit]\n",
        "    if isinstance(op, Forward):\n        seed(context, op, step)\n"
        "    unit = context.units[op.unit]\n",
        "A recomputed block drops other activations than its forward did.",
        (DROPOUT, LAWS + "::test_dropout_draws_the_same_numbers_in_the_recompute"),
    ),
    Change(
        "head-in-one-chunk-only",
        LOSS,
        "places = targets.index[start : start + size]",
        "places = targets.index[: size]",
        "Gradients of all chunks of the loss go to the positions of the first.",
        (PARITY,),
    ),
    Change(
        "evaluation-loss-summed-in-bf16",
        LOSS,
        "total = torch.zeros((), dtype=torch.float64, device=selected.device)",
        "total = torch.zeros((), dtype=selected.dtype, device=selected.device)",
        "Without gradients, the losses of chunks are added up in the model's dtype.",
        (BF16,),
    ),
    Change(
        "evaluation-loss-not-scaled",
        LOSS,
        "    return total * targets.scale",
        "    return total",
        "Without gradients, the scale of the loss is ignored.",
        (BF16, "tests/engine/training/loop/test_evaluation_loss.py"),
        survives="Passes without gradients are always given the scale 1: an evaluation divides by "
        "its tokens at the end.",
    ),
    Change(
        "scored-from-the-first-position",
        "engine/tools/evaluate/scoring.py",
        "positions.append(np.arange(end - len(tokens), end))",
        "positions.append(np.arange(end - len(one.row), end - len(one.row) + len(tokens)))",
        "A benchmark scores an answer where its question begins.",
        ("tests/engine/tools/evaluate/test_scoring.py",),
    ),
    Change(
        "greedy-if-any-token-is",
        "engine/tools/evaluate/scoring.py",
        "bool(of.likeliest[part].all())",
        "bool(of.likeliest[part].any())",
        "An answer counts as the likeliest one if one of its tokens is.",
        ("tests/engine/tools/evaluate/test_scoring.py",),
    ),
    Change(
        "answers-after-their-end",
        "engine/runtime/sampling/generate.py",
        "if self.limits.is_over is not None and self.limits.is_over(self.new[row]):",
        "if self.limits.is_over is not None and self.limits.is_over(self.new[row][:-1]):",
        "An answer goes on for a token after the text that ends it.",
        ("tests/engine/tools/evaluate/test_scoring.py",),
    ),
    Change(
        "blocks-share-their-buffers",
        TEMPLATES,
        "template.get_submodule(owner)._buffers[attribute] = buffer",
        "template.get_submodule(owner)",
        "A block computes with the buffers of the block whose template it shares.",
        ("tests/engine/runtime/test_templates.py", FAMILIES),
    ),
    Change(
        "blocks-share-their-number",
        TEMPLATES,
        "template.get_submodule(name).layer_idx = index",
        "template.get_submodule(name).layer_idx = 0",
        "Every block believes that it is the first, which a cache goes by.",
        ("tests/engine/runtime/sampling/test_generate.py",),
    ),
    Change(
        "slot-filled-in-part",
        BLOCK_OPS,
        "    slot[start:stop].copy_(plane[start:stop], non_blocking=True)\n",
        "    stop -= 64\n    slot[start:stop].copy_(plane[start:stop], non_blocking=True)\n",
        "The last parameter of a unit keeps the weights of another unit.",
        (LAWS, PARITY),
    ),
    Change(
        "shared-gradient-of-one-call",
        "engine/runtime/step/main_grad.py",
        "            total[offset : offset + spec.numel].view(spec.shape).add_(gradient)\n",
        "            total[offset : offset + spec.numel].view(spec.shape).copy_(gradient)\n",
        "Weights that blocks share have the gradient of the lowest block that calls them.",
        ("tests/engine/model/blocks/test_shared_blocks.py::test_blocks_of_any_family_may_share",),
    ),
    Change(
        "states-of-a-chunk-not-sent-back",
        "engine/runtime/step/optimizer_ops.py",
        'if plane not in ("weight_high", "grad")\n',
        'if plane not in ("weight_high", "exp_avg_sq", "grad")\n',
        "The second moments that the device has updated stay there.",
        ("tests/engine/runtime/test_device_updated_units.py",),
    ),
    Change(
        "waits-for-the-step-before-left-out",
        EXECUTOR,
        "waits += [self._previous[index] for index in op.waits_previous]",
        "waits += []",
        "A step does not wait for the updates of the step before.",
        (LAWS + "::test_delays_in_any_lane_change_nothing", LAWS),
    ),
    Change(
        "step-broken-off-after-its-summary",
        EXECUTOR,
        "            if op.kind == OpKind.SUMMARY:\n                check = None\n",
        "",
        "A request to stop may end a step of which some updates are applied.",
        (
            "tests/engine/runtime/test_broken_off.py",
            "tests/engine/training/loop/test_interruptions.py",
        ),
    ),
    Change(
        "weighted-sum-over-a-count",
        "engine/runtime/step/step.py",
        "int(batch.loss_tokens) if weights is None else sum_of_weights(weights)",
        "int(batch.loss_tokens)",
        "Weighted losses are divided by the number of tokens, not by the sum of their weights.",
        ("tests/engine/runtime/test_weighted_losses.py",),
    ),
)
