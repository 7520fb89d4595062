"""The actor: runs episodes against an inference engine and sends samples to the broker."""
