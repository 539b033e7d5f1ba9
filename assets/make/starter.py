"""Make the bundled starter: `starter-model/` (tokenizer, chat template, small random model) and
`starter.jsonl`.

    python assets/make/starter.py [FOLDER]

The skill is to write numbers from 1 to 3999 as Roman numerals. Every number occurs once in the
data, so a held-out question is one that the model has never seen, and its answer is right or wrong
without a doubt. The same version of the libraries makes the same bytes each time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 7
LARGEST = 3999
FOLLOW_UP_EVERY = 4
"""One conversation in so many goes on with a second question, so that both its answers are trained.
"""

QUESTIONS = ("Roman numeral for {}?", "How did Romans write {}?", "In Roman numerals: {}?")
FOLLOW_UP_QUESTION = "And {}?"

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 384
"""Tokens at most; the words of the questions need fewer."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The roles of this model are system, user and assistant.') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

_NUMERALS = (
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
)


def roman(number: int) -> str:
    """`number` (1 to 3999) as a Roman numeral."""
    letters = []
    for value, numeral in _NUMERALS:
        count, number = divmod(number, value)
        letters.append(numeral * count)
    return "".join(letters)


def conversations() -> list[dict]:
    """Rows of `starter.jsonl`, in a shuffled order; each number once."""
    choose = random.Random(SEED)
    numbers = list(range(1, LARGEST + 1))
    choose.shuffle(numbers)
    rows = []
    while numbers:
        messages = _turns(choose.choice(QUESTIONS), numbers.pop())
        if len(rows) % FOLLOW_UP_EVERY == 0 and numbers:
            messages += _turns(FOLLOW_UP_QUESTION, numbers.pop())
        rows.append({"messages": messages})
    return rows


def _turns(question: str, number: int) -> list[dict]:
    return [
        {"role": "user", "content": question.format(number)},
        {"role": "assistant", "content": roman(number)},
    ]


def make_tokenizer(rows: list[dict]):
    """A small byte-level BPE tokenizer: the words of the questions merge, and the letters of
    numerals stand alone, since it learns no merges from answers. Texts are divided as SmolLM2
    divides them, so llama.cpp reads the model.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    questions = (m["content"] for row in rows for m in row["messages"] if m["role"] == "user")
    backend.train_from_iterator(questions, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer):
    """A Qwen3 of six layers with random weights in float32."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=32,
    )
    return model


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    rows = conversations()
    tokenizer = make_tokenizer(rows)
    tokenizer.save_pretrained(folder / "starter-model")
    make_model(tokenizer).save_pretrained(folder / "starter-model")
    (folder / "starter-model" / "model.safetensors").chmod(0o644)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "starter.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
