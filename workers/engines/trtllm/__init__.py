"""TensorRT-LLM worker groups: the server that runs in its interpreter. Standard library only; `tensorrt_llm` is imported late."""
