"""The trackers of one session of a run, as its process sees them: a helper process that follows the
record, and a thread that logs what went wrong there.

No step waits for it. At the end of the session, it has some seconds to send the rest.
"""

from __future__ import annotations

import contextlib
import threading

import msgspec

from engine.errors import RunError
from engine.helper_process import HelperProcess
from engine.paths import program_command
from engine.runs.record.events import LogLine
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.trackers.known_trackers import KINDS, destinations
from engine.runs.trackers.worker import PROGRAM

FINISH_SECONDS = 30.0
"""Seconds at most that trackers may take for the rest once a session ends."""
_POLL_SECONDS = 0.1


class Attached:
    """Feeds the trackers `names` from the record of `recorder` until `finish` or `close`. It raises
    nothing for a tracker that fails: that is logged, once for each.
    """

    def __init__(self, folder: RunFolder, recorder: RunRecorder, names: tuple[str, ...]):
        self._run_id = folder.id
        self._recorder = recorder
        self._warned: set[str] = set()
        self._helper: HelperProcess | None = None
        self._listener: threading.Thread | None = None
        self._closing = False
        for sentence in destinations(names, folder.path.parent):
            recorder.emit(LogLine("info", sentence))
        self._names = tuple(name for name in names if KINDS[name].is_installed)
        self._warned.update(name for name in names if name not in self._names)
        if self._names:
            self._start(folder)

    def _start(self, folder: RunFolder) -> None:
        try:
            self._helper = HelperProcess(PROGRAM, {}, quiet=True)
            asked = {"folder": str(folder.path.resolve()), "trackers": self._names}
            self._helper.send(msgspec.json.encode(asked) + b"\n")
        except OSError as error:
            self._all_failed(f"could not be started ({error.strerror})")
            return
        self._listener = threading.Thread(target=self._listen, name="trackers", daemon=True)
        self._listener.start()

    def finish(self, state: str) -> None:
        """Sends the rest of the record. The session ends in `state`; its last line comes after."""
        helper, listener = self._helper, self._listener
        if helper is None or listener is None:
            return
        ending = {"state": state, "seq": self._recorder.snapshot.last_seq}
        with contextlib.suppress(OSError):  # the helper is gone, which the listener reports
            helper.send(msgspec.json.encode(ending) + b"\n")
        listener.join(FINISH_SECONDS)
        if listener.is_alive():
            self._all_failed(f"did not take everything in {FINISH_SECONDS:.0f} s")
        self.close()

    def close(self) -> None:
        """Ends the helper, whatever it has sent."""
        self._closing = True
        if self._listener is not None:
            self._listener.join()
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def _listen(self) -> None:
        assert self._helper is not None
        while not self._closing:
            line = self._helper.next_line(_POLL_SECONDS)
            if line is None:
                continue
            if not line:  # the helper has ended
                if self._helper.wait() != 0:
                    self._all_failed("failed (its process has ended)")
                return
            self._warn(line["tracker"], line["what"])

    def _all_failed(self, what: str) -> None:
        for name in self._names:
            self._warn(name, what)

    def _warn(self, name: str, what: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        kind = KINDS[name]
        text = (
            f"{kind.title} (output.trackers) {what}. Training goes on and the record has "
            f"everything: {kind.remedy}. `{program_command()} track {self._run_id}` sends the rest "
            "when the run is over."
        )
        with contextlib.suppress(RunError):  # a record that cannot be written ends the run anyway
            self._recorder.emit(LogLine("warning", text))
