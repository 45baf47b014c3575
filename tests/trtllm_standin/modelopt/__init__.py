"""Stands in for nvidia-modelopt: its names, and a checkpoint in the form that it writes."""
