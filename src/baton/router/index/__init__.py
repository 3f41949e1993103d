"""What engines hold of prompts, by their KV events."""
