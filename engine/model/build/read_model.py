"""The configuration and the tokenizer of a run are those of its model, with what the user adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.adapters import SAVE_MODULES, Adapters
from engine.config.rope_settings import refuse_longer_rows
from engine.config.settings import ModelConfig, TrainConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError, RunError
from engine.model.build.added_tokens import ADD_TOKENS, Added, add_tokens
from engine.model.build.library import reads_more_than_text
from engine.model.build.pretrained_files import load_config, load_tokenizer, with_vocabulary
from engine.model.build.rope_scaling import note_of, scaled
from engine.model.build.units import StreamedModel


@dataclass(frozen=True)
class ReadModel:
    """What is read of a model before its weights."""

    config: Any
    """The configuration, of transformers, with rows for all tokens."""
    tokenizer: Any
    added: Added
    notes: tuple[str, ...]
    """Sentences on what is changed."""
    grows: bool
    """Whether the weights of the model have too few rows for them."""

    def refuse_foreign(self, highest_id: int, source: str) -> None:
        """Raises RunError if the tokenizer produces tokens that the model does not know, up to
        `highest_id`.
        """
        vocabulary = self.config.get_text_config().vocab_size
        if highest_id >= vocabulary:
            raise RunError(
                f"The tokenizer of {source} makes token {highest_id}, but the model knows only "
                f"{vocabulary}; use the tokenizer that belongs to the model."
            )

    def refuse_untrained(
        self, model: StreamedModel, config: TrainConfig, trained: Sequence[str] = ()
    ) -> None:
        """Raises ConfigError where rows of new tokens would not be trained, or would be left out of
        the export. model: the one that was built by this configuration. trained: the weights with
        which the run begins have rows for these tokens.
        """
        if not self.added.new:
            return
        if model.non_text:
            raise ConfigError(
                ADD_TOKENS,
                f"{config.model.source} also reads images or sound, and its processor is exported "
                "as it is, without other tokens; leave this empty.",
            )
        frozen = _frozen_tables(model)
        parts = config.train.parts
        if frozen and not set(self.added.new) <= set(trained):
            raise ConfigError(ADD_TOKENS, _why_untrained(frozen, model, parts))
        if self.grows and config.exports_adapter:
            raise ConfigError(
                "output.export_form",
                f"adapters beside an embedding that {ADD_TOKENS} makes larger do not fit "
                f"{config.model.source}; set it to model.",
            )


def configured(model: ModelConfig) -> Any:
    """Returns the configuration of `model.source` with the changes that the other settings of the
    model ask for. Raises ModelError, in one sentence, where there is none that can be read, and
    ConfigError for a setting that means nothing to it.
    """
    return scaled(load_config(model.source), model)


def read_model(config: TrainConfig) -> ReadModel:
    """Reads the configuration and the tokenizer of a run. Raises ModelError for a model that cannot
    be used, and ConfigError for tokens or positions that it cannot have.
    """
    own = load_config(config.model.source)
    hf_config = scaled(own, config.model)
    notes = []
    if config.model.rope_scaling != "none":
        positions = own.get_text_config().max_position_embeddings
        refuse_longer_rows(config.model, config.data.max_seq_len, positions)
        notes += note_of(config.model, positions)
    tokenizer = load_tokenizer(config.model.source)
    added = add_tokens(tokenizer, config.data.add_tokens)
    before = getattr(hf_config.get_text_config(), "vocab_size", 0)  # not every model has words
    grows = added.vocabulary > before
    if grows:
        _refuse_other_tables(hf_config, config.model.source)
        hf_config = with_vocabulary(hf_config, added.vocabulary)
    return ReadModel(hf_config, tokenizer, added, (*notes, *added.notes(before)), grows)


def _refuse_other_tables(hf_config: Any, source: str) -> None:
    """Raises ConfigError for a model with more that depends on the vocabulary than embedding and
    head.
    """
    if reads_more_than_text(hf_config):
        why = "it also reads images or sound, whose tokens have fixed places"
    elif getattr(hf_config.get_text_config(), "vocab_size_per_layer_input", None):
        why = "its blocks have tables of tokens of their own"
    else:
        return
    raise ConfigError(
        ADD_TOKENS, f"the vocabulary of {source} cannot grow, because {why}; leave this empty."
    )


def _frozen_tables(model: StreamedModel) -> list[str]:
    """Returns the full names of the weights with a row for each token that are not trained."""
    vocabulary = model.config.get_text_config().vocab_size
    embed_and_head = (model.layouts[0], model.layouts[-1])
    specs = [spec for layout in embed_and_head for spec in layout.parameters]
    return [spec.full_name for spec in specs if spec.frozen and spec.shape[0] == vocabulary]


def _why_untrained(frozen: list[str], model: StreamedModel, parts: Parts | Adapters | None) -> str:
    """Returns a sentence on what to do so that the frozen weights are trained."""
    is_ = "is" if len(frozen) == 1 else "are"
    what = f"{' and '.join(frozen)} {is_} frozen, so rows of new tokens would stay as they begin"
    if not isinstance(parts, Adapters):
        return f"{what}; name {' and '.join(frozen)} in train.part_names."
    if model.tied:
        return (
            f"{what}, and adapters cannot stand beside an embedding that the head shares; set "
            "train.method to full or parts."
        )
    modules = list(dict.fromkeys(name.rpartition(".")[0].rpartition(".")[2] for name in frozen))
    return f"{what}; add {' and '.join(modules)} to {SAVE_MODULES}."
