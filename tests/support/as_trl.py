"""The same steps by TRL's own trainers: their losses, figures and norms, with AdamW of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.config.settings import TrainConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.rows import rows_of_step


@dataclass(frozen=True)
class StepOfTrl:
    """What one step gave."""

    loss: float
    grad_norm: float
    figures: dict[str, float]


Answers = tuple[list[int], list[int], list[int]]
"""The tokens of the prompt, of the chosen and of the rejected answer."""
ONE_PAIR = [{"prompt": "one", "chosen": " two", "rejected": " three"}]
"""A trainer wants data when it is made. It gets its batches from `steps_of_trl`."""


def pairs_of_step(config: TrainConfig, step: int) -> list[Answers]:
    """The pairs that a run with these settings reads in a step, as TRL takes them."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.source)
    data = prepare_data(config.read_data, tokenizer, config.train.seed)
    rows = data.grouped_by_length(config.train.batch_size).train
    found = []
    for pair in rows_of_step(rows, config.train.batch_size, step):
        chosen, rejected = rows.sequences(pair)
        begin = int(chosen.answer.argmax()) + 1  # the mark stands on the token before the answer
        assert begin == int(rejected.answer.argmax()) + 1
        ids = chosen.input_ids.tolist()
        found.append((ids[:begin], ids[begin:], rejected.input_ids.tolist()[begin:]))
    return found


def _with_adamw(
    config: TrainConfig,
    model: torch.nn.Module,
    one: Callable[[list[Any]], Any],
    rows_of: Callable[[TrainConfig, int], list[Any]] = pairs_of_step,
) -> list[StepOfTrl]:
    """Takes the steps of a run. `one` gives the loss of a batch, which `rows_of` reads, with its
    figures.
    """
    train = config.train
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, train.learning_rate, (train.beta1, train.beta2), train.eps)
    steps = []
    for step in range(1, train.steps + 1):
        loss, figures = one(rows_of(config, step))
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        adamw.step()
        steps.append(StepOfTrl(loss.item(), norm.item(), figures))
    return steps


def _loaded(config: TrainConfig) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(config.model.source, dtype=torch.float32)


def _usual(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
    }


def dpo_of_trl(
    config: TrainConfig,
    folder: Path,
    rows_of: Callable[[TrainConfig, int], list[Answers]] = pairs_of_step,
) -> tuple[list[StepOfTrl], list[Any]]:
    """The steps of `DPOTrainer`, and the references that it computes for the pairs of step 1."""
    from trl import DPOConfig, DPOTrainer

    form = config.objective
    losses, weights = [form.loss], [1.0]
    if form.sft_weight:
        losses, weights = [*losses, "sft"], [1.0, form.sft_weight]
    arguments = DPOConfig(
        **_usual(folder),
        beta=form.beta,
        loss_type=losses,
        loss_weights=weights,
        label_smoothing=form.label_smoothing,
    )
    model = _loaded(config)
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=Dataset.from_list(ONE_PAIR),
        processing_class=AutoTokenizer.from_pretrained(config.model.source),
    )

    def collated(pairs: list[Answers]) -> dict[str, Any]:
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return trainer.data_collator([dict(zip(names, pair)) for pair in pairs])

    def one(pairs: list[Answers]) -> Any:
        trainer.model.train()
        trainer._metrics["train"].clear()
        loss = trainer._compute_loss(trainer.model, collated(pairs), False)
        figures = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        return loss, figures

    references = trainer.compute_ref_log_probs(trainer.ref_model, collated(rows_of(config, 1)))
    return _with_adamw(config, model, one, rows_of), [each.tolist() for each in references]


def orpo_of_trl(config: TrainConfig, folder: Path) -> list[StepOfTrl]:
    """The steps of `ORPOTrainer`."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = _loaded(config)
    trainer = ORPOTrainer(
        model=model,
        args=ORPOConfig(**_usual(folder), beta=config.preference.beta, max_length=64),
        train_dataset=Dataset.from_list(ONE_PAIR),
        processing_class=AutoTokenizer.from_pretrained(config.model.source),
    )

    def one(pairs: list[Answers]) -> Any:
        trainer.model.train()
        return trainer.get_batch_loss_metrics(trainer.model, _for_orpo(pairs), "train")

    return _with_adamw(config, model, one)


def _for_orpo(pairs: list[Answers]) -> dict[str, torch.Tensor]:
    batch = {}
    for place, side in ((1, "chosen"), (2, "rejected")):
        ids = [torch.tensor(pair[0] + pair[place]) for pair in pairs]
        labels = [torch.tensor([-100] * len(pair[0]) + pair[place]) for pair in pairs]
        ones = [torch.ones_like(each) for each in ids]
        for name, values, filler in (
            ("input_ids", ids, 0),
            ("attention_mask", ones, 0),
            ("labels", labels, -100),
        ):
            padded = torch.nn.utils.rnn.pad_sequence(values, True, filler)
            batch[f"{side}_{name}"] = padded
    return batch


def marked_of_step(config: TrainConfig, step: int) -> list[dict[str, Any]]:
    """The answers with marks that a run with these settings reads in a step, as TRL takes them."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.source)
    data = prepare_data(config.read_data, tokenizer, config.train.seed)
    rows = data.grouped_by_length(config.train.batch_size).train
    found = []
    for answer in rows_of_step(rows, config.train.batch_size, step):
        (sequence,), (stranger,) = rows.sequences(answer), rows.kl_completions.sequences(answer)
        begin = int(sequence.answer.argmax()) + 1  # the mark stands on the token before the answer
        assert begin == int(stranger.answer.argmax()) + 1
        ids = sequence.input_ids.tolist()
        found.append(
            {
                "prompt_ids": ids[:begin],
                "completion_ids": ids[begin:],
                "KL_completion_ids": stranger.input_ids.tolist()[begin:],
                "label": sequence.is_desirable,
            }
        )
    return found


