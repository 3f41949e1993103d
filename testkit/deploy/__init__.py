"""The Kubernetes manifests of the examples: their types, and their pods as processes."""
