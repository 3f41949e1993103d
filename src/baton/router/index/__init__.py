"""What engines hold of prompts, as their KV events say."""
