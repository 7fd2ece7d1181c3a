"""What goes over the wire, packed, and what it weighs."""
