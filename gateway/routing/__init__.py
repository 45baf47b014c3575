"""Which model answers a request, and which replica of it. Pure functions over the site view; no I/O, no clock."""
