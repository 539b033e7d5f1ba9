"""Labels of the settings of preferences."""

from __future__ import annotations

LABELS = {
    "train.objective": "What is learned",
    "preference.beta": "Beta",
    "preference.loss": "Form of DPO",
    "preference.label_smoothing": "Share of wrong pairs (robust)",
    "preference.sft_weight": "Weight of the SFT term",
}
CHOICE_LABELS = {
    "train.objective": {
        "sft": "answers as they are written (SFT)",
        "dpo": "which of two answers is better (DPO)",
        "orpo": "both at once (ORPO)",
        "kto": "which answers are good (KTO)",
    },
    "preference.loss": {"sigmoid": "sigmoid", "ipo": "IPO", "robust": "robust, for wrong pairs"},
}
SHORT_HELP = {
    "train.objective": "DPO and ORPO read and count pairs (columns chosen and rejected).",
}
