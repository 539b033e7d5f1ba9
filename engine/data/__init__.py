"""Data sets as rows of tokens: formats, chat templates, loss masks, packing and a resumable order. No torch here."""

from engine.data.dates import fixed_date
from engine.data.loader import PreparedData, Prompt, prepare_data
from engine.data.mapping import preview
from engine.data.rows import MicroBatch, Row, RowSet, batches, one_pass

__all__ = ["MicroBatch", "PreparedData", "Prompt", "Row", "RowSet", "batches", "fixed_date", "one_pass", "prepare_data",
           "preview"]
