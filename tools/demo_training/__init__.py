"""Training of the demo checkpoints, from text that every Python contains: a Llama target with two EAGLE heads
and a DFlash head, a DeepSeek-type target with its MTP module and an EAGLE-3 head, and a hybrid of delta nets and
attention with its MTP module.
"""
