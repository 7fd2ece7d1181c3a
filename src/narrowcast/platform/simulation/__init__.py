"""The simulated world: clients' links and devices, their availability, and the virtual clock."""
