"""The learner: groups to packed batches to off-policy-corrected updates to weight deltas."""
