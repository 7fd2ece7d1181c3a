"""The reference of experiment and study files, generated from the fields of their models."""
