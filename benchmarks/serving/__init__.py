"""Load on deployments of one host."""
