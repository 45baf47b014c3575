"""Engines and quantized checkpoints that were made for a machine and a version: how they are made, kept and recognised."""
