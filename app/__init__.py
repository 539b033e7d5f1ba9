"""The app is a server, a page, and the parts of the engine that both of them show.

These are its rooms, in order. A file imports from its own room, from the rooms listed before it,
and from `engine`; `tests/test_rooms.py` reads this list.

    words    how numbers are written on the screen
    form     settings as a form, and presets
    verdict  says whether a run learns, whether its memory lasts, and what its time goes to
    view     turns a snapshot or a report into figures and words
    watch    follows a run, and prepares what its pages draw
    session  what the server owns: the run, the queue, detached runs, jobs, uploads
    pages    what each page answers, the page itself and its theme
    login    who is logged in, and where a request comes from
    web      access checks and routes
    main     `serve`, which `launch.py` calls

`browser` holds scripts, styles and templates, and no Python. Engine modules that load torch are
imported inside functions, so that the page is served before torch is loaded. Those functions are in
`app/session/engine_calls.py` and `app/pages/measuring.py`.
"""
