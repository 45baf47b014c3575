"""What only the stand-in has."""
