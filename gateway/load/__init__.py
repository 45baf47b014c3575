"""Load on a gateway, ours or any OpenAI-compatible one, and what it answered: behind `yard bench` and `yard stress`."""
