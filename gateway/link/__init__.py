"""The gateway's side of the multiplexed streams to the pool drivers."""
