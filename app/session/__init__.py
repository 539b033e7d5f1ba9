"""The server's state: the run, the queue, detached runs, jobs and uploads."""
