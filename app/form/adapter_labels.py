"""Labels of settings that mean something with one method of training alone: those of adapters and
of parts.
"""

from __future__ import annotations

LABELS = {
    "train.lora_rank": "Rank of the adapters",
    "train.lora_alpha": "Alpha of the adapters",
    "train.lora_dropout": "Dropout of the adapters",
    "train.lora_rslora": "Divide by the root of the rank (rsLoRA)",
    "train.lora_targets": "Layers with an adapter (one a line)",
    "train.lora_save_modules": "Modules to train whole (one a line)",
    "train.lora_target_parameters": "Stacked experts with adapters (one a line)",
    "output.export_form": "What is exported",
}
CHOICE_LABELS = {
    "train.method": {
        "full": "the whole model",
        "parts": "the parts that are named here",
        "lora": "adapters (LoRA)",
    },
    "output.export_form": {
        "model": "the whole model, adapters merged",
        "adapter": "the adapters alone, as PEFT writes them",
    },
}
SHORT_HELP = {
    "train.lora_rank": "Width of the two factors of an adapter.",
    "train.lora_alpha": "Adapters are multiplied by alpha / rank.",
    "train.lora_targets": "all-linear, or ends of names such as q_proj; * stands for any letters.",
    "train.lora_save_modules": "Ends of names, such as norm or lm_head.",
    "train.lora_target_parameters": "Such as experts.gate_up_proj and experts.down_proj.",
}
_WITH_METHOD = {
    "parts": ("train.part_names", "train.last_blocks"),
    "lora": tuple(LABELS),
}


def method_of(dotted: str) -> str:
    """Returns the method of training with which alone a setting is shown; an empty text for a
    setting that is shown with every one.
    """
    return next((method for method, own in _WITH_METHOD.items() if dotted in own), "")
