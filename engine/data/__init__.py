"""Data sets as rows of tokens: formats, chat templates, loss masks, packing and a resumable order. No torch here."""

from engine.data.dates import fixed_date
from engine.data.loader import PreparedData, Prompt, prepare_data
from engine.data.mapping import preview
from engine.data.preview import check_first_rows
from engine.data.rows import MicroBatch, Row, RowSet, batches, one_pass

__all__ = ["MicroBatch", "PreparedData", "Prompt", "Row", "RowSet", "batches", "check_first_rows", "fixed_date", "one_pass",
           "prepare_data", "preview"]
