"""The app is a server, its pages, and what it keeps between two requests.

These are its packages. Each imports from those listed after it, never from one before it, and from
`engine`; import-linter checks that.

    main         `serve`, which `launch.py` calls
    application  all routes and Gradio's pages, behind the guard
    pages        a package for each page: what it answers, labels, routes, scripts, style, templates
    session      what the server owns: the run, the queue, detached runs, jobs, uploads
    shared       what several pages show: the line over a run, charts, nodes, base styles
    verdict      whether a run learns, whether its memory lasts, and what its time goes to
    form         settings as a form, and presets
    server       who may ask, and how it is served: guard, login, connections, files, Gradio
    labels       labels of states, and numbers as text
    gradio_stubs Gradio is imported without what it does for editors

Engine modules that load torch are imported inside functions, so that the page is served before
torch is loaded. Those functions are in `app/session/engine_calls.py` and
`app/pages/hardware/measuring.py`.
"""
