"""The broker: leases rollouts out, takes samples in, relays weights and sandbox jobs, keeps the ledger."""
