"""What is around the pages: the sidebar, the line over a run, jobs, the poll loop, the address."""
