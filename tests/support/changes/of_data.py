"""Changes to how data become tokens, labels, rows and micro-batches."""

from __future__ import annotations

from tests.support.changes.record import Change

ENCODE = "engine/data/encode.py"
ROWS = "engine/data/rows.py"
PACKING = "engine/data/packing.py"
LOADER = "engine/data/loader.py"
TOKENISE = "engine/data/tokenise.py"
LABELS = "tests/engine/data/test_data_labels.py"
MASKS = "tests/engine/data/test_data_masks.py"
ROW_TESTS = "tests/engine/data/test_data_rows.py"
FINGERPRINT = "tests/engine/data/test_data_fingerprint.py"
MIX = "tests/engine/data/test_data_mix.py"
AUTOMATON = "tests/engine/dividing/test_automaton.py"
WORDS = "tests/engine/dividing/test_word_tokens.py"
LONG = "tests/engine/data/test_long_texts.py"

DATA = (
    Change(
        "first-token-of-a-text-trained",
        ENCODE,
        "        else:\n            trained[:1] = False\n",
        "        else:\n            trained[:1] = True\n",
        "The first token of a plain text counts as trained.",
        (LABELS,),
    ),
    Change(
        "repeated-tokens-trained-again",
        "engine/data/documents.py",
        "        self._trained[: self._repeated] = False\n",
        "        self._trained[:1] = False\n",
        "Where a text goes on, the tokens that are repeated as context are trained once more.",
        (LONG,),
    ),
    Change(
        "next-row-without-its-predecessor",
        "engine/data/documents.py",
        "self._repeated = max(1, config.overlap)",
        "self._repeated = config.overlap",
        "Where a text goes on, the first token of a row is not predicted by any row.",
        (LONG,),
    ),
    Change(
        "tokens-of-the-context-kept",
        "engine/data/text_tokens.py",
        "end if piece.after else None)",
        "None)",
        "Tokens of the text behind a piece come twice.",
        (LONG,),
    ),
    Change(
        "word-by-the-last-alternative",
        "engine/dividing/automaton.py",
        "waiting = places[::-1]",
        "waiting = places[:]",
        "Of several alternatives of a pattern, the last one divides a text.",
        (AUTOMATON,),
    ),
    Change(
        "word-with-tokens-of-another",
        "engine/dividing/word_kernels.py",
        "if place == end:",
        "if place >= begin:",
        "A word gets the tokens of one of its length that has its slot.",
        (WORDS,),
    ),
    Change(
        "word-divided-at-any-character",
        "engine/dividing/word_tokens.py",
        "if is_alike else OTHER",
        "if there else OTHER",
        "Characters at which the tokenizer divides a text otherwise are divided by the table.",
        (WORDS,),
    ),
    Change(
        "first-token-of-any-document-trained",
        ENCODE,
        "trained[:1] = False\n        limit = self.max_seq_len\n        if answer",
        "trained[:1] = True\n        limit = self.max_seq_len\n        if answer",
        "The first token of a document counts as trained.",
        (LABELS, MASKS),
    ),
    Change(
        "label-of-the-next-document",
        ROWS,
        "labels[ends_in_row - 1] = IGNORED",
        "labels[-1] = IGNORED",
        "The last token of a document learns how the next one begins, where that is marked.",
        (LABELS,),
    ),
    Change(
        "labels-not-shifted",
        ROWS,
        "labels[:-1] = np.where(trained[1:], ids[1:], IGNORED)",
        "labels[:-1] = np.where(trained[:-1], ids[:-1], IGNORED)",
        "Each token learns itself.",
        (LABELS, ROW_TESTS),
    ),
    Change(
        "end-of-sequence-not-trained",
        ENCODE,
        "after = np.ones(len(self._suffix), dtype=bool)",
        "after = np.zeros(len(self._suffix), dtype=bool)",
        "A text does not learn to end.",
        (MASKS,),
    ),
    Change(
        "neighbour-of-an-answer-trained",
        ENCODE,
        "return (ends > start) &",
        "return (ends >= start) &",
        "The token before an answer is trained.",
        (MASKS,),
    ),
    Change(
        "answer-cut-in-two",
        ENCODE,
        "        if answer and answer[1] > limit:\n            answer = None\n",
        "",
        "An answer of which a part was cut off is asked for as if it were whole.",
        (LABELS, ROW_TESTS),
    ),
    Change(
        "documents-share-positions",
        ROWS,
        "positions = (np.arange(len(ids)) - starts_in_row).astype(np.int32)",
        "positions = np.arange(len(ids)).astype(np.int32)",
        "Documents of a row see each other, because positions run on.",
        (ROW_TESTS,),
    ),
    Change(
        "padding-joins-the-last-document",
        ROWS,
        "        position_ids[line, size:] = np.arange(length - size)\n",
        "        position_ids[line, size:] = np.arange(size, length)\n",
        "Padding is no document of its own.",
        (ROW_TESTS,),
    ),
    Change(
        "same-order-in-every-epoch",
        ROWS,
        "np.random.default_rng((epoch, self.seed))",
        "np.random.default_rng((0, self.seed))",
        "Every epoch visits the rows in the same order.",
        (ROW_TESTS,),
    ),
    Change(
        "first-rows-skipped",
        ROWS,
        "first = (step - 1) * batch_size",
        "first = step * batch_size",
        "The first step takes the rows of the second.",
        (ROW_TESTS, "tests/engine/data/test_data_resume.py"),
    ),
    Change(
        "shortest-rows-first",
        ROWS,
        "places.sort(key=lambda place: rows.row_length(chosen[place]), reverse=True)",
        "places.sort(key=lambda place: rows.row_length(chosen[place]))",
        "The longest rows come in the last micro-batch, which may be the smaller one.",
        (ROW_TESTS, "tests/engine/train/test_dry_run.py"),
    ),
    Change(
        "larger-micro-batches-last",
        ROWS,
        "number * size + min(number, larger)",
        "number * size + max(0, number - count + larger)",
        "The larger micro-batches come last.",
        (ROW_TESTS,),
    ),
    Change(
        "last-rows-not-evaluated",
        ROWS,
        "for start in range(0, len(rows), micro_batch_size):",
        "for start in range(0, len(rows) - micro_batch_size + 1, micro_batch_size):",
        "An evaluation leaves out the rows that do not fill a micro-batch.",
        (LABELS, "tests/engine/train/test_evaluation_loss.py", ROW_TESTS),
    ),
    Change(
        "exact-fit-not-used",
        PACKING,
        "place = bisect_left(spaces, length)",
        "place = bisect_left(spaces, length + 1)",
        "A document that fills a row exactly begins a new one.",
        (ROW_TESTS,),
    ),
    Change(
        "any-row-that-fits",
        PACKING,
        "place = bisect_left(spaces, length)",
        "place = bisect_left(spaces, length) and len(spaces) - (spaces[-1] >= length)",
        "A document goes into the row with the most space, not the least.",
        (ROW_TESTS,),
    ),
    Change(
        "fingerprint-without-marks",
        LOADER,
        "            side.trained,\n",
        "",
        "A resumed run does not see that other tokens are trained.",
        (FINGERPRINT,),
    ),
    Change(
        "fingerprint-without-rows",
        LOADER,
        "            side.rows.documents,\n",
        "",
        "A resumed run does not see that rows are packed otherwise.",
        (FINGERPRINT, "tests/engine/data/test_data_resume.py"),
    ),
    Change(
        "held-out-rows-by-seed",
        TOKENISE,
        "np.random.default_rng(EVAL_SEED).permutation(total)[:count]",
        "np.random.default_rng(total).permutation(total)[:count]",
        "Which rows are held out depends on something else than on the fixed seed.",
        (ROW_TESTS, FINGERPRINT),
    ),
    Change(
        "held-out-rows-trained-too",
        TOKENISE,
        "now = ~held_out",
        "now = ~held_out | held_out",
        "Rows that are held out are trained as well.",
        (ROW_TESTS,),
    ),
    Change(
        "part-of-a-mix-without-its-rest",
        LOADER,
        "concatenate([np.tile(np.arange(count), passes), extra])",
        "concatenate([np.tile(np.arange(count), passes), extra[:0]])",
        "A source of weight 1.5 is visited once.",
        (MIX,),
    ),
    Change(
        "documents-not-shuffled-before-packing",
        LOADER,
        "        if self.order.shuffle:\n            order =",
        "        if not self.order.shuffle:\n            order =",
        "Documents are packed in a random order exactly where that is switched off.",
        (ROW_TESTS, FINGERPRINT, MIX),
    ),
    Change(
        "weights-of-the-tokens-before",
        "engine/data/rows.py",
        "weights = np.append(each[1:], np.float32(0))",
        "weights = each.copy()",
        "A label has the weight of the token that predicts it, not its own.",
        ("tests/engine/data/test_weights.py",),
    ),
    Change(
        "weights-begin-with-the-first",
        "engine/data/token_cache.py",
        "self._write_ones(self._tokens)",
        "self._write_ones(0)",
        "Weights that come late belong to the first tokens of a source.",
        ("tests/engine/data/test_weights.py",),
    ),
)
