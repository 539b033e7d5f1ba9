"""The engine is everything that Ramstream does without a browser.

It never imports `app`, gradio or plotly. Its rooms and single files stand here in order: a file
imports from its own room and from rooms listed before it. `tests/test_rooms.py` reads this list.

    errors          errors whose message is for the user
    paths           where the program, its cache and a user's files are
    words           sizes, times and counts in words
    safe_files      files in folders that others may have written
    files           checksums of files, free space on a disk, what a folder takes
    progress        how far long work is
    helper_process  another process that does one thing for this one
    plan            a training step as plain data: ops, builder, validator, simulator; no torch
    config          every setting: read, checked, written; no torch
    planes          where parameters are in the planes of a unit, and the bytes of planes; no torch
    adapters        adapters in the linear layers of blocks, and which layers get one
    machine         this machine and known ones, and how fast they are; no torch
    sources         data sets as rows: files, folders, registries, the hub; no torch
    examples        rows as conversations, pairs and texts; no torch
    dividing        texts as words, as a tokenizer divides them; no torch
    data            examples as rows of tokens; no torch
    hub             models on the hub: their files, here and there, and downloads
    passing         what passes between the blocks of a model
    tiles           parts of blocks that run in tiles along a row
    model           a Hugging Face model as units, and as a shape that the planner sees
    run_model       the model and tokenizer of a run, with tokens and positions that a user adds
    stored          the weights in the files of a model, as they were published
    runs            run folders and the records in them; no torch
    summaries       a run's line in a list, its note, its benchmarks; no torch
    fit             which plan, what it takes, whether it fits, what would help; no torch
    home            a model card, a Modelfile and the hub, for a model that is taken home
    host            planes in host memory, and AdamW on them
    graphs          kernels of blocks that are recorded and launched together
    exchange        weights and sums, between the ranks of a run
    embedding       vectors that are looked up: their noise, and their gradients row by row
    losses          losses of documents and of pairs, and what is said of them
    runtime         device buffers, lanes, and the engine that runs a plan
    measuring       how fast this machine does what a step does
    sampling        answers that are drawn token by token
    checkpoints     weights and states, into a run and out of it
    memory          the memory of a run while it trains, and what it is short of
    ranks           several processes that compute one run, a device each
    trackers        curves of a run for TensorBoard and others, from its record; no torch
    train           one run, from its folder to the last line of its record
    talk            conversations with weights
    benchmarks      tasks of lm-evaluation-harness, asked of the weights of a run
    bench           how near the engine comes to what this machine can do
    cli             text for a terminal
"""
