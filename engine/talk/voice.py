"""How a model is spoken to: by its tokenizer's own chat template where there is one."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any

from engine.config.settings import TrainConfig
from engine.data.dates import fixed_date
from engine.data.encode import Encoder
from engine.data.special import ReservedText
from engine.errors import DataError
from engine.model.pretrained_files import load_config, load_tokenizer
from engine.runtime.generate import end_tokens, longest_row
from engine.talk.conversation import Message

_PROBE = "R7x9Q"
"""A text that no template holds."""


class Voice:
    """How a model is spoken to: its tokenizer, its chat template, its ends."""

    def __init__(self, config: TrainConfig, hf_config: Any, tokenizer: Any):
        self.tokenizer = tokenizer
        self.longest = longest_row(hf_config)
        self.ends = end_tokens(hf_config, tokenizer, config.model.source)
        self._encoder = Encoder(tokenizer, config.data.train_on, config.data.max_seq_len)
        self._control = self._encoder.renderer.control

    @classmethod
    def of(cls, config: TrainConfig) -> Voice:
        """Without any weights. Raises ModelError where there is no usable tokenizer."""
        return cls(config, load_config(config.model.source), load_tokenizer(config.model.source))

    @property
    def has_template(self) -> bool:
        return self._encoder.renderer.available

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template writes a system message."""
        if not self.has_template:
            return False
        with contextlib.suppress(DataError):
            return _PROBE in self._written(
                [{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}]
            )
        return False

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to where the next answer is due. Without a chat template,
        all that was written so far is one text, which goes on. Raises DataError where the template
        refuses the messages, and where they are longer than the model's rows.
        """
        if self.has_template:
            text = self._written(messages)
            ids = (
                self._control.encode(text)[0]
                if self._control.stands_in(text)
                else self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            )
        else:
            ids = self._encoder.question(
                "".join(message["content"] for message in messages if message["role"] != "system")
            )
        if self.longest is not None and len(ids) >= self.longest:
            raise DataError(
                f"The conversation has {len(ids):,} tokens and this model takes {self.longest:,} "
                "at most; begin a new chat or shorten the message."
            )
        return ids

    def _written(self, messages: list[Message]) -> str:
        try:
            stood_in = [
                self._control.stand_in(message, message["role"] == "assistant")
                for message in messages
            ]
            return self.tokenizer.apply_chat_template(
                stood_in, tokenize=False, add_generation_prompt=True, **fixed_date(self.tokenizer)
            )
        except ReservedText:
            raise DataError(
                "The message holds private-use characters that stand for special tokens here; "
                "leave them out."
            ) from None
        except Exception as error:  # templates raise what they like
            raise DataError(
                f"The model's chat template refuses this conversation ({str(error).rstrip('.')}); "
                "begin a new chat or change the system message."
            ) from error

    def text(self, ids: list[int]) -> str:
        """An answer so far; a character that is not whole yet is left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
