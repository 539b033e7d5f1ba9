"""The announcement of a server that starts: its address, and how those whom it does not know get
in.
"""

from __future__ import annotations

import shlex
import sys
import threading
import webbrowser
from pathlib import Path

from app.server.login import OPEN_TO_ALL, Login
from app.server.peers import own_programs_are_known
from engine.paths import named_folder, program_command

RUNS = "runs"
"""Where `launch.py link` looks by default."""


def announce(login: Login | None, url: str, runs: Path, opens_browser: bool) -> None:
    """Prints the address of a server that has started, and opens a browser there.

    A link is printed only where its owner alone reads, or where nobody would get in without it: a
    log may be open to others. The browser is given one only where it would not be known, since all
    accounts see the arguments of all programs.
    """
    print(f"Ramstream is at {url} (Ctrl-C stops it)", flush=True)
    opened = url
    if login is None:
        print(OPEN_TO_ALL, flush=True)
    else:
        link = f"{url}?token={login.link_token}"
        another = _command(runs)
        is_known = not login.has_password and own_programs_are_known()
        if login.has_password:
            text = f"Open {link} to log in without the password; the link works once."
        elif is_known and not sys.stdout.isatty():
            text = f"Other accounts need a link that works once: {another}"
        elif is_known:
            text = f"Other accounts open {link}, once; for more links: {another}"
        else:
            text = f"Open {link} to get in; the link works once. For more links: {another}"
            opened = link
        print(text, flush=True)
    if opens_browser:
        # The call may block until the browser has started, and the event loop must not block.
        threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()


def _command(runs: Path) -> str:
    """Returns the command that makes a link to the server with these runs."""
    command = f"{program_command()} link"
    return (
        command if runs == named_folder(RUNS) else f"{command} --runs-dir {shlex.quote(str(runs))}"
    )
