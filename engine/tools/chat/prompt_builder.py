"""Conversations as the tokens of a prompt, by the tokenizer's own chat template if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from engine.config.settings import TrainConfig
from engine.data.tokens.encode import Encoder
from engine.data.tokens.special_tokens import ReservedText
from engine.data.tokens.template_process import Chat, Refusal
from engine.errors import DataError
from engine.model.build.read_model import read_model
from engine.runtime.sampling.generate import end_tokens, longest_row
from engine.tools.chat.conversation import Message

_PROBE = "R7x9Q"
"""Text that no chat template contains."""


class PromptBuilder:
    """A model's tokenizer, its chat template and the tokens that end an answer.

    `trained` are those that its run has trained to end one.
    """

    def __init__(
        self, config: TrainConfig, hf_config: Any, tokenizer: Any, trained: Iterable[str] = ()
    ):
        self.tokenizer = tokenizer
        self.longest = longest_row(hf_config)
        self._hf_config = hf_config
        self._source = config.model.source
        self._trained = trained
        self._encoder = Encoder.of(config.data, tokenizer)

    @classmethod
    def of(cls, config: TrainConfig) -> PromptBuilder:
        """Returns the prompt builder of a model without loading the weights.

        Raises ModelError if there is no usable tokenizer.
        """
        read = read_model(config)
        return cls(config, read.config, read.tokenizer)

    @cached_property
    def ends(self) -> set[int]:
        """Ids of the tokens that end an answer: those of the model, those that its run has trained
        to, and those with which its chat template ends one. Raises DataError for a template that
        exceeds its limits.
        """
        trained = [*self._trained, *self._encoder.renderer.ends.tokens]
        return end_tokens(self._hf_config, self.tokenizer, self._source, trained)

    @property
    def has_template(self) -> bool:
        return self._encoder.renderer.available

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template includes a system message in the prompt."""
        if not self.has_template:
            return False
        with contextlib.suppress(DataError):
            system = {"role": "system", "content": _PROBE}
            return _PROBE in self._written([system, {"role": "user", "content": "a"}])
        return False

    def prompt(self, messages: list[Message]) -> list[int]:
        """Returns the token ids of a conversation up to the beginning of the next answer.

        Without a chat template, all messages except those of the system are joined into one text,
        which the model continues. Raises DataError if the template rejects the messages or if they
        are longer than the model's rows.
        """
        if self.has_template:
            text = self._written(messages)
            if self._encoder.renderer.control.is_placeholder(text):
                ids = self._encoder.renderer.control.encode(text)[0]
            else:
                ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            contents = [message["content"] for message in messages if message["role"] != "system"]
            ids = self._encoder.question("".join(contents))
        self._refuse_long(ids, "The conversation", "begin a new chat or shorten the message")
        return ids

    def continued(self, prompt: str | list[int]) -> list[int]:
        """Returns the token ids of a prompt that the model continues as it stands. Raises DataError
        if it is empty, has ids that the model does not have, or is longer than the model's rows.
        """
        ids = self._encoder.continued(prompt) if isinstance(prompt, str) else prompt
        most = self._hf_config.get_text_config().vocab_size
        if not ids:
            raise DataError("The prompt is empty; write something to continue.")
        if not 0 <= min(ids) <= max(ids) < most:
            raise DataError(f"The prompt has token ids that are not 0 to {most - 1:,}.")
        self._refuse_long(ids, "The prompt", "shorten it")
        return ids

    def _refuse_long(self, ids: list[int], what: str, remedy: str) -> None:
        if self.longest is not None and len(ids) >= self.longest:
            raise DataError(
                f"{what} has {len(ids):,} tokens and this model takes {self.longest:,} at most; "
                f"{remedy}."
            )

    def _written(self, messages: list[Message]) -> str:
        """Returns the conversation as the chat template renders it."""
        template = self._encoder.renderer.template
        try:
            stood_in = [
                self._encoder.renderer.control.placeholder(message, message["role"] == "assistant")
                for message in template.apart(messages, has_tools=False)
            ]
        except ReservedText:
            raise DataError(
                "The message holds private-use characters that stand for special tokens here; "
                "leave them out."
            ) from None
        written = template.write([Chat(stood_in)], generation=True)[0]
        if isinstance(written, Refusal):
            raise DataError(
                f"The model's chat template refuses this conversation "
                f"({written.message.rstrip('.')}); begin a new chat or change the system message."
            )
        return written

    def text(self, ids: list[int]) -> str:
        """Returns the text of an answer so far, without a last character that is still
        incomplete.
        """
        return self.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
