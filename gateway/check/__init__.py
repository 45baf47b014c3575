"""Whether a built or quantized model still answers as its reference does: any two served models, compared."""
