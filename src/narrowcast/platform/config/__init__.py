"""Files of experiments, read into frozen models; kinds and the classes of plugins; what runs code."""
