"""Who asks, how much of it they may, and in which order they are let through to the pools."""
