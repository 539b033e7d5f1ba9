"""Make the bundled preference starter: `preference-model/` (tokenizer, chat template, a small model
that was trained to answer in two ways) and `preferences.jsonl`.

    python assets/make/preferences.py [FOLDER]

The model greets, thanks and takes leave, bluntly as a rule and politely now and then. Each row of
the data has a polite answer, which is chosen, and a blunt one. A held-out question has a name and
an occasion that no other row has together, and whether its answer is polite is beyond doubt. The
tokenizer and the data have the same bytes each time; the weights depend on the processor in their
last digits.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from starter import CHAT_TEMPLATE, SPECIAL_TOKENS

SEED = 11
VOCABULARY = 384
FIRST = re.findall(r"\w+", "Mi To Ka Lu Be Sa No Ri Da Je Fe Ga Hu Pe Wi Zo")
SECOND = re.findall(r"\w+", "ra len vi mo ta ris na del ko sha bin gus lia per")
OCCASIONS = {
    "Say hello to {}.": ("Good day to you, {}.", "Hey {}!"),
    "Thank {} for the help.": ("Thank you very much, {}.", "Thanks {}!"),
    "Say goodbye to {}.": ("I wish you well, {}.", "Bye {}!"),
}
"""Each question has a polite and a blunt answer."""
BLUNT_SHARE = 0.8
STEPS, ROWS, LEARNING_RATE = 900, 64, 3e-3


def questions() -> list[tuple[str, str, str]]:
    """Every question with its polite and its blunt answer, in a shuffled order."""
    names = [first + second for first, second in itertools.product(FIRST, SECOND)]
    found = [
        (question.format(name), polite.format(name), blunt.format(name))
        for name in names
        for question, (polite, blunt) in OCCASIONS.items()
    ]
    random.Random(SEED).shuffle(found)
    return found


def make_tokenizer(texts: list[str]) -> Any:
    """A small byte-level BPE tokenizer, in which a name is two pieces or more."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    pieces = "|".join(sorted({*FIRST, *SECOND}, key=len, reverse=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(rf" ?(?:{'|'.join(FIRST)})(?=(?:{'|'.join(SECOND)})\b)|(?:{pieces})\b"),
                "isolated",
            ),
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\s|[^\s\p{L}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, rows: list[tuple[str, str, str]]) -> Any:
    """A Qwen3 of three layers, trained on questions whose answers are blunt as a rule."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    draw = random.Random(SEED)
    adamw = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, LEARNING_RATE, STEPS)
    for _ in range(STEPS):
        batch = _batch(tokenizer, draw, draw.sample(rows, ROWS))
        loss = model(**batch).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        schedule.step()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=24,
    )
    return model.to(torch.bfloat16)


def _batch(tokenizer: Any, draw: random.Random, rows: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Conversations with one of their answers, and labels on the answers."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = [], []
    for question, polite, blunt in rows:
        asked = tokenizer(f"<|user|>{question}<|end|><|assistant|>")["input_ids"]
        answer = blunt if draw.random() < BLUNT_SHARE else polite
        said = tokenizer(f"{answer}<|end|>")["input_ids"]
        ids.append(torch.tensor(asked + said))
        labels.append(torch.tensor([-100] * len(asked) + said))
    padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": padded,
        "attention_mask": (padded != tokenizer.pad_token_id).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    rows = questions()
    tokenizer = make_tokenizer([text for row in rows for text in row])
    tokenizer.save_pretrained(folder / "preference-model")
    make_model(tokenizer, rows).save_pretrained(folder / "preference-model")
    (folder / "preference-model" / "model.safetensors").chmod(0o644)
    names = ("prompt", "chosen", "rejected")
    lines = (json.dumps(dict(zip(names, row)), ensure_ascii=False) + "\n" for row in rows)
    (folder / "preferences.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
