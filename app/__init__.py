"""The app: a server, a page and what they show of the engine.

Its rooms, in order. A file imports from its own room, from rooms listed before it, and from
`engine`; `tests/test_rooms.py` reads this list.

    words    how numbers are said on the screen
    form     settings as a form, and presets
    view     from a snapshot or a report to figures and words
    session  what the server owns: the run, the queue, detached runs, jobs
    pages    what each page answers, the page itself and its theme
    web      who may ask, and what is answered
    main     `serve`, which `launch.py` calls

`browser` holds scripts, styles and templates, and no Python. What loads torch is reached by imports
inside functions, which stand in `app/session/engine_calls.py` and in the page for measuring,
`app/pages/measuring.py`.
"""
