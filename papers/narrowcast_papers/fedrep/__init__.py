"""FedRep: the linear representation of its theory."""
