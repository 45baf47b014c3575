"""The `yard` command: a client of the site's gRPC services. `up` and `down` are the only parts that act on this machine."""
