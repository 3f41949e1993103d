"""The planner against every byte, on random engines."""
