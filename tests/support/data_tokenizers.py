"""Tokenizers and chat templates for the data tests, made in memory: nothing is downloaded."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content']"
    " | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}"
    "{% endif %}"
)
EOS_AT_THE_END = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% else %}{{ '</s>' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}"
    "{% endif %}"
)
QWEN3 = (  # the last answers get a think block, those before the last question lose theirs
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% set content = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% set reasoning = m['reasoning_content'] or '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n'"
    " + content.lstrip('\\n') }}"
    "{% else %}{{ '<|im_start|>assistant\\n' + content }}"
    "{% endif %}{{ '<|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
R1 = (  # drops reasoning everywhere, and its generation prompt opens a think block
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + '</s>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}"
    "{% endif %}"
)
UPPER = (  # no way to tell where the answer begins
    "{% for m in messages %}{{ m['content'] | upper | replace('A', '') }}"
    "{{ m['content'] | length }}{% endfor %}{% if add_generation_prompt %}{{ '###' }}"
    "{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "generation": CHATML_GENERATION,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "eos_at_the_end": EOS_AT_THE_END,
    "no_end": NO_END,
    "qwen3": QWEN3,
}

_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level_tokenizer(
    chat_template: str | None = None,
    trim_offsets: bool = False,
    bos: bool = False,
    eos: bool = True,
    special: tuple[str, ...] = SPECIAL,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges across words, spaces and line ends, as GPT-2, Llama 3 and
    Qwen have.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    merges = [
        ("h", "e"),
        ("Ċ", "Ċ"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "hello"),
        ("a", "n"),
        ("Ġ", "a"),
        ("Ġ", "w"),
    ]
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        )
    backend.post_processor = processors.Sequence(steps)
    return _wrap(backend, chat_template, eos)


def sentencepiece_tokenizer(
    chat_template: str | None = None, legacy: bool = False
) -> PreTrainedTokenizerFast:
    """Metaspace BPE over characters, as Llama 2 and Mistral have; `legacy` replaces spaces in the
    normalizer.
    """
    letters = sorted(
        set("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\n<>|_/[]äö日")
    )
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "a")]
    vocabulary = {"<unk>": 0} | {token: i for i, token in enumerate(letters, 1)}
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return _wrap(backend, chat_template, True)


def _wrap(backend: Tokenizer, chat_template: str | None, eos: bool) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>" if eos else None,
        bos_token="<s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
