"""Sentences that readers stumbled over are on no screen again. Texts that stand in several lines of
the source are joined before they are looked for.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUMBLED_OVER = """
The run is shown to people under this name
What blocks compute in
several as [{source
texts go on in the next row
drop them anywhere on this page
Files uploaded before
Recognised as messages
Read as prompt_completion
A guess: prompt_completion
Which column is what
fit no known format, and a run would refuse
These data cannot be trained on
trained on | read only
Give these or epochs
Per optimizer step
Peak, AdamW
It fits this machine, but look at this
No change of settings was found
kept through a step
weights that are read
The rest of their fp32 masters
One thing to confirm
Which column is the prompt, and which the answer
makes the times of this CPU known
Start detached
one run at a time is possible
is none that is read
One click makes it fit
adapters learn beside them
so it cannot be started
Take back 1 change
All other settings
null takes the weights
the learning rate never falls again
Too early to say whether it learns
It learns:
would spare the detour
% of the time is spent waiting
of model work
Boundaries, sums
Getting ready
Trying a step
A step of the longest rows shows
All numbers are of the weights
Train on from these weights
New run from this one
What is shown is
in a process of its own, which goes on without
Leave it as it is
Change it
Learning rate, at its peak
Steps in all
Settings as run
What was made of them
What was chosen for a step
The ops of a step in order
Tick two to six runs
No run is like that
Whom to talk to
How answers are drawn
own chat template
of RAM in use, given back
is training here and needs the machine
Enter sends
all that is built in
swap is not counted
No NVIDIA driver answers
so blocks compute on the CPU
Read again
Fits one shown
What machine would train this model
an export takes these
The run itself exported to
all of the masters
as the run computes
Seen by
you alone (a private repository)
The model leaves this machine
both were compared
What to type
What was written
lists those there
first moments that fit
Is something else using this machine
in RAM, where blocks compute
Turns that the template leaves out
A question and its answer
is the question
Completion (trained on)
Column of the completion
Epochs set
Throughput
Tokens per second
Host memory
host memory
host RAM
host GiB
host optimizer
VRAM
"Baseline"
We do not know these column
No answer is under way
baseline, long rows
"""
OF_THE_ENGINE = """
is not on this machine, and there is no connection
has no rows; give a data set
is of no kind that is read
is none that is read
null takes the weights
Either way it is counted and told
No change of settings was found
is held out
has no question before
has no questions with
there is no question
} of host memory
Host memory ran low
"""


def test_no_screen_has_a_sentence_that_readers_stumbled_over():
    found = [*_found_in("app", STUMBLED_OVER), *_found_in("engine", OF_THE_ENGINE)]
    assert not found, "\n".join(found)


def _found_in(folder, sentences):
    paths = (ROOT / folder).rglob("*")
    sources = [path for path in paths if path.suffix in (".py", ".js", ".html")]
    assert len(sources) > 100
    found = []
    for path in sources:
        joined = re.sub(r'"\s*\n\s*\+?\s*f?"', "", path.read_text(encoding="utf-8"))
        text = " ".join(joined.split())
        for words in sentences.strip().splitlines():
            if words in text:
                found.append(f"{path.relative_to(ROOT)}: {words}")
    return found
