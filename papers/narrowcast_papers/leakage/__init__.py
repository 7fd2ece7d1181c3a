"""What a server learns of the images that clients train on: inversion and membership, by codec."""
