"""Tables and figures of papers, recomputed and compared with the published numbers."""
