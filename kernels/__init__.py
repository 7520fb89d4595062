"""Long-sequence log-probability and loss: Triton on GPU, chunked torch elsewhere, one reference for every formula.

linear_logprob      log-probabilities of a linear head without [tokens, vocabulary] (`_torch`: blocks, `_triton`: kernels,
                    `support_triton`: kernels for rows whose sampling was truncated)
selective_logprob   the same for logits that exist already (`_triton`: kernels)
policy_loss         every objective on packed ragged sequences, with metrics as sums and counts (`_triton`: one kernel)
segments            reductions, broadcasts and scans over ragged sequences (`_triton`: kernels)
advantages          of samples in their group; gae and vtrace over ragged sequences (`_triton`: kernels)
weight_delta        changed bits of weights, overwriting them, fingerprints (`_triton`: kernels)
backends            which path computes: torch or Triton
flags               what an objective is compiled to; imports no torch
reference           the formulas, in the dtype of their inputs

Imports only torch and triton; Triton is imported when a kernel is used.
"""
