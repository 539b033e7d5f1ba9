"""Who may change what, read off the syntax trees of every file.

An object's fields are set by its own methods and read by their public names, no function changes a
list, set or mapping of its module, and importing a module does nothing but define. What breaks a
rule is told by its file and its text, without a line, so that the lists below outlive other changes
of a file.
"""

from __future__ import annotations

import pytest

from tests.support.owners import findings

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

TORCH_MODULE = "torch keeps the parts of a module there, and takes ours in no other way"
TORCH_SETTING = "a setting of torch's compiler, which has no other place"
KEPT_FOR_BACKWARD = "torch keeps what is no tensor for a backward in no other way"
TRANSFORMERS = "transformers takes it, or tells it, in no other way"
ATTENTION = "model.config.get_text_config()._attn_implementation"
FINALIZER = "weakref.finalize(self, _unregister_all, self._registered, unregister)"
ONE_CAPTURE = "what one capture hands to attention, by thread; both are of this file"
READ_HERE = "how this thread reads weights; both are of this file"
HANDED_ON = "a step under way is where an op leaves what the next ones take"

REASONS: dict[str, dict[str, str]] = {
    "app/pages/frame/page.py": {
        "os.environ is changed": "Gradio reads there that it must not report its use"
    },
    "app/pages/chat/chat.py": {
        "self._idle.daemon is set": "a timer of Python takes it in no other way"
    },
    "app/server/gradio_streams.py": {
        "page._queue is private": "Gradio tells in no other way which sessions it knows"
    },
    "app/server/requests.py": {
        "response.headers is changed": "so Starlette's answers are given headers"
    },
    "app/application.py": {
        "page._queue.sleep_when_free is set": "Gradio takes it in no other way",
        "page._queue.progress_update_sleep_when_free is set": "Gradio takes it in no other way",
        "page._queue is private": "Gradio takes it in no other way",
    },
    "engine/tools/bench/resident.py": {
        "module._parameters is changed": TORCH_MODULE,
        "module._parameters is private": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "module._buffers is changed": TORCH_MODULE,
    },
    "engine/tools/evaluate/task_code.py": {
        "utils.env is set": "the harness renders the texts of tasks with it, without a sandbox",
        "sandbox.filters is changed": "Jinja takes filters in no other way",
    },
    "engine/tools/cli/streams.py": {
        "setattr of sys": "Python has no stream there when the program was started without one"
    },
    "engine/machine/primitive_cache.py": {
        "os.environ is changed": "oneDNN and torch read there how many kernels they may keep"
    },
    "engine/data/sources/excel.py": {
        "reader.archive is set": "openpyxl would read parts of any size",
        "parser.row_dimensions is changed": "openpyxl keeps the heights of all rows there",
        "book._date_formats is private": "openpyxl hands them to its parser so",
        "book._timedelta_formats is private": "openpyxl hands them to its parser so",
    },
    "engine/data/sources/hub_connection.py": {
        "datasets.config.HF_HUB_OFFLINE is set": "datasets takes it in no other way at run time"
    },
    "engine/training/export/export.py": {
        "config.use_cache is set": TRANSFORMERS,
        "whole.generation_config is set": TRANSFORMERS,
        "whole.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "whole.get_submodule(owner)._parameters is private": TORCH_MODULE,
    },
    "engine/training/weights/stream_loader.py": {"parameter.data is set": TORCH_MODULE},
    "engine/training/weights/weights.py": {
        "model.skeleton.model._init_weights is private": TRANSFORMERS,
        "block.__dict__ is changed": TORCH_MODULE,
        "alone.__dict__ is changed": TORCH_MODULE,
        "alone._modules is set": TORCH_MODULE,
        "alone._parameters is set": TORCH_MODULE,
        "child.__dict__ is changed": TORCH_MODULE,
        "block.__dict__ is private": TORCH_MODULE,
        "alone.__dict__ is private": TORCH_MODULE,
        "child.__dict__ is private": TORCH_MODULE,
        "owner._parameters is private": TORCH_MODULE,
    },
    "engine/tools/cli/end_signals.py": {
        "os._exit is private": "a public function of Python, in spite of its name"
    },
    "engine/tools/cli/train.py": {
        "os._exit is private": "a public function of Python, in spite of its name"
    },
    "engine/config/tree.py": {
        "_SHORT.maxstring is set": "Repr takes them in no other way before Python 3.12",
        "_SHORT.maxother is set": "Repr takes them in no other way before Python 3.12",
        "_SHORT.maxlevel is set": "Repr takes them in no other way before Python 3.12",
    },
    "engine/data/tokens/cache_key.py": {
        "_code() at import": "the engine's code as this process read it"
    },
    "engine/runs/trackers/to_wandb.py": {
        "self._run.summary is changed": "Weights & Biases takes values of a whole run there"
    },
    "engine/runs/trackers/worker.py": {
        "os._exit is private": "a public function of Python, in spite of its name"
    },
    "engine/model/build/activations.py": {
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "config._attn_implementation is private": TRANSFORMERS,
        "given.kwargs is changed": "the arguments were copied for this trial",
        "func._overloadpacket is private": "torch tells it in no other way",
    },
    "engine/model/build/attention_masks.py": {
        "_capture.documents is set": ONE_CAPTURE,
        "_capture.kinds is set": ONE_CAPTURE,
        "model.config.get_text_config()._attn_implementation is private": TRANSFORMERS,
    },
    "engine/model/build/block_trial.py": {
        "block.__dict__ is changed": TORCH_MODULE,
        "block.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "tensor._version is private": "torch tells it in no other way",
        "block.__dict__ is private": TORCH_MODULE,
        "block.get_submodule(owner)._parameters is private": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "buffer._version is private": "torch tells it in no other way",
    },
    "engine/model/build/build.py": {
        "setattr of part": TRANSFORMERS,
        "config.use_cache is set": TRANSFORMERS,
    },
    "engine/model/build/probe.py": {
        "modules[owner]._parameters is changed": TORCH_MODULE,
        "modules[owner]._parameters is private": TORCH_MODULE,
    },
    "engine/model/build/find_shape.py": {
        "_failures of the module is changed": "a cache of answers, under a lock",
        "_known of the module is changed": "a cache of answers, under a lock",
    },
    "engine/model/hub/hub.py": {
        "_fetched of the module is changed": "a cache: files that this process has found whole"
    },
    "engine/model/hub/hub_download.py": {
        "constants.DOWNLOAD_CHUNK_SIZE is set": "huggingface_hub takes it in no other way",
        "os._exit is private": "a public function of Python, in spite of its name",
    },
    "engine/runtime/device/block_graphs.py": {
        "step.arguments is changed": HANDED_ON,
        "step.graphs is set": HANDED_ON,
        "step.hidden is changed": HANDED_ON,
        "step.saved is changed": HANDED_ON,
    },
    "engine/runtime/device/graph_inputs.py": {
        "torch._foreach_copy_ is private": "torch copies many tensors at once in no other way",
    },
    "engine/planning/shape/shape_cache.py": {
        "_sources() at import": "the engine's code as this process read it"
    },
    "engine/model/build/pretrained_files.py": {
        "grown.get_text_config().vocab_size is set": TRANSFORMERS,
    },
    "engine/model/build/rope_scaling.py": {
        "text.head_dim is set": TRANSFORMERS,
        "text.max_position_embeddings is set": TRANSFORMERS,
        "text.rope_parameters is set": TRANSFORMERS,
    },
    "engine/model/build/library.py": {
        "part.dtype is set": TORCH_MODULE,
        "tensor.data is set": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "module.__dict__ is changed": TORCH_MODULE,
        "module.__dict__ is private": TORCH_MODULE,
        "model._get_dtype_plan is private": TRANSFORMERS,
        "model._weight_conversions is set": TRANSFORMERS,
        "_READING.read is set": READ_HERE,
        "_READING.prepared is set": READ_HERE,
        "threading.local() at import": READ_HERE,
        "module.spawn_materialize is set": TRANSFORMERS,
        "module.MoeCausalLMOutputWithPast.image_outputs is set": TRANSFORMERS,
        "module.convert_and_load_state_dict_in_model is set": TRANSFORMERS,
    },
    "engine/planning/shape/quantized_weights.py": {"delattr of part": TRANSFORMERS},
    "engine/model/build/packing_trial.py": {
        "model.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "model.get_submodule(owner)._parameters is private": TORCH_MODULE,
    },
    "engine/model/build/skeleton.py": {
        "block.forward is set": TORCH_MODULE,
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "view._base is private": "torch tells it in no other way",
    },
    "engine/model/build/specimens.py": {
        "block.__dict__ is changed": TORCH_MODULE,
        "block.__dict__ is private": TORCH_MODULE,
    },
    "engine/runs/record/run_folder.py": {
        "_held of the module is changed": "the process's own locks, which a forked child must close"
    },
    "engine/runtime/step/activation_checkpointing.py": {
        "step.state_dtypes is changed": HANDED_ON,
        "step.hidden is changed": HANDED_ON,
        "step.saved is changed": HANDED_ON,
    },
    "engine/runtime/step/compute_ops.py": {
        "step.cross_layer_values is changed": HANDED_ON,
        "step.inputs.caches is changed": HANDED_ON,
        "step.hidden is changed": HANDED_ON,
        "step.shapes is changed": HANDED_ON,
        "step.arguments is changed": HANDED_ON,
        "context.state.norms is changed": "the plan gives this element of the tensor to the op",
        "step.lookups is changed": HANDED_ON,
        "step.losses is changed": HANDED_ON,
        "step.position_losses is changed": HANDED_ON,
        "step.likeliest is changed": HANDED_ON,
        "step.logits is changed": HANDED_ON,
    },
    "engine/runtime/device/compiled.py": {
        "_this_thread.set_up is set": "a mark of each thread, of what it has set up",
        "os.environ is changed": "torch reads there how many helpers it may start",
        "torch._dynamo.config.recompile_limit is set": TORCH_SETTING,
        "torch._dynamo.config.accumulated_recompile_limit is set": TORCH_SETTING,
        "torch._dynamo.config.suppress_errors is set": TORCH_SETTING,
        "torch._dynamo.config.fail_on_recompile_limit_hit is set": TORCH_SETTING,
        "_functions of the module is changed": "what its cache holds, which has no list of it",
        "torch._functorch.config.ban_recompute_materialized_backward is set": TORCH_SETTING,
        "torch._functorch.config.ban_recompute_used_far_apart is set": TORCH_SETTING,
        "torch._inductor.config.compile_threads is set": TORCH_SETTING,
        "torch._dynamo.config.nested_graph_breaks is set": TORCH_SETTING,
        "torch._dynamo is private": TORCH_SETTING,
        "torch._functorch is private": TORCH_SETTING,
        "torch._inductor is private": TORCH_SETTING,
        "threading.local() at import": "a mark of each thread, of what it has set up",
    },
    "engine/runtime/device/cuda_backend.py": {
        "os.environ is changed": "CUDA and torch read there how they are to start"
    },
    "engine/runtime/step/device_state.py": {
        "template.__dict__ is changed": TORCH_MODULE,
        "template.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "template.get_submodule(owner)._buffers is changed": TORCH_MODULE,
        "template.get_submodule(name).layer_idx is set": TORCH_MODULE,
        "template.__dict__ is private": TORCH_MODULE,
        "template.get_submodule(owner)._parameters is private": TORCH_MODULE,
        "template.get_submodule(owner)._buffers is private": TORCH_MODULE,
        "module._parameters is changed": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "module._buffers is changed": TORCH_MODULE,
        "module._parameters is private": TORCH_MODULE,
    },
    "engine/runtime/measure/launch_overhead.py": {
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "storage._cdata is private": "torch tells it in no other way",
    },
    "engine/data/dividing/word_kernels.py": {
        "types.void() at import": "a type of numba, made once",
        "types.UniTuple(types.int64, 3)() at import": "a type of numba, made once",
    },
    "engine/runtime/optimizer/host_kernels.py": {
        "types.void() at import": "a type of numba, made once"
    },
    "engine/runtime/optimizer/moment_kernels.py": {
        "types.void() at import": "a type of numba, made once"
    },
    "engine/runtime/optimizer/two_pass_kernels.py": {
        "types.void() at import": "a type of numba, made once"
    },
    "engine/runtime/step/pinned_buffers.py": {
        "self._unregister.atexit is set": "a finalizer of Python takes it in no other way"
    },
    "engine/runtime/optimizer/value_kernels.py": {
        "copy.meminfo is set": "numba takes it in no other way",
        "copy._getvalue is private": "numba gives it in no other way",
    },
    "engine/training/weights/mmap_reader.py": {
        "_libc.madvise.argtypes is set": "ctypes takes it in no other way",
    },
    "engine/model/blocks/live_bytes.py": {
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "storage._cdata is private": "torch tells it in no other way",
    },
    "engine/model/blocks/tiled_module.py": {
        "_here.depth is set": "whether a thread is running a sequence chunk; both are of this file",
        "threading.local() at import": "whether a thread is running a sequence chunk",
        "ctx.how is set": KEPT_FOR_BACKWARD,
        "ctx.parameters is set": KEPT_FOR_BACKWARD,
        "ctx.bound is set": KEPT_FOR_BACKWARD,
        "setattr of part": TORCH_MODULE,
        "part.layer_idx is set": TORCH_MODULE,
        "part._buffers is changed": TORCH_MODULE,
        "part._buffers is private": TORCH_MODULE,
        "each._buffers is private": TORCH_MODULE,
    },
    "engine/model/lora/adapted_linear.py": {
        "ctx.scaling is set": "torch keeps what is no tensor for a backward in no other way",
        "adapted_linear.register_autograd(_backward, setup_context=_keep) at import": (
            "an operation of torch learns its gradient where it is defined"
        ),
    },
    "engine/runtime/host/mapped_memory.py": {
        "_libc.madvise.argtypes is set": "ctypes takes it in no other way",
    },
    "engine/runtime/host/ram_planes.py": {
        f"{FINALIZER}.atexit is set": "a finalizer of Python takes it in no other way",
    },
    "engine/runtime/optimizer/fused_adamw.py": {
        f"{each} of the module is set": "Triton looks up the names of a kernel in its module"
        for each in ("tl", "moments_of", "written", "encoded")
    },
    "engine/runtime/distributed/rendezvous.py": {
        "os.environ is changed": "gloo and NCCL take the network of a group in no other way"
    },
    "engine/runtime/distributed/worker.py": {
        "os._exit is private": "a thread may wait for a rank that will not come, for ever"
    },
    "engine/runtime/step/router_aux_loss.py": {
        "ctx.of_probabilities is set": "torch gives it to a function for what its backward needs"
    },
    "engine/training/loop/explain.py": {
        "setattr of error": "an error carries a note to whoever explains it"
    },
    "engine/training/loop/planning.py": {
        "_first_resident of the module is changed": "a cache: RAM of this process at its first run"
    },
}
"""What stays, by file and text, and why."""


