"""Inference engines behind one interface (``base``): the embedded torch engine and SGLang."""
