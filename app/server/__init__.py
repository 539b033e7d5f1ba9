"""Who may ask, and how it is served: guard, login, connections, files of the page, Gradio."""
