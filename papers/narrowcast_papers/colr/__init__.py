"""CoLR and SCoLR: tables and figures of the paper."""
