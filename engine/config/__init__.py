"""Every setting, with its default, its limits and its checks. No torch."""
