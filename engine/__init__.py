"""Everything that Ramstream does without a browser, in nine packages. `engine` never imports `app`,
Gradio or Plotly.

A package imports from those listed after it, never from one before it. import-linter checks that,
the order of the packages inside each, and which of them load no torch; its contracts are in
pyproject.toml.

    tools      what a person starts: commands, bench, benchmarks, chat
    training   one run: its loop, checkpoints, the weights it starts from, its export
    runtime    what computes: devices, optimizer, host states, collectives, the step, several ranks
    runs       a run as its record: events, lists, trackers; no torch
    model      a Hugging Face model made streamable: files, blocks, LoRA, units
    planning   everything that is computed without torch: layouts, shapes, schedules, the fit report
    data       a user's rows become micro-batches: sources, formats, tokens, batches; no torch
    machine    this computer and known ones: memory, GPUs, disks, rates; no torch
    config     settings, their limits and checks; no torch

The single files (`errors`, `paths`, `text`, `files`, `safe_files`, `progress`, `helper_process`)
are for all of them.

JSON is read by msgspec where its types are declared or speed counts, and written by it where speed
counts. Elsewhere it is `json`: its ASCII text is what checksums cover, and it takes what other
programs write, such as NaN and half of a surrogate pair.
"""
