"""What is known of TensorRT-LLM before it runs: what an installed version has, and what a model asks of it. Pure."""
