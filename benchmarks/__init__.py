"""What pipejax takes beside what its peers take, compiled for the same GPUs: `make bench`."""
