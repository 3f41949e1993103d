"""From logits to tokens: sampling, verification of drafts, logprobs, and when a request ends."""
