"""Tables and figures of papers, computed anew and set beside what was published."""
