"""Several processes that compute one run, a device each."""