def marked_in_order(config: TrainConfig, step: int) -> list[dict[str, Any]]:
    """The same, with other answers as TRL finds them in data that it reads in order."""
    found = marked_of_step(config, step)
    own = [answer["completion_ids"] for answer in found]
    others = [own[-1], *own[:-1]]
    return [answer | {"KL_completion_ids": other} for answer, other in zip(found, others)]


def kto_of_trl(config: TrainConfig, folder: Path, rows_of=marked_of_step) -> list[StepOfTrl]:
    """The steps of `KTOTrainer`."""
    from trl import KTOConfig, KTOTrainer

    form = config.objective
    weights = {"desirable_weight": form.desirable_weight}
    weights["undesirable_weight"] = form.undesirable_weight
    arguments = KTOConfig(
        **_usual(folder), beta=form.beta, per_device_train_batch_size=2, **weights
    )
    model = _loaded(config)
    one_answer = [{"prompt": "one", "completion": " two", "label": True}] * 2
    trainer = KTOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=Dataset.from_list(one_answer),
        processing_class=AutoTokenizer.from_pretrained(config.model.source),
    )

    def one(answers: list[dict[str, Any]]) -> Any:
        trainer.model.train()
        trainer._metrics["train"].clear()
        batch = trainer.data_collator(answers)
        loss = trainer._compute_loss(trainer.model, batch, False)
        return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}

    return _with_adamw(config, model, one, rows_of)


def _tiny_model(tokenizer: Any) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config)


def prepared_by(trainer: type, row: dict[str, Any], tokenizer: Any, max_length: int | None) -> Any:
    """One row as `DPOTrainer` or `KTOTrainer` prepares it, without a model, or None where they drop
    it.
    """
    of_trainer = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0
    )
    settings = SimpleNamespace(
        dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start"
    )
    found = trainer._prepare_dataset(
        of_trainer, Dataset.from_list([row]), tokenizer, settings, "train"
    )
    return found[0] if len(found) else None


def cut_by_dpo(row: dict[str, Any], max_length: int) -> list[tuple[list[int], list[int]]]:
    """The tokens of the chosen and of the rejected line of a prepared row, and those of them that
    are summed, as TRL's collator cuts them.
    """
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    batch = DataCollatorForPreference(pad_token_id=0, max_length=max_length)([row])
    found = []
    for ids, held, summed in zip(
        batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"].bool()
    ):
        found.append((ids[held].tolist(), ids[held & summed].tolist()))
    return found


def tokens_of_orpo(row: dict[str, Any], tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The row as `ORPOTrainer` tokenizes it: the ids and labels of both answers."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer = ORPOTrainer(
        model=_tiny_model(tokenizer),
        args=ORPOConfig(**_usual(folder), max_length=512),
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
    )
    return trainer.train_dataset[0]


def tokens_of_dpo(rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> Dataset:
    """The rows as `DPOTrainer` tokenizes them: prompt_ids, chosen_ids and rejected_ids."""
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=_tiny_model(tokenizer),
        ref_model=_tiny_model(tokenizer),
        args=DPOConfig(**_usual(folder), max_length=None),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer.train_dataset


def tokens_of_kto(rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> Dataset:
    """The rows as `KTOTrainer` tokenizes them: prompt_ids and completion_ids."""
    from trl import KTOConfig, KTOTrainer

    trainer = KTOTrainer(
        model=_tiny_model(tokenizer),
        ref_model=_tiny_model(tokenizer),
        args=KTOConfig(**_usual(folder), max_length=None, per_device_train_batch_size=2),
        train_dataset=Dataset.from_list(rows * (2 if len(rows) == 1 else 1)),
        processing_class=tokenizer,
    )
    return trainer.train_dataset
