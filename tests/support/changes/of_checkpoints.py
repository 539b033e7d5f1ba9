"""Changes to what is saved, read back and exported."""

from __future__ import annotations

from tests.support.changes.record import Change

WEIGHTS = "engine/training/weights/weights.py"
RESTORE = "engine/training/checkpoints/restore.py"
MANIFESTS = "engine/training/checkpoints/manifest.py"
SAME_MODEL = "engine/training/checkpoints/same_model.py"
WRITE = "engine/training/checkpoints/checkpoint.py"
EXPORT = "engine/training/export/export.py"
RESUME = "engine/training/loop/resume.py"
FILES = "engine/safe_files.py"
SAVING = "engine/training/loop/saving.py"
SNAPSHOT = "engine/training/checkpoints/plane_snapshot.py"
HELD = "engine/runtime/host/plane_version.py"
PICKLED = "engine/model/hub/torch_pickle.py"
LAYOUT = "engine/planning/layout/layout.py"
READ_AHEAD = "tests/engine/training/checkpoints/test_read_ahead.py"
DEQUANTIZED = "engine/model/hub/dequantize.py"
DEQUANTIZED_TESTS = "tests/engine/model/hub/test_dequantized.py"
MAPPED = "engine/training/weights/mmap_reader.py"
PICKLED_TESTS = "tests/engine/model/hub/test_pickled.py"
WEIGHT_TESTS = "tests/engine/training/checkpoints/test_weights.py"
CHECKPOINTS = "tests/engine/training/checkpoints/test_checkpoint.py"
FORGED = "tests/engine/training/checkpoints/test_forged_manifests.py"
KEPT = "tests/engine/training/checkpoints/test_kept_checkpoints.py"
EDGES = "tests/engine/training/loop/test_run_edges.py"
TRAINER = "tests/engine/training/loop/test_trainer.py"
CHANGED = "tests/engine/training/loop/test_changed_settings.py"
ALONE = "tests/engine/training/checkpoints/test_weights_alone.py"
KINDS = "tests/engine/training/loop/test_kinds_of_checkpoints.py"
SNAPSHOTS = "tests/engine/training/checkpoints/test_plane_snapshot.py"
BESIDE = "tests/engine/training/loop/test_beside.py"
COPYING = """\
            self._copying += 1
        try:
            copy = chunk.copy_to(room)
        except BaseException:
            self._put_back(chunk, room)
            raise
        with self._changed:
            chunk.use(copy, room)
            self._copying -= 1
            self._unsafe[chunk.unit] -= 1
"""
SAFE_TOO_EARLY = """\
            self._copying += 1
            self._unsafe[chunk.unit] -= 1
        try:
            copy = chunk.copy_to(room)
        except BaseException:
            self._put_back(chunk, room)
            raise
        with self._changed:
            chunk.use(copy, room)
            self._copying -= 1
"""