# ------------------------------------------------------------------ tests


def test_whoever_owns_a_thing_changes_it():
    found: dict[str, list[str]] = {}
    for file, text in findings():
        if text not in REASONS.get(file, ()):
            found.setdefault(file, []).append(text)
    assert found == {}


def test_no_reason_outlives_what_it_is_for():
    found = set(findings())
    assert [
        (file, text)
        for file, texts in REASONS.items()
        for text in texts
        if (file, text) not in found
    ] == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(x):\n    x.a = 1\n", "x.a is set"),
        ("def f(x):\n    x.a, y = 1, 2\n", "x.a is set"),
        ("def f(x):\n    x.a += 1\n", "x.a is set"),
        ("def f(x):\n    del x.a\n", "x.a is set"),
        ("def f(x):\n    x.a[0] = 1\n", "x.a is changed"),
        ("def f(x):\n    x.a.append(1)\n", "x.a is changed"),
        ("def f(x):\n    setattr(x, 'a', 1)\n", "setattr of x"),
        ("def f(x):\n    return x._a\n", "x._a is private"),
        ("def f(x):\n    return x.__dict__\n", "x.__dict__ is private"),
        ("class C:\n    def f(self):\n        self.a.b = 1\n", "self.a.b is set"),
        ("from engine.text import _a\n", "engine.text._a is private"),
        ("KNOWN = {}\ndef f():\n    KNOWN[1] = 2\n", "KNOWN of the module is changed"),
        ("KNOWN: set = set()\ndef f():\n    KNOWN.add(1)\n", "KNOWN of the module is changed"),
        ("last = None\ndef f():\n    global last\n    last = 1\n", "last of the module is set"),
        ("import os\nos.makedirs('a')\n", "os.makedirs('a') at import"),
        ("if 1 < 2:\n    import os\n", "if 1 < 2: at import"),
        (
            "from pathlib import Path\nNAMES = Path('a').read_text()\n",
            "Path('a').read_text() at import",
        ),
    ],
)
def test_an_offender_is_found(tmp_path, code, said):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "offender.py").write_text(code)
    assert list(findings(tmp_path)) == [("app/offender.py", said)]


@pytest.mark.parametrize(
    "code",
    [
        "class C:\n    def f(self):\n        self.a = 1\n        self.b[0] = 1\n        "
        "self.c.append(1)\n",
        "import re\n_NAME = re.compile('a')\n",
        "def f():\n    made = {}\n    made[1] = 2\n    made.update(a=1)\n    return made\n",
        "KNOWN = {}\ndef f():\n    KNOWN = []\n    KNOWN.append(1)\n",
        "LATER = {'a': lambda x: x.go()}\n",
    ],
)
def test_what_an_owner_does_is_no_finding(tmp_path, code):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "owner.py").write_text(code)
    assert list(findings(tmp_path)) == []
