"""What every daemon shares: errors, configuration, the wire, the daemon harness. Imports no torch."""
