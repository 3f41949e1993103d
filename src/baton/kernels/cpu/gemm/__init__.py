"""Products of a few or many bfloat16 rows with weights packed for them."""