CHECKPOINT = (
    Change(
        "buffers-not-read-from-the-weights",
        WEIGHTS,
        "[name].shape == buffer.shape",
        "[name].shape is buffer",
        "A router's correction bias is that of a model without weights.",
        (WEIGHT_TESTS, EDGES),
    ),
    Change(
        "missing-weights-accepted",
        WEIGHTS,
        "lacking = missing + mismatched",
        "lacking = mismatched",
        "Weights that the files do not have are random.",
        (WEIGHT_TESTS,),
    ),
    Change(
        "weights-of-another-shape-accepted",
        WEIGHTS,
        "lacking = missing + mismatched",
        "lacking = missing",
        "Weights of another shape are not refused where they are read.",
        (WEIGHT_TESTS,),
        survives="The host states refuses them, by name, when they are written to the planes.",
    ),
    Change(
        "pickled-code-run",
        PICKLED,
        "mmap=True, weights_only=True",
        "mmap=True, weights_only=False",
        "A pickled file runs whatever code it names.",
        (PICKLED_TESTS,),
    ),
    Change(
        "pickled-weights-before-safetensors",
        "engine/model/hub/hub_cache.py",
        "LISTED = (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX)",
        "LISTED = (PICKLED, PICKLED_INDEX, WEIGHTS, INDEX)",
        "Where a folder has both forms, the pickled one is read.",
        (PICKLED_TESTS,),
    ),
    Change(
        "pickled-weights-in-memory",
        PICKLED,
        "mmap=True, weights_only=True",
        "mmap=False, weights_only=True",
        "A look at a pickled file reads all of it.",
        (f"{READ_AHEAD}::test_a_real_load_takes_less_than_the_bound_and_far_less_than_a_copy",),
    ),
    Change(
        "scales-of-the-block-above",
        DEQUANTIZED,
        "of_blocks.repeat_interleave(wide)[:columns]",
        "factors[max(0, number - 1)].repeat_interleave(wide)[:columns]",
        "A block of fp8 has the scale of the block above it.",
        (DEQUANTIZED_TESTS,),
    ),
    Change(
        "second-value-of-a-byte-first",
        DEQUANTIZED,
        "torch.stack([numbers[low], numbers[high]], 1)",
        "torch.stack([numbers[high], numbers[low]], 1)",
        "The two values of a byte of MXFP4 change places.",
        (DEQUANTIZED_TESTS,),
    ),
    Change(
        "experts-not-turned",
        DEQUANTIZED,
        "return result.transpose(1, 2)",
        "return result.view(experts, -1, rows)",
        "Experts in MXFP4 have rows and columns mixed up.",
        (DEQUANTIZED_TESTS,),
    ),
    Change(
        "fp8-read-without-its-scales",
        "engine/runtime/host/parameters.py",
        "if not tensor.is_floating_point() or tensor.itemsize < 2:",
        "if not tensor.is_floating_point():",
        "Weights in fp8 are read as if their scales were 1.",
        (DEQUANTIZED_TESTS,),
    ),
    Change(
        "exports-said-to-be-quantized",
        "engine/planning/shape/quantized_weights.py",
        "            delattr(part, FIELD)\n",
        "            pass\n",
        "The configuration of an export says that its weights are quantized.",
        (DEQUANTIZED_TESTS,),
    ),
    Change(
        "dequantized-weights-kept-by-the-allocator",
        MAPPED,
        "self._decoded_bytes += tensor.nbytes",
        "self._decoded_bytes += 0",
        "Memory of weights that were dequantized is not given back.",
        (f"{READ_AHEAD}::test_memory_of_dequantized_weights_is_given_back",),
    ),
    Change(
        "damaged-buffers-accepted",
        RESTORE,
        "if checksum_of(content) != entry.checksum:",
        "if not entry.checksum:",
        "Buffers that were damaged on the disk are loaded.",
        (CHECKPOINTS,),
    ),
    Change(
        "sizes-not-verified",
        RESTORE,
        "elif found.st_size != entry.bytes:",
        "elif found.st_size > entry.bytes:",
        "A file that was cut short is found only when it is read.",
        (CHECKPOINTS,),
    ),
    Change(
        "manifest-not-verified",
        MANIFESTS,
        'body.pop("checksum", None) == body_checksum(body)',
        'body.pop("checksum", None) is not None',
        "A manifest that was changed is believed.",
        (CHECKPOINTS,),
    ),
    Change(
        "oldest-checkpoint-first",
        RESTORE,
        "sorted(folders_by_step(Path(root)).items(), reverse=True)",
        "sorted(folders_by_step(Path(root)).items())",
        "A resume begins with the oldest checkpoint.",
        (CHECKPOINTS, EDGES),
    ),
    Change(
        "planes-not-required",
        SAME_MODEL,
        "        if plane not in entry.planes:\n",
        "        if plane not in entry.planes and False:\n",
        "A checkpoint that lacks planes is loaded, and what it lacks stays as it was.",
        (FORGED,),
    ),
    Change(
        "any-file-name-in-a-manifest",
        MANIFESTS,
        r'pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=255',
        "max_length=255",
        "A manifest may name files outside of its checkpoint.",
        (FORGED,),
    ),
    Change(
        "linked-checkpoints-resumed",
        "engine/training/checkpoints/own_folders.py",
        "if found is None or stat.S_ISDIR(found.st_mode):",
        "if found is None or not stat.S_ISFIFO(found.st_mode):",
        "A run is resumed whose folder of checkpoints is a link, and deletes elsewhere.",
        (
            "tests/engine/training/loop/test_strange_runs.py::"
            "test_a_resume_is_refused_where_a_folder_of_weights_is_a_link",
        ),
    ),
    Change(
        "other-dtype-accepted",
        SAME_MODEL,
        "if manifest.dtype != states.dtype:",
        "if not manifest.dtype:",
        "A checkpoint of another dtype is not refused by its name.",
        (CHECKPOINTS,),
    ),
    Change(
        "newer-format-believed",
        MANIFESTS,
        "isinstance(found, int) and found != FORMAT:",
        "isinstance(found, int) and found > FORMAT + 1:",
        "A checkpoint of another version is read as one of this version.",
        (CHECKPOINTS,),
    ),
    Change(
        "buffers-not-restored",
        RESTORE,
        "        buffers[name].copy_(tensor)\n",
        "        pass\n",
        "A resumed run has the buffers of a model without weights.",
        (f"{EDGES}::test_buffers_of_the_weights_survive_resume_and_export", CHECKPOINTS),
    ),
    Change(
        "one-checkpoint-more-is-kept",
        WRITE,
        "older[: max(keep - 1, 0)]",
        "older[:keep]",
        "The disk holds a checkpoint more than was asked for.",
        (CHECKPOINTS, KEPT),
    ),
    Change(
        "later-checkpoints-stay",
        WRITE,
        "if other not in kept:",
        "if other not in kept and other < step:",
        "Checkpoints from before a run went back stay, and a resume takes them.",
        (CHECKPOINTS, KEPT),
    ),
    Change(
        "replaced-checkpoint-lost",
        WRITE,
        'if _is_leftover(name, ".old") and current not in there:',
        'if _is_leftover(name, ".none") and current not in there:',
        "A kill between two renames loses the checkpoint that was being replaced.",
        (KEPT,),
    ),
    Change(
        "gradients-in-checkpoints",
        LAYOUT,
        "            return (*weights, *OPTIMIZERS[optimizer].planes)\n",
        "            return (*weights, *OPTIMIZERS[optimizer].planes, _grad)\n",
        "Checkpoints hold gradients, which nothing needs.",
        (CHECKPOINTS,),
    ),
    Change(
        "chunks-not-compared",
        RESTORE,
        "return self._found == self._checksums",
        "return len(self._found) == len(self._checksums)",
        "The checksums of chunks are written and never compared.",
        (CHECKPOINTS, ALONE),
    ),
    Change(
        "weights-alone-resumed",
        RESTORE,
        'if manifest.holds == "weights":',
        'if manifest.holds == "full" and False:',
        "A resume takes weights alone, and goes on with moments of zero.",
        (ALONE, KINDS),
    ),
    Change(
        "full-kind-for-weights-alone",
        SAVING,
        '"weights" if self._kind == "weights" else "full"',
        '"full"',
        "A run that is to keep weights alone writes full checkpoints.",
        (KINDS,),
    ),
    Change(
        "updates-do-not-ask-the-reader",
        HELD,
        "                    reader.protect(unit)\n",
        "                    pass\n",
        "An update changes planes that a checkpoint has yet to write.",
        (BESIDE,),
    ),
    Change(
        "chunks-safe-before-they-are-copied",
        SNAPSHOT,
        COPYING,
        SAFE_TOO_EARLY,
        "An update changes a chunk while another thread copies it.",
        (SNAPSHOTS,),
    ),
    Change(
        "buffers-without-space",
        WRITE,
        "rest = buffers + 2 * state + _ENTRY_BYTES * chunks + _SPARE_BYTES",
        "rest = 2 * state + _ENTRY_BYTES * chunks + _SPARE_BYTES",
        "The check of the free disk forgets the buffers.",
        (KEPT,),
    ),
    Change(
        "name-before-its-content",
        FILES,
        "            os.fsync(file.fileno())\n",
        "",
        "After a power failure, a file may have its name and no content.",
        ("tests/engine/test_files.py", CHECKPOINTS),
    ),
    Change(
        "partial-file-left",
        FILES,
        "os.unlink(partial.name, dir_fd=folder)",
        "pass",
        "A file that could not be written leaves a part of itself.",
        ("tests/engine/test_files.py",),
    ),
    Change(
        "other-rows-on-resume",
        RESUME,
        "return name in ORDER",
        "return name in ()",
        "A resume with another batch size skips rows and repeats others.",
        (CHANGED,),
    ),
    Change(
        "more-steps-than-asked-for",
        RESUME,
        "if total_steps < step:",
        "if total_steps < 0:",
        "A run that has more steps than its settings ask for is resumed.",
        ("tests/engine/runs/record/test_faults.py",),
    ),
    Change(
        "buffers-not-exported",
        EXPORT,
        "            buffer.copy_(own[name])\n",
        "            pass\n",
        "An exported router has no correction bias.",
        (f"{EDGES}::test_buffers_of_the_weights_survive_resume_and_export", TRAINER),
    ),
    Change(
        "half-an-export-left",
        EXPORT,
        "            safe_files.remove_tree(partial, folder.parent)\n",
        "            pass\n",
        "An export that failed leaves gigabytes beside its folder.",
        ("tests/engine/training/loop/test_export_edges.py", TRAINER),
    ),
)
