"""Bytes of GPU memory of one training step, tensor by tensor.

Read `pipeline` (what a stage has), `model_states` (weights, gradients, optimizer: ZeRO),
`activations` (what a layer keeps: Korthikanti et al.), `output` (the logits and the loss),
`buffers` (what engines allocate beside), and `peak`, which adds them up.
"""
