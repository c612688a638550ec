"""Bytes of GPU memory of one training step, tensor by tensor.

Read `pipeline` (what a stage has), `states` (weights, gradients, optimizer: the ZeRO paper),
`activations` (what a layer keeps: Korthikanti et al.), `output` (the logits and the loss),
`buffers` (what engines allocate beside), and `peak`, which adds them up.
"""
